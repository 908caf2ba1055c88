"""All of tritonclient, unmodified, against a repository of models written as users of Triton write them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.client_scripts import ClientScript, ReportOf, script_tests
from tests.e2e.server_process import ServerProcess

pytest.importorskip("onnxruntime")

MODELS = Path(__file__).resolve().parents[1] / "models_triton"
COMMON = ("triton_all_common.py", "triton_all_control.py")
SCRIPTS = [
    ClientScript("tritonclient", f"triton_all_{interface}.py", (kind,), COMMON)
    for interface in ("grpc", "http")
    for kind in (interface, f"{interface}.aio")
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportOf]:
    """What a client script found; it runs when it is first asked for, and all of them with one server."""
    flags = ["--model-control-mode", "explicit", "--load-model", "*", "--server-name", "triton"]
    flags += ["--shared-memory-prefix", "/"]
    flags += ["--trace-file", str(tmp_path_factory.mktemp("traces") / "trace.json")]
    with ServerProcess(str(MODELS), *flags) as server:
        yield cache(lambda script: script.run(server))


test_check, test_every_check_is_reported_in_order = script_tests(*SCRIPTS)


@pytest.mark.newest  # The onnx package is of that environment.
def test_the_onnx_files_are_what_their_script_makes() -> None:
    onnx = pytest.importorskip("onnx", reason="the onnx package makes the models")
    from tests.e2e import triton_onnx  # noqa: PLC0415 - it needs that package

    assert {file.parts[-3] for file in MODELS.glob("*/*/model.onnx")} == set(triton_onnx.models())
    for name, model in triton_onnx.models().items():
        assert onnx.load(triton_onnx.file_of(name)) == model, name
