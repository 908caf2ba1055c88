"""`triglot tfserving` as a process, and `triglot serve` where Vertex AI starts it."""

from __future__ import annotations

import re
import shutil
import signal
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.process import (
    FREE_PORTS,
    IDENTITY,
    SECONDS,
    Triglot,
    is_listening,
    run_triglot,
    unused_ports,
    write_model,
)
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import infer, server_ready
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until
from triglot.pb.tfserving import predict_pb2, tensor_pb2

HERE = {"TRIGLOT_HOST": "127.0.0.1", "TRIGLOT_GRPC_PORT": "0", "TRIGLOT_REST_PORT": "0"}


class TfServing(Triglot):
    """`triglot tfserving` on free ports of 127.0.0.1."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(*arguments, command="tfserving", environment=HERE | dict(environment or {}))

    def rest(self) -> Rest:
        return Rest(self.ports()[1])


def base_path(folder: Path, *versions: int) -> Path:
    """A model that answers `x` plus its version."""
    for version in versions:
        write_model(folder / str(version), IDENTITY.replace('inputs["x"]}', f'inputs["x"] + {version}}}'))
    return folder


def predict(rest: Rest, model: str, value: int = 7) -> Any:
    status, answer = rest.post(f"/v1/models/{model}:predict", {"inputs": [value]})
    assert status == 200, answer
    return answer["outputs"][0]


def model_text(name: str, folder: Path, more: str = "") -> str:
    return f"config {{ name: '{name}' base_path: '{folder}' model_platform: 'tensorflow' {more} }}\n"


def write_config(file: Path, *models: str) -> None:
    """In one step, so that no reader sees half of it."""
    new = file.with_suffix(".new")
    new.write_text(f"model_config_list {{\n{''.join(models)}}}\n")
    new.replace(file)


# --- one model ---

WAITS = """
import time

import triglot


class Waits(triglot.Model):
    inputs = outputs = [triglot.TensorSpec("x", "FP32", [-1])]

    def infer(self, inputs, call):
        while not call.cancelled:
            time.sleep(0.01)
        raise RuntimeError("late")
