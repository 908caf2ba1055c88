"""triglot.pb: a pool of its own, and what it makes of a proto file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from triglot.pb import POOL, load_file, service
from triglot.pb.grpc.health.v1 import health_pb2
from triglot.pb.kserve import inference_pb2, model_config_pb2

IMPORT_ALL = """
import importlib, pkgutil, triglot.pb
names = [m.name for m in pkgutil.walk_packages(triglot.pb.__path__, "triglot.pb.") if not m.ispkg]
modules = [importlib.import_module(name) for name in names]
"""

NOTHING_IS_REGISTERED = """
from google.protobuf import descriptor_pool
default = descriptor_pool.Default()
symbols = 0
for module in modules:
    file = module.DESCRIPTOR
    for kind in (file.message_types_by_name, file.enum_types_by_name, file.services_by_name):
        for declared in kind.values():
            symbols += 1
            try:
                default.FindFileContainingSymbol(declared.full_name)
            except KeyError:
                continue
            raise SystemExit(f"{declared.full_name} is in the default pool")
print(symbols)
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def test_nothing_is_registered_in_the_default_pool() -> None:
    # In a process of its own: other tests may import client libraries, which do register.
    done = run(IMPORT_ALL + NOTHING_IS_REGISTERED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 90


def test_the_pure_python_backend_is_refused() -> None:
    done = run("import triglot.pb", PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python")
    assert done.returncode == 1
    assert "ImportError: protobuf runs on its 'python' implementation" in done.stderr


def test_only_protobuf_and_the_standard_library_are_imported() -> None:
    done = run(
        "import sys; before = set(sys.modules); import triglot; above = set(sys.modules) - before"
        + IMPORT_ALL
        + "new = {name.split('.')[0] for name in set(sys.modules) - before - above}\n"
        + "print(*sorted(new - sys.stdlib_module_names))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["google", "triglot"]


def test_messages_of_two_files_fit_together() -> None:
    config = model_config_pb2.ModelConfig(name="m", input=[model_config_pb2.ModelInput(name="x")])
    response = inference_pb2.ModelConfigResponse(config=config)
    assert type(response.config) is model_config_pb2.ModelConfig
    assert response.config.input[0].name == "x"


def test_enums() -> None:
    assert model_config_pb2.DataType.Name(model_config_pb2.TYPE_BF16) == "TYPE_BF16"
    assert model_config_pb2.DataType.Value("TYPE_FP32") == model_config_pb2.TYPE_FP32 == 11
    assert health_pb2.HealthCheckResponse.ServingStatus.Value("SERVING") == 1
    assert health_pb2.HealthCheckResponse.SERVING == 1


def test_classes_are_made_once() -> None:
    assert load_file("kserve/inference.proto")["ModelInferRequest"] is inference_pb2.ModelInferRequest
    assert inference_pb2.ModelInferRequest.DESCRIPTOR.file.pool is POOL
    assert inference_pb2.DESCRIPTOR.name == "kserve/inference.proto"


def test_services_are_found_by_their_full_name() -> None:
    assert service("grpc.health.v1.Health").methods_by_name["Watch"].server_streaming
    with pytest.raises(KeyError, match="Nothing"):
        service("inference.Nothing")


def test_an_unknown_file_is_a_key_error() -> None:
    with pytest.raises(KeyError, match=r"nothing\.proto"):
        load_file("nothing.proto")
