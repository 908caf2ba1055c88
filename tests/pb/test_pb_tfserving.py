"""The TensorFlow Serving contract: our declarations against those of the unmodified client packages."""

from __future__ import annotations

import json
import pkgutil
import sys

import pytest
from google.protobuf import text_format
from google.protobuf.message import Message

import triglot.pb.tfserving
from tests import environments
from tests.pb.descriptor_scripts import CLIENTS, dump, run
from tests.process import outcome, start_python
from triglot.pb import POOL, service
from triglot.pb.tfserving import metadata_pb2, model_server_config_pb2, option_files_pb2
from triglot.pb.tfserving.model_pb2 import ModelSpec

RUN_SECONDS = 300
FOLDER = "triglot.pb.tfserving."
OURS = tuple(module.name for module in pkgutil.iter_modules(triglot.pb.tfserving.__path__, FOLDER))
THEIRS = (
    "tensorflow_serving.apis.classification_pb2",
    "tensorflow_serving.apis.get_model_metadata_pb2",
    "tensorflow_serving.apis.get_model_status_pb2",
    "tensorflow_serving.apis.inference_pb2",
    "tensorflow_serving.apis.input_pb2",
    "tensorflow_serving.apis.logging_pb2",
    "tensorflow_serving.apis.model_management_pb2",
    "tensorflow_serving.apis.model_pb2",
    "tensorflow_serving.apis.model_service_pb2",
    "tensorflow_serving.apis.predict_pb2",
    "tensorflow_serving.apis.prediction_log_pb2",
    "tensorflow_serving.apis.prediction_service_pb2",
    "tensorflow_serving.apis.regression_pb2",
    "tensorflow_serving.apis.session_service_pb2",
    "tensorflow_serving.apis.status_pb2",
    "tensorflow_serving.config.file_system_storage_path_source_pb2",
    "tensorflow_serving.config.log_collector_config_pb2",
    "tensorflow_serving.config.logging_config_pb2",
    "tensorflow_serving.config.model_server_config_pb2",
    "tensorflow_serving.config.platform_config_pb2",
    "tensorflow.compiler.xla.tsl.protobuf.error_codes_pb2",
    "tensorflow.core.example.example_pb2",
    "tensorflow.core.example.feature_pb2",
    "tensorflow.core.framework.resource_handle_pb2",
    "tensorflow.core.framework.tensor_pb2",
    "tensorflow.core.framework.tensor_shape_pb2",
    "tensorflow.core.framework.types_pb2",
    "tensorflow.core.protobuf.meta_graph_pb2",
    "tensorflow.core.protobuf.saved_model_pb2",
)

# What we leave out, with all that is in it.
OMITTED = {
    # Never served, and only refused in a warm-up file.
    "tensorflow.serving.SessionService",
    "tensorflow.serving.SessionRunRequest",
    "tensorflow.serving.SessionRunResponse",
    # Options of TensorFlow's own runtime.
    "tensorflow.serving.PlatformConfig",
    "tensorflow.serving.PlatformConfigMap",
    # In no call.
    "tensorflow.FeatureList",
    "tensorflow.FeatureLists",
    "tensorflow.SequenceExample",
    "tensorflow.SerializedDType",
    # In the graph.
    "tensorflow.AssetFileDef",
    "tensorflow.CollectionDef",
    "tensorflow.MetaGraphDef.CollectionDefEntry",
    "tensorflow.MetaGraphDef.MetaInfoDef.FunctionAliasesEntry",
}
# What we leave out of messages that we have.
OMITTED_FIELDS = {
    "tensorflow.serving.SessionRunLog:1": "request",
    "tensorflow.serving.SessionRunLog:2": "response",
    "tensorflow.TensorInfo.CompositeTensor:1": "type_spec",
    "tensorflow.MetaGraphDef:2": "graph_def",
    "tensorflow.MetaGraphDef:3": "saver_def",
    "tensorflow.MetaGraphDef:4": "collection_def",
    "tensorflow.MetaGraphDef:6": "asset_file_def",
    "tensorflow.MetaGraphDef:7": "object_graph_def",
    "tensorflow.MetaGraphDef.MetaInfoDef:1": "meta_graph_version",
    "tensorflow.MetaGraphDef.MetaInfoDef:2": "stripped_op_list",
    "tensorflow.MetaGraphDef.MetaInfoDef:3": "any_info",
    "tensorflow.MetaGraphDef.MetaInfoDef:6": "tensorflow_git_version",
    "tensorflow.MetaGraphDef.MetaInfoDef:7": "stripped_default_attrs",
    "tensorflow.MetaGraphDef.MetaInfoDef:8": "function_aliases",
}
# What is Triglot's own.
OWN = ("tensorflow.serving.ModelConfig:1000", "tensorflow.serving.ModelConfig.TrafficEntry")
# What the server reads from files; no client package declares it.
FILES_ONLY = {
    "tensorflow.serving.BatchingParameters",
    "tensorflow.serving.MonitoringConfig",
    "tensorflow.serving.PrometheusConfig",
    "tensorflow.serving.SSLConfig",
}
# Messages without fields.
EMPTY = {
    "tensorflow.serving.FileSystemStoragePathSourceConfig.ServableVersionPolicy.All",
    "tensorflow.serving.SessionRunLog",
}


