"""Our declarations against those of the clients and of the stock packages, one by one."""

from __future__ import annotations

import json
import sys

import pytest

from tests import environments
from tests.pb.descriptor_scripts import dump, run

KSERVE_FILES = ("triglot.pb.kserve.inference_pb2", "triglot.pb.kserve.model_config_pb2")

# What the kserve client declares otherwise: its declaration, then ours.
PROPERTIES = "repeated message inference.ModelMetadataResponse.PropertiesEntry properties json=properties"
KSERVE_DIFFERENCES = {
    # Its Load and Unload requests hold the model's name only, under the number that repository_name has here:
    # a request with a repository_name and no model_name comes from it.
    "inference.RepositoryModelLoadRequest:1": (
        "string model_name json=modelName",
        "string repository_name json=repositoryName",
    ),
    "inference.RepositoryModelLoadRequest:2": (None, "string model_name json=modelName"),
    "inference.RepositoryModelLoadRequest:3": (
        None,
        "repeated message inference.RepositoryModelLoadRequest.ParametersEntry parameters json=parameters",
    ),
    "inference.RepositoryModelUnloadRequest:1": (
        "string model_name json=modelName",
        "string repository_name json=repositoryName",
    ),
    "inference.RepositoryModelUnloadRequest:2": (None, "string model_name json=modelName"),
    "inference.RepositoryModelUnloadRequest:3": (
        None,
        "repeated message inference.RepositoryModelUnloadRequest.ParametersEntry parameters json=parameters",
    ),
    # Its Load and Unload responses say what happened; ours, as Triton's, are empty.
    "inference.RepositoryModelLoadResponse:1": ("string model_name json=modelName", None),
    "inference.RepositoryModelLoadResponse:2": ("bool isLoaded json=isLoaded", None),
    "inference.RepositoryModelUnloadResponse:1": ("string model_name json=modelName", None),
    "inference.RepositoryModelUnloadResponse:2": ("bool isUnloaded json=isUnloaded", None),
    "inference.ModelMetadataResponse:6": (None, PROPERTIES),
    # It knows the first three kinds of parameter only, and drops the others.
    "inference.InferParameter:4": (
        None,
        "double double_param json=doubleParam oneof=parameter_choice presence",
    ),
    "inference.InferParameter:5": (
        None,
        "uint64 uint64_param json=uint64Param oneof=parameter_choice presence",
    ),
}


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    return dump(sys.executable, *KSERVE_FILES)


def test_equal_to_tritonclient(ours: dict[str, str]) -> None:
    modules = ("tritonclient.grpc.service_pb2", "tritonclient.grpc.model_config_pb2")
    theirs = dump(environments.python("tritonclient"), *modules)
    assert theirs["inference.GRPCInferenceService/ModelStreamInfer"] == (
        "stream inference.ModelInferRequest -> stream inference.ModelStreamInferResponse"
    )
    # The protocol's own document has it; Triton and KServe left it out.
    properties = "inference.ModelMetadataResponse:6"
    theirs[properties] = PROPERTIES
    entry = "inference.ModelMetadataResponse.PropertiesEntry"
    assert {name: text for name, text in ours.items() if not name.startswith(entry)} == theirs


def test_equal_to_kserve_but_for_the_known_differences(ours: dict[str, str]) -> None:
    theirs = dump(environments.python("kserve"), "kserve.protocol.grpc.grpc_predict_v2_pb2")
    # We may have more messages and more methods, but not more in a message that both have.
    shared = {name: text for name, text in ours.items() if ":" in name and name.split(":")[0] in theirs}
    shared |= {name: text for name, text in ours.items() if name in theirs}
    names = sorted(theirs.keys() | shared.keys())
    assert len(names) > 100
    differences = {
        name: (theirs.get(name), shared.get(name)) for name in names if theirs.get(name) != shared.get(name)
    }
    assert differences == KSERVE_DIFFERENCES


@pytest.mark.newest
def test_equal_to_the_stock_health_service() -> None:
    assert dump(sys.executable, "triglot.pb.grpc.health.v1.health_pb2") == dump(
        sys.executable, "grpc_health.v1.health_pb2"
    )


def test_equal_to_the_stock_reflection_service() -> None:
    stock = dump(sys.executable, "grpc_reflection.v1alpha.reflection_pb2")
    assert dump(sys.executable, "triglot.pb.grpc.reflection.v1alpha.reflection_pb2") == stock
    # v1 has no stock package: it is v1alpha under another name.
    renamed = json.loads(json.dumps(stock).replace("grpc.reflection.v1alpha", "grpc.reflection.v1"))
    assert dump(sys.executable, "triglot.pb.grpc.reflection.v1.reflection_pb2") == renamed


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize(
    ("client", "modules"),
    [
        ("tritonclient", ("tritonclient.grpc", "tritonclient.grpc.service_pb2")),
        ("kserve", ("kserve", "kserve.protocol.grpc.grpc_predict_v2_pb2")),
    ],
)
def test_one_process_can_use_ours_and_a_clients(client: str, modules: tuple[str, ...], order: str) -> None:
    assert int(run(environments.python(client), "descriptors_one_process.py", order, *modules)) > 0
