"""Requests that TensorFlow's tools recorded run before a version takes calls, and keep out one that fails them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.e2e.model_configs import config_flag, config_text
from tests.e2e.server_process import QUICK, ServerProcess
from tests.e2e.steady_caller import Caller
from tests.process import PLAIN_MODELS, SECONDS, Triglot, run_triglot
from tests.protocol_clients.channel import rpc
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import RELOAD, failure, predict, predict_request, statuses
from triglot.pb.tfserving import management_pb2, predict_pb2

# The records are written by TensorFlow's own writer.
pytestmark = pytest.mark.newest

WARM = "warm"
FAILING = {
    "warm_failing": (
        "INVALID_ARGUMENT",
        "warm-up record 1 failed: Expects arg[0] to be float but int32 is provided",
    ),
    "warm_damaged": ("DATA_LOSS", ". Please verify your warmup data is in TFRecord format."),
    "warm_session": ("UNIMPLEMENTED", "Unsupported log_type for warmup: session_run_log"),
    "warm_too_often": ("INVALID_ARGUMENT", "Number of warmup records exceeds the maximum (1000) at "),
    "warm_unreadable": ("INVALID_ARGUMENT", "Failed to parse warmup record: "),
}
RECORDED = Path("assets.extra") / "tf_serving_warmup_requests"
ONE_CALL_OF_EACH_KIND = 11111.0


@pytest.fixture
def channel(empty_server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(empty_server.grpc_address) as channel:
        yield channel


def reload(channel: grpc.Channel, models: Path, *names: str) -> None:
    """Serve these models alone. Raise `grpc.RpcError`."""
    request = management_pb2.ReloadConfigRequest(config={"model_config_list": {}})
    for name in names:
        request.config.model_config_list.config.add(
            name=name, base_path=str(models / name), model_platform="tensorflow"
        )
    rpc(channel, RELOAD, management_pb2.ReloadConfigResponse)(request, timeout=SECONDS)


def count(channel: grpc.Channel) -> float | None:
    """What the model counted, or None while it is not served."""
    request = predict_pb2.PredictRequest(model_spec={"name": WARM, "signature_name": "count"})
    try:
        response = predict(channel, request)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise
    (value,) = response.outputs["count"].float_val
    return value


def test_recorded_requests_of_every_kind_come_first(channel: grpc.Channel, models: Path) -> None:
    reload(channel, models)
    with Caller(lambda: count(channel)) as caller:
        caller.wait_for(None)
        reload(channel, models, WARM)
        caller.wait_for(ONE_CALL_OF_EACH_KIND)
    assert caller.answers == [None, ONE_CALL_OF_EACH_KIND]


def test_recorded_requests_that_fail(channel: grpc.Channel, models: Path) -> None:
    reload(channel, models, WARM)
    code, details = failure(lambda: reload(channel, models, WARM, *FAILING))
    assert code is grpc.StatusCode.UNKNOWN
    assert details.startswith(
        "5 model(s) did not become available: {{{name: warm_failing version: 1} due to error: "
    )
    for name, (code_name, part) in FAILING.items():
        assert f"{{name: {name} version: 1}} due to error: {code_name}: " in details
        ((version, state, text, found_code),) = statuses(channel, name)
        assert (version, state, found_code) == (1, "END", code_name)
        assert part in text, text
        assert failure(lambda name=name: predict(channel, predict_request(name, [1.0]))) == (  # type: ignore[misc]
            grpc.StatusCode.NOT_FOUND,
            f"Servable not found for request: Latest({name}): {text}",
        )
    assert count(channel) == ONE_CALL_OF_EACH_KIND


def test_recorded_requests_of_a_python_model(models: Path, tmp_path: Path) -> None:
    """One that fails them ends the start, unless they are not to be run."""
    shutil.copytree(PLAIN_MODELS / "half_plus_three", tmp_path / "m" / "1")
    (tmp_path / "m" / "1" / RECORDED).parent.mkdir()
    shutil.copy(models / "warm_failing" / "1" / RECORDED, tmp_path / "m" / "1" / RECORDED)
    flag = config_flag(tmp_path / "models.config", config_text("m", tmp_path / "m"))
    completed = run_triglot("tfserving", flag, environment=QUICK)
    assert completed.returncode == 1
    assert completed.stderr.endswith(
        "m version 1 could not be loaded: warm-up record 1 failed: "
        "Expects arg[0] to be float but int32 is provided\n"
        "triglot: 1 of the models could not be loaded (m)\n"
    )
    with Triglot(flag, "--enable_model_warmup=false", command="tfserving", environment=QUICK) as server:
        answer = Rest(server.ports()[1]).post("/v1/models/m:predict", {"instances": [1.0]})
        assert answer == (200, {"predictions": [3.5]})