"""


@pytest.mark.parametrize("milliseconds", [50, 1250])
def test_an_error_at_the_deadline_names_the_flag(milliseconds: int, tmp_path: Path) -> None:
    write_model(tmp_path / "m" / "1", WAITS)
    flags = (f"--model_base_path={tmp_path / 'm'}", "--model_name=m")
    with TfServing(*flags, f"--rest_api_timeout_in_ms={milliseconds}") as server:
        status, answer = server.rest().post("/v1/models/m:predict", {"instances": [1.0]})
        assert status == 504
        text = f"the server's --rest_api_timeout_in_ms of {milliseconds} passed while the model ran"
        assert answer == {"error": text}


def test_a_model_that_comes_after_the_start(tmp_path: Path) -> None:
    """At a path that is missing first, and empty then; until a version is there the ports are closed."""
    folder = tmp_path / "m"
    flags = (f"--model_base_path={folder}", "--model_name=m", "--file_system_poll_wait_seconds=0.05")
    with TfServing(*flags) as server:
        server.stderr.wait_for(f" W Could not find base path {folder} for servable m; waiting for it\n")
        folder.mkdir()
        server.stderr.wait_for(
            f" W No versions of servable m found under base path {folder}, .*; waiting for it\n"
        )
        assert "REST on" not in server.stderr.text()
        base_path(tmp_path / "elsewhere", 1)
        (tmp_path / "elsewhere" / "1").rename(folder / "1")
        assert predict(server.rest(), "m") == 8
        server.stop()
    assert server.stderr.text().count("waiting for it") == 2


def test_who_waits_for_models_can_be_stopped_and_may_not_want_to(tmp_path: Path) -> None:
    flags = (f"--model_base_path={tmp_path / 'm'}", "--model_name=m")
    with TfServing(*flags) as server:
        server.stderr.wait_for("waiting for it\n")
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
    assert "stopped while loading" in server.stderr.text()
    for environment, more in (
        ({"TRIGLOT_WAIT_FOR_MODELS": "false"}, ""),
        ({}, "--file_system_poll_wait_seconds=0"),
    ):
        with TfServing(*flags, *filter(None, [more]), environment=environment) as server:
            assert server.wait() == 1
        assert f" E Could not find base path {tmp_path / 'm'} for servable m\n" in server.stderr.text()


def test_what_scripts_wait_for(tmp_path: Path) -> None:
    base_path(tmp_path / "models" / "half", 1)
    variables = {"MODEL_NAME": "half", "MODEL_BASE_PATH": str(tmp_path / "models")}
    with TfServing(environment=variables) as server:
        grpc_port, rest_port = server.ports()
        server.stderr.wait_for(rf"Running gRPC ModelServer at 127\.0\.0\.1:{grpc_port} \.\.\.")
        server.stderr.wait_for(rf"Exporting HTTP/REST API at:localhost:{rest_port} \.\.\.")
        assert predict(Rest(rest_port), "half") == 8
        server.stop()


def test_one_model_over_both_protocols(tmp_path: Path) -> None:
    folder = base_path(tmp_path / "m", 1, 3)
    with TfServing(f"--model_base_path={folder}", "--model_name=half") as server:
        grpc_port, rest_port = server.ports()
        assert predict(Rest(rest_port), "half") == 10
        request = predict_pb2.PredictRequest(model_spec={"name": "half"})
        request.inputs["x"].dtype = tensor_pb2.DT_INT32
        request.inputs["x"].tensor_shape.dim.add(size=1)
        request.inputs["x"].int_val.append(7)
        with grpc_channel(grpc_port) as channel:
            call = rpc(channel, "/tensorflow.serving.PredictionService/Predict", predict_pb2.PredictResponse)
            answer = call(request, timeout=SECONDS)
            with pytest.raises(grpc.RpcError) as caught:
                server_ready(channel)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (list(answer.outputs["y"].int_val), answer.model_spec.version.value) == ([10], 3)


def test_rest_is_closed_unless_its_port_is_named(tmp_path: Path) -> None:
    grpc_port, rest_port = unused_ports()
    folder = base_path(tmp_path / "m", 1)
    arguments = (f"--model_base_path={folder}", f"--port={grpc_port}")
    with Triglot(*arguments, command="tfserving", environment={"TRIGLOT_HOST": "127.0.0.1"}) as server:
        server.stderr.wait_for(rf"gRPC on 127\.0\.0\.1:{grpc_port} in ")
        assert "REST on" not in server.stderr.text()
    with Triglot(
        *arguments[:1],
        "--port=0",
        f"--rest_api_port={rest_port}",
        command="tfserving",
        environment={"TRIGLOT_HOST": "127.0.0.1"},
    ) as server:
        server.stderr.wait_for(rf" REST on 127\.0\.0\.1:{rest_port} in ")
        assert "gRPC on" not in server.stderr.text()
        assert not is_listening(grpc_port)


def test_every_client_may_call_by_default(tmp_path: Path) -> None:
    grpc_port, _ = unused_ports()
    folder = base_path(tmp_path / "m", 1)
    with Triglot(f"--model_base_path={folder}", f"--port={grpc_port}", command="tfserving") as server:
        server.stderr.wait_for(rf"gRPC on 0\.0\.0\.0:{grpc_port} in ")
        server.stderr.wait_for(r" W listening on 0\.0\.0\.0 without authentication")


def test_warnings_of_flags_come_first(tmp_path: Path) -> None:
    folder = base_path(tmp_path / "m", 1)
    per_model = "--enable_per_model_batching_parameters"
    with TfServing(f"--model_base_path={folder}", "--grpc_max_threads=4", per_model) as server:
        server.ports()
    first, second, *_ = server.stderr.text().splitlines()
    assert first.endswith(" W not supported, ignored: --grpc_max_threads")
    assert second.endswith(f" W {per_model}: ignored without --enable_batching")


def test_a_new_version_is_served(tmp_path: Path) -> None:
    folder = base_path(tmp_path / "m", 1)
    with TfServing(f"--model_base_path={folder}", environment={"TRIGLOT_POLL_INTERVAL": "0.05"}) as server:
        rest = server.rest()
        assert predict(rest, "default") == 8
        base_path(tmp_path / "new", 2)
        (tmp_path / "new" / "2").rename(folder / "2")
        wait_until(lambda: bool(predict(rest, "default") == 9))


def test_what_dashboards_show(tmp_path: Path) -> None:
    folder = base_path(tmp_path / "m", 1)
    file = tmp_path / "monitoring.config"
    file.write_text("prometheus_config { enable: true }")
    flags = (f"--model_base_path={folder}", "--model_name=m", f"--monitoring_config_file={file}")
    with TfServing(*flags, "--max_num_load_retries=0", "--file_system_poll_wait_seconds=0.05") as server:
        rest = server.rest()
        write_model(tmp_path / "new" / "2", BROKEN)
        (tmp_path / "new" / "2").rename(folder / "2")
        server.stderr.wait_for(" E m version 2 could not be loaded: ")
        assert predict(rest, "m") == 8
        with urllib.request.urlopen(f"http://127.0.0.1:{rest.port}/monitoring/prometheus/metrics") as page:
            lines = page.read().decode().splitlines()
    load = ":tensorflow:cc:saved_model:load"
    for line in (
        ':tensorflow:serving:request_count{model_name="m",status="OK"} 1',
        ':tensorflow:serving:runtime_latency_count{model_name="m",API="Predict",runtime="TF1"} 1',
        ":tensorflow:core:graph_runs{} 1",
        f'{load}_attempt_count{{model_path="{folder / "1"}",status="success"}} 1',
        f'{load}_attempt_count{{model_path="{folder / "2"}",status="fail"}} 1',
    ):
        assert line in lines
    assert any(re.fullmatch(rf'{load}_latency{{model_path="{folder / "1"}"}} [0-9]+', line) for line in lines)


BROKEN = "1 / 0"


def test_a_load_that_fails_is_tried_again(tmp_path: Path) -> None:
    """The ports stay closed; and the server ends when all tries have failed."""
    folder = tmp_path / "m"
    write_model(folder / "1", BROKEN)
    flags = (f"--model_base_path={folder}", "--model_name=m", "--load_retry_interval_micros=50000")
    with TfServing(*flags, "--max_num_load_retries=1000000") as server:
        server.stderr.wait_for("E m version 1 could not be loaded: .*; retry 2 of 1000000 in 0.05 s")
        assert "REST on" not in server.stderr.text()
        base_path(folder, 1)
        assert predict(server.rest(), "m") == 8
        server.stop()
    write_model(folder / "1", BROKEN)
    with TfServing(*flags, "--max_num_load_retries=2") as server:
        assert server.wait() == 1
    assert len(re.findall(" E m version 1 could not be loaded: ", server.stderr.text())) == 3


def test_a_version_that_is_going_to_be_tried_again_is_loading(tmp_path: Path) -> None:
    folder = base_path(tmp_path / "m", 1)
    flags = (f"--model_base_path={folder}", "--model_name=m", "--file_system_poll_wait_seconds=0.05")
    for retries, state, code in ((1, "LOADING", "OK"), (0, "END", "UNKNOWN")):
        with TfServing(*flags, f"--max_num_load_retries={retries}") as server:
            rest = server.rest()
            write_model(tmp_path / "new" / "2", BROKEN)
            (tmp_path / "new" / "2").rename(folder / "2")
            server.stderr.wait_for(" E m version 2 could not be loaded: ")
            status, answer = rest.get("/v1/models/m/versions/2")
            (found,) = answer["model_version_status"]
            assert (status, found["state"], found["status"]["error_code"]) == (200, state, code)
            assert predict(rest, "m") == 8
            server.stop()
        shutil.rmtree(folder / "2")


# --- the configuration file ---


def test_models_policies_and_labels(tmp_path: Path) -> None:
    folder = base_path(tmp_path / "m", 1, 2, 3)
    file = tmp_path / "models.config"
    write_config(
        file,
        model_text("latest", folder),
        model_text("all", folder, "model_version_policy { all {} }"),
        model_text(
            "some",
            folder,
            "model_version_policy: { specific: { versions: [1, 2] } } version_labels { key: 'stable' value: 1 }",
        ),
    )
    with TfServing(f"--model_config_file={file}", "--model_name=unused") as server:
        rest = server.rest()
        assert [predict(rest, name) for name in ("latest", "all", "some")] == [10, 10, 9]
        assert predict(rest, "all/versions/1") == 8
        assert predict(rest, "some/labels/stable") == 8
        assert rest.get("/v1/models/some/versions/3")[0] == 404
        assert rest.get("/v1/models/unused")[0] == 404


def test_the_file_is_followed(tmp_path: Path) -> None:
    first, two = base_path(tmp_path / "one", 1), base_path(tmp_path / "two", 2)
    file = tmp_path / "models.config"
    write_config(file, model_text("one", first))
    with TfServing(f"--model_config_file={file}", "--model_config_file_poll_wait_seconds=0.05") as server:
        rest = server.rest()
        assert predict(rest, "one") == 8
        write_config(file, "config {")
        server.stderr.wait_for(rf" W Invalid protobuf file: '{file}': .*; the models stay as they are\n")
        assert predict(rest, "one") == 8
        write_config(file, model_text("two", two))
        wait_until(lambda: rest.post("/v1/models/two:predict", {"inputs": [7]}) == (200, {"outputs": [9]}))
        wait_until(lambda: rest.post("/v1/models/one:predict", {"inputs": [1]})[0] == 404)
        server.stderr.wait_for(" I the model list changed: new: two; removed: one\n")
        # What cannot be loaded has replaced the list all the same.
        write_config(file, model_text("three", tmp_path / "nowhere"))
        server.stderr.wait_for(f" E Could not find base path {tmp_path / 'nowhere'} for servable three\n")
        wait_until(lambda: rest.post("/v1/models/two:predict", {"inputs": [1]})[0] == 404)
        assert server.stderr.text().count("the models stay as they are") == 1
        server.stop()
    assert "Traceback" not in server.stderr.text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_config_list {", "Invalid protobuf file: '{file}': 1:19 : Expected \"}}\"."),
        (
            "model_config_list { config { name: 'm' base_path: '/m' } }",
            "{file}: Illegal setting neither ModelServerConfig::model_type (deprecated) nor "
            "ModelServerConfig::model_platform, model name is m",
        ),
    ],
)
def test_a_wrong_file_ends_the_start(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.config"
    file.write_text(text)
    completed = run_triglot("tfserving", f"--model_config_file={file}")
    assert (completed.returncode, completed.stderr) == (2, f"triglot: {message.format(file=file)}\n")


# --- Vertex AI ---


def test_vertex_ai_names_the_port_and_the_model(tmp_path: Path) -> None:
    _, rest_port = unused_ports()
    write_model(tmp_path / "churn")
    environment = {"AIP_HTTP_PORT": str(rest_port), "AIP_STORAGE_URI": str(tmp_path / "churn")}
    with Triglot("--grpc-port", "0", environment=environment) as server:
        found = server.stderr.wait_for(rf"gRPC on 0\.0\.0\.0:(\d+) and REST on 0\.0\.0\.0:{rest_port} in ")
        assert Rest(rest_port).get("/v2/models") == (200, {"models": ["churn"]})
        with grpc_channel(int(found[1])) as channel:
            assert infer(channel, "churn") == 7


def test_a_path_wins_over_the_model_of_vertex_ai(tmp_path: Path) -> None:
    for name in ("churn", "other"):
        write_model(tmp_path / name)
    environment = {
        "AIP_HTTP_PORT": "1",
        "AIP_STORAGE_URI": "gs://bucket/model",
        "TRIGLOT_HOST": "127.0.0.1",
    }
    with Triglot(tmp_path / "other", *FREE_PORTS, environment=environment) as server:
        assert Rest(server.ports()[1]).get("/v2/models") == (200, {"models": ["other"]})


def test_a_model_in_a_bucket_is_not_fetched() -> None:
    completed = run_triglot("serve", environment={"AIP_HTTP_PORT": "8080", "AIP_STORAGE_URI": "gs://bucket/model"})
    assert completed.returncode == 2
    assert re.fullmatch(r"triglot: AIP_STORAGE_URI: expected a local folder.*\n", completed.stderr)