def run_with_the_client(script: str, *arguments: str) -> str:
    """What the script prints in a process that has imported the client; it must succeed."""
    python = environments.python("tensorflow")
    done = outcome(start_python([str(CLIENTS / script), *arguments], python), RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    return dump(sys.executable, *OURS)


def omitted(name: str) -> str:
    """The omission that explains why we lack `name`; the name itself when there is none."""
    return next((known for known in OMITTED if name == known or name.startswith((f"{known}.", f"{known}:"))), name)


def test_equal_to_the_client_but_for_the_known_omissions(ours: dict[str, str]) -> None:
    theirs = json.loads(run_with_the_client("descriptors_dump.py", *THEIRS))
    shared = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    more = {name for name in ours.keys() - shared if not name.startswith(OWN)}
    assert {name.split(":")[0] for name in more} == FILES_ONLY
    missing = {omitted(name.split("/")[0]) for name in theirs.keys() - shared}
    assert missing == OMITTED | OMITTED_FIELDS.keys()
    for name, field in OMITTED_FIELDS.items():
        assert f" {field} json=" in theirs[name]


def test_messages_survive_the_way_through_either_side(ours: dict[str, str]) -> None:
    counts = json.loads(run_with_the_client("descriptors_round_trip.py", *OURS, "--", *THEIRS))
    assert counts.keys() == {name for name, text in ours.items() if text == "message"} - FILES_ONLY
    assert {name for name, count in counts.items() if count == 0} == EMPTY


@pytest.mark.parametrize("order", ["first", "last"])
def test_one_process_can_use_ours_and_tensorflow(order: str) -> None:
    modules = (
        "tensorflow",
        "tensorflow_serving.apis.prediction_service_pb2_grpc",
        "tensorflow_serving.apis.predict_pb2",
    )
    arguments = "descriptors_one_process.py", order, *modules
    if order == "last":
        count = run_with_the_client(*arguments)
    else:
        count = run(environments.python("tensorflow"), *arguments)
    assert int(count) > len(OURS)


@pytest.mark.parametrize(
    ("message", "text", "wire"),
    [
        (
            option_files_pb2.BatchingParameters(),
            "max_batch_size { value: 1 } batch_timeout_micros { value: 2 } max_enqueued_batches { value: 3 } "
            "num_batch_threads { value: 4 } thread_pool_name { value: 'p' } allowed_batch_sizes: 5 "
            "allowed_batch_sizes: 6 pad_variable_length_inputs: true "
            "enable_large_batch_splitting { value: true } max_execution_batch_size { value: 9 }",
            "0a020801 12020802 1a020803 22020804 2a030a0170 32020506 3801 42020801 4a020809",
        ),
        (
            option_files_pb2.MonitoringConfig(),
            "prometheus_config { enable: true path: '/m' }",
            "0a06 0801 12022f6d",
        ),
        (
            option_files_pb2.SSLConfig(),
            "server_key: 'k' server_cert: 's' custom_ca: 'c' client_verify: true",
            "0a016b 120173 1a0163 2001",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_option_files(message: Message, text: str, wire: str) -> None:
    text_format.Parse(text, message)
    assert message.SerializeToString() == bytes.fromhex(wire)


def test_a_model_config_file() -> None:
    text = """
    model_config_list: {
      config: {
        name: "m", base_path: '/models/m', model_platform: "tensorflow"  # as people write it
        model_version_policy { specific { versions: 1, versions: 2 } }
        version_labels { key: "stable" value: 1 }
        logging_config {
          custom_logging_config { [type.googleapis.com/tensorflow.serving.ModelSpec] { name: "x" } }
        }
      },
    }
    """
    server = model_server_config_pb2.ModelServerConfig()
    text_format.Parse(text, server, descriptor_pool=POOL)
    [model] = server.model_config_list.config
    assert (model.name, model.base_path, model.model_platform) == ("m", "/models/m", "tensorflow")
    assert model.model_version_policy.WhichOneof("policy_choice") == "specific"
    assert list(model.model_version_policy.specific.versions) == [1, 2]
    assert dict(model.version_labels) == {"stable": 1}
    unpacked = ModelSpec()
    assert model.logging_config.custom_logging_config.Unpack(unpacked)
    assert unpacked == ModelSpec(name="x")


def test_version_zero_differs_from_no_version() -> None:
    specs = [ModelSpec(), ModelSpec(version={"value": 0}), ModelSpec(version_label="")]
    assert [spec.WhichOneof("version_choice") for spec in specs] == [None, "version", "version_label"]
    assert [spec.SerializeToString() for spec in specs] == [b"", b"\x12\x00", b"\x22\x00"]
    assert [ModelSpec.FromString(spec.SerializeToString()) for spec in specs] == specs


def test_metadata_in_an_any() -> None:
    signatures = metadata_pb2.SignatureDefMap()
    signatures.signature_def["serving_default"].method_name = "tensorflow/serving/predict"
    response = metadata_pb2.GetModelMetadataResponse()
    response.metadata["signature_def"].Pack(signatures)
    packed = response.metadata["signature_def"]
    assert packed.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    assert packed.value == signatures.SerializeToString()


def test_both_services_are_in_the_pool() -> None:
    assert list(service("tensorflow.serving.PredictionService").methods_by_name) == [
        "Classify",
        "Regress",
        "Predict",
        "MultiInference",
        "GetModelMetadata",
    ]
    assert list(service("tensorflow.serving.ModelService").methods_by_name) == [
        "GetModelStatus",
        "HandleReloadConfigRequest",
    ]
    with pytest.raises(KeyError):
        service("tensorflow.serving.SessionService")
