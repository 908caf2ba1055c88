"""The log as JSON: every line an object, and those of a request with its ids, wherever its model runs."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.process import FREE_PORTS, SECONDS, Triglot, run_triglot, write_model
from tests.protocol_clients.channel import SERVICE, grpc_channel, rpc
from tests.protocol_clients.kserve import infer_request
from tests.protocol_clients.rest import Rest
from tests.span_receivers import SERVER, grpc_receiver
from tests.text_project import inference, write_project
from tests.waiting import wait_until
from triglot.pb.kserve import inference_pb2 as pb

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
QUICK = (*FREE_PORTS, "--drain-delay", "0", "--log-format", "json")
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"

MODEL = """
import asyncio
import logging
import triglot

log = logging.getLogger("my.model")

class Logs(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [{rows}])]
    outputs = [triglot.TensorSpec("y", "INT32", [{rows}])]
    execution = "{execution}"
    {more}

    {infer}
"""
PLAIN = """def infer(self, inputs):
        log.warning("ran\\n%s", inputs["x"])
        return {"y": inputs["x"]}"""
ON_LOOP = """async def infer(self, inputs, call):
        log.warning("ran %s", call.traceparent)
        await asyncio.sleep(0)
        await asyncio.to_thread(log.warning, "ran beside")
        return {"y": inputs["x"]}"""
YIELDS = """def infer(self, inputs):
        try:
            for _ in range(2):
                log.warning("ran")
                yield {"y": inputs["x"]}
        finally:
            log.warning("ran to its end")"""
FAILS = 'def infer(self, inputs):\n        raise KeyError("\\n{}")'
LISTS = """def infer(self, inputs): ...

    {is_async}def infer_batch(self, inputs, calls):
        log.warning("ran")
        return [{{"y": one["x"]}} for one in inputs]"""
BATCHED = "dynamic_batching = triglot.DynamicBatching(max_batch_size=2, max_queue_delay=60, preferred_sizes=[2])"
SEQUENCES = """max_batch_size = 2
    sequence_batching = triglot.SequenceBatching(
        strategy=triglot.OldestStrategy(max_candidate_sequences=2, preferred_sizes=[2], max_queue_delay=60)
    )"""
SINGLES = {
    "thread": ("thread", PLAIN),
    "loop": ("thread", ON_LOOP),
    "process": ("process", PLAIN),
    "process_loop": ("process", ON_LOOP),
}
STREAMS = {
    "yields": ("thread", YIELDS),
    "yields_loop": ("thread", f"async {YIELDS}"),
    "yields_process": ("process", YIELDS),
    "yields_process_loop": ("process", f"async {YIELDS}"),
}
ON_LOOP_OR_NOT = {"": "", "_loop": "async "}
BATCHES = {
    **{f"joined_{name}": single for name, single in SINGLES.items()},
    "listed": ("thread", LISTS.format(is_async="")),
    "listed_process": ("process", LISTS.format(is_async="")),
    "listed_loop": ("thread", "async " + LISTS.format(is_async="async ")),
}
FAILURES = {
    "fails": ("thread", FAILS),
    "fails_loop": ("thread", f"async {FAILS}"),
    "fails_process": ("process", FAILS),
}

TRITON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({{"name": "x", "data_type": "TYPE_INT32", "dims": [-1]}})
        config.add_output({{"name": "y", "data_type": "TYPE_INT32", "dims": [-1]}})
        return config

    {is_async}def execute(self, requests):
        pb_utils.Logger.log_warn(f"ran {{requests[0].trace().get_context()}}")
        answers = [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", one.inputs()[0].as_numpy())]) for one in requests
        ]
        {end}
"""
RETURNS = "return answers"
SENDS = """for request, answer in zip(requests, answers):
            request.get_response_sender().send(answer, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
IN_A_PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
TRITONS = {
    f"triton_{number}": (TRITON.format(is_async=is_async, end=end), f"{decoupled}\n{execution}")
    for number, (is_async, end, decoupled, execution) in enumerate(
        (is_async, end, decoupled, execution)
        for is_async in ("", "async ")
        for end, decoupled in ((RETURNS, ""), (SENDS, DECOUPLED))
        for execution in ("", IN_A_PROCESS)
    )
}


def write_models(folder: Path) -> None:
    for names, rows, more in ((SINGLES, 1, ""), (STREAMS, 1, ""), (FAILURES, 1, ""), (BATCHES, -1, BATCHED)):
        for name, (execution, infer) in names.items():
            write_model(folder / name, MODEL.format(rows=rows, execution=execution, infer=infer, more=more))
    write_model(folder / "sequences", MODEL.format(rows=-1, execution="thread", infer=PLAIN, more=SEQUENCES))
    for name, (text, config) in TRITONS.items():
        write_model(folder / name, text)
        (folder / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')


BATCH_INFER = "\n    def batch_infer(self, inp, contexts):\n        "
Line = dict[str, Any]


class Logged:
    """A server whose log is JSON."""

    def __init__(self, server: Triglot) -> None:
        self._server = server
        self.grpc_port, rest_port = server.ports()
        self.rest = Rest(rest_port)

    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self._server.stderr.text().split("\n")[:-1]]

    def of(self, name: str, request_id: str) -> list[Line]:
        """The lines that `name` has logged for a request, once the request's access line is there."""
        self._server.stderr.wait_for(rf'"triglot\.access"[^\n]*"request_id": "{request_id}"')
        of_request = [
            line for line in self.lines() if request_id in (line.get("request_id"), *line.get("request_ids", ()))
        ]
        return [line for line in of_request if line["logger"] == name]

    def infer(self, model: str, *request_ids: str, traceparent: str = TRACEPARENT) -> None:
        """Over gRPC, at the same time."""
        with grpc_channel(self.grpc_port) as channel:
            infer = rpc(channel, "ModelInfer", pb.ModelInferResponse)
            calls = [
                infer.future(self.request(model, request_id), metadata=[("traceparent", traceparent)])
                for request_id in request_ids
            ]
            for call in calls:
                call.result(SECONDS)

    def post(self, path: str, body: object, headers: Mapping[str, str]) -> str:
        """The text of the answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.rest.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "traceparent": TRACEPARENT, **headers},
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            text: str = response.read().decode()
            return text

    def request(self, model: str, request_id: str) -> pb.ModelInferRequest:
        request = infer_request(model)
        request.id = request_id
        if model == "sequences":
            request.parameters["sequence_id"].string_param = request_id
            request.parameters["sequence_start"].bool_param = True
        return request

    def stream(self, model: str, request_id: str) -> int:
        """How many answers came."""
        with grpc_channel(self.grpc_port) as channel:
            stream = channel.stream_stream(
                f"{SERVICE}ModelStreamInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelStreamInferResponse.FromString,
            )
            answers = stream(iter([self.request(model, request_id)]), metadata=[("traceparent", TRACEPARENT)])
            return len([answer for answer in answers if not answer.error_message])


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    folder = tmp_path_factory.mktemp("json_log")
    write_models(folder)
    with Triglot(folder, *QUICK, "--access-log") as server:
        yield Logged(server)
        server.stop()


ONE = {"trace_id": TRACE, "span_id": SPAN, "version": 1}


def belongs(line: Line, model: str, request_id: str) -> bool:
    return line.items() >= (ONE | {"request_id": request_id, "model": model}).items()


def common(line: Line) -> list[str]:
    assert TIME.fullmatch(line["time"])
    return list(line)[:4]


# --- lines of models ---


@pytest.mark.parametrize("model", SINGLES)
def test_what_a_model_logs_for_a_request(logged: Logged, model: str) -> None:
    request_id = f"of-{model}"
    logged.infer(model, request_id)
    lines = logged.of("my.model", request_id)
    assert [line["message"] for line in lines] == (
        [f"ran {TRACEPARENT}", "ran beside"] if "loop" in model else ["ran\n[7]"]
    )
    for line in lines:
        assert common(line) == ["time", "level", "logger", "message"]
        assert belongs(line, model, request_id)
        assert line["level"] == "WARNING"
        assert line.get("process") == (f"{model} version 1: process 0" if "process" in model else None)


@pytest.mark.parametrize("model", STREAMS)
def test_what_a_model_logs_for_a_stream(logged: Logged, model: str) -> None:
    request_id = f"of-{model}"
    assert logged.stream(model, request_id) == 2
    lines = logged.of("my.model", request_id)
    assert [line["message"] for line in lines] == ["ran", "ran", "ran to its end"]
    assert all(belongs(line, model, request_id) for line in lines)


def test_a_stream_over_rest(logged: Logged) -> None:
    text = logged.post("/v2/models/yields_loop/generate_stream", {"id": "of-sse", "x": [7]}, {})
    assert text.count("data: ") == 2
    lines = logged.of("my.model", "of-sse")
    assert [line["message"] for line in lines] == ["ran", "ran", "ran to its end"]
    assert all(belongs(line, "yields_loop", "of-sse") for line in lines)


@pytest.mark.parametrize("model", [*BATCHES, "sequences"])
def test_what_a_model_logs_for_a_batch(logged: Logged, model: str) -> None:
    ids = [f"of-{model}-{number}" for number in range(2)]
    logged.infer(model, *ids)
    lines = logged.of("my.model", ids[0])
    assert lines
    for line in lines:
        assert sorted(line["request_ids"]) == ids
        assert line["trace_ids"] == [TRACE]
        assert (line["batch_size"], line["model"], line["version"]) == (2, model, 1)
        assert "request_id" not in line


@pytest.mark.parametrize("model", FAILURES)
def test_an_exception_is_in_the_object_of_its_request(logged: Logged, model: str) -> None:
    request_id = f"of-{model}"
    with pytest.raises(grpc.RpcError):
        logged.infer(model, request_id)
    (line,) = logged.of("triglot.core.errors", request_id)
    assert belongs(line, model, request_id)
    assert line["level"] == "ERROR"
    assert line["exception"].startswith(("Traceback (most recent", "triglot.executors.remote"))
    assert 'raise KeyError("\\n{}")\n' in line["exception"]
    (access,) = logged.of("triglot.access", request_id)
    assert access["code"] == "INTERNAL"


@pytest.mark.parametrize("model", TRITONS)
def test_what_a_triton_model_logs(logged: Logged, model: str) -> None:
    request_id = f"of-{model}"
    if DECOUPLED in TRITONS[model][1]:
        assert logged.stream(model, request_id) == 1
    else:
        logged.infer(model, request_id)
    (line,) = logged.of("triglot.models", request_id)
    assert line["message"] == f'ran {{"traceparent": "{TRACEPARENT}"}}'
    assert belongs(line, model, request_id)


@pytest.mark.parametrize("batching", ["", "batching: {type: dynamic, max_batch_size: 2, batch_timeout_us: 1000}"])
def test_what_a_grps_project_logs(tmp_path: Path, batching: str) -> None:
    named = inference(("reader", "1.0.0"), ("reader", "2.0.0")).replace("none}", f"none, {batching}}}")
    named = named.replace("nodes: [", "nodes: [{name: first, type: model, model: reader-1.0.0}, ")
    write_project(tmp_path, models=named)
    inferer = tmp_path / "src" / "customized_inferer.py"
    listed = "return [self.infer(one, context) for one, context in zip(inp, contexts)]"
    inferer.write_text(
        inferer.read_text().replace("\ninferer_register", f"{BATCH_INFER}{listed}\n\ninferer_register")
    )
    variables = {
        "GRPC_PORT": "0",
        "REST_PORT": "0",
        "DRAIN_DELAY": "0",
        "LOG_FORMAT": "json",
        "ACCESS_LOG": "true",
    }
    environment = {f"TRIGLOT_{name}": value for name, value in variables.items()}
    with Triglot(tmp_path, "--online", command="grps", environment=environment) as server:
        logged = Logged(server)
        for model in ("reader-1.0.0", ""):
            logged.post(
                "/grps/v1/infer/predict",
                {"str_data": "a", "model": model},
                {"X-Request-Id": f"of-{model or 'dag'}"},
            )
        for model, texts in (("reader-1.0.0", ["a"]), ("dag", ["a", "texta"])):
            lines = logged.of("grps.user", f"of-{model}")
            assert [line["message"] for line in lines] == [f"asked for {text}" for text in texts]
            assert all(line["trace_id"] == TRACE for line in lines)
        server.stop()


# --- access lines ---


def test_an_access_line_says_who_what_and_how_long(logged: Logged) -> None:
    logged.infer("thread", "of-access")
    (line,) = logged.of("triglot.access", "of-access")
    assert common(line) == ["time", "level", "logger", "message"]
    assert line["duration_ms"] > 0
    assert line["bytes_in"] > 0
    assert line["bytes_out"] > 0
    fixed_fields = {
        name: line[name] for name in line if name not in ("time", "duration_ms", "bytes_in", "bytes_out")
    }
    assert fixed_fields == {
        "level": "INFO",
        "logger": "triglot.access",
        "message": "kserve GRPC ModelInfer",
        "request_id": "of-access",
        "trace_id": TRACE,
        "span_id": SPAN,
        "model": "thread",
        "version": 1,
        "protocol": "kserve",
        "entrypoint": "GRPC",
        "method": "ModelInfer",
        "code": "OK",
        "peer": "127.0.0.1",
    }


def test_a_request_that_is_named_by_a_header(logged: Logged) -> None:
    logged.post("/v1/models/process:predict", {"instances": [1]}, {"X-Request-Id": "of-header"})
    (line,) = logged.of("triglot.access", "of-header")
    assert (line["protocol"], line["entrypoint"], line["method"]) == ("tfserving", "REST", "predict")
    (model_line,) = logged.of("my.model", "of-header")
    assert belongs(model_line, "process", "of-header")


def test_lines_name_the_spans_of_a_sampled_call(tmp_path: Path) -> None:
    names = ("thread", "process")
    for name in names:
        execution, infer = SINGLES[name]
        write_model(tmp_path / name, MODEL.format(rows=1, execution=execution, infer=infer, more=""))
    with grpc_receiver() as (url, received):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
        with Triglot(tmp_path, *QUICK, "--access-log", environment=environment) as server:
            logged = Logged(server)
            for name in names:
                logged.infer(name, name)
            server.stop()
            lines = {name: (logged.of("my.model", name), logged.of("triglot.access", name)) for name in names}
        spans = received.wait_for(6)
    for name in names:
        ((model_line,), (access,)) = lines[name]
        (call,) = [span for span in spans if span.kind == SERVER and span.id == access["span_id"]]
        assert call.parent == SPAN
        (compute,) = [span for span in spans if span.id == model_line["span_id"]]
        assert compute.parent == call.id
        assert model_line["trace_id"] == access["trace_id"] == TRACE


def test_texts_of_clients_stay_in_their_fields(logged: Logged) -> None:
    name, request_id = 'no"\n}{"level": "CRITICAL', 'of\n"odd\u2028'
    with pytest.raises(grpc.RpcError):
        logged.infer(name, request_id, traceparent="forged")

    def found() -> list[Line]:
        return [line for line in logged.lines() if line.get("model") == name]

    wait_until(found)
    (line,) = found()
    assert (line["level"], line["code"], line["request_id"]) == ("INFO", "NOT_FOUND", request_id)
    assert "trace_id" not in line


def test_health_checks_and_metrics_have_lines_only_when_verbose(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    with Triglot(tmp_path / "m", *QUICK, "--access-log") as server:
        logged = Logged(server)
        asked = ("/v2/health/ready", "/v2/models/m", "/v2/models/none/ready")

        def ask() -> None:
            for path in asked:
                logged.rest.get(path)
            with urllib.request.urlopen(f"http://127.0.0.1:{logged.rest.port}/metrics", timeout=SECONDS):
                pass

        ask()
        logged.rest.post("/v2/logging", {"log_verbose_level": 1})
        ask()
        logged.rest.post("/v2/logging", {"log_verbose_level": 0})
        ask()
        server.stop()
        found = [line["method"] for line in logged.lines() if line["logger"] == "triglot.access"]
    quiet = found[: found.index("/v2/logging")]
    assert len(quiet) == 2  # The metadata, and the health check that failed.
    at = found.index("/v2/logging", len(quiet) + 1)
    assert len(found[len(quiet) + 1 : at]) == 4
    assert found[at + 1 :] == quiet


def test_access_lines_as_text(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    with Triglot(tmp_path / "m", *FREE_PORTS, "--drain-delay", "0", "--access-log") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            request = infer_request("m")
            request.id = "seven of\tnine"
            infer = rpc(channel, "ModelInfer", pb.ModelInferResponse)
            infer(request, metadata=[("traceparent", TRACEPARENT)], timeout=SECONDS)
        assert Rest(rest_port).infer("m")[0] == 200
        server.stop()
        text = server.stderr.text()
    about = rf"model=m version=1 id='seven of\\tnine' trace={TRACE}"
    assert re.search(rf"I kserve GRPC ModelInfer {about} code=OK ms=\d+\.\d{{3}}\n", text)
    assert re.search(r"I kserve REST infer model=m version=1 code=OK ms=\d+\.\d{3}\n", text)


# --- all lines ---


def test_the_format_is_not_for_clients_to_change(logged: Logged) -> None:
    status, settings = logged.rest.get("/v2/logging")
    assert (status, settings["log_format"]) == (200, "json")
    assert logged.rest.post("/v2/logging", settings | {"log_file": None}) == (200, settings)
    status, answer = logged.rest.post("/v2/logging", {"log_format": "ISO8601"})
    assert (
        answer["error"] == "log_format: cannot be changed over the network from 'json', which its readers expect"
    )
    assert logged.rest.get("/v2/logging")[1] == settings


def test_workers_say_which_one_writes(tmp_path: Path) -> None:
    write_model(tmp_path / "process", MODEL.format(rows=1, execution="process", infer=PLAIN, more=""))
    with Triglot(tmp_path, *QUICK, "--workers", "2", "--access-log") as server:
        logged = Logged(server)
        for number in range(8):
            logged.infer("process", f"of-{number}")
        server.stop()
        lines = logged.lines()
    assert {line.get("worker") for line in lines} == {None, 1, 2}
    accessed = {line["request_id"]: line["worker"] for line in lines if line["logger"] == "triglot.access"}
    by_model = {line["request_id"]: line["worker"] for line in lines if line["logger"] == "my.model"}
    assert accessed == by_model
    assert len(by_model) == 8


def test_a_server_that_cannot_start_says_so_in_an_object(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "import warnings\nwarnings.warn('old')\n1 / 0\n")
    completed = run_triglot("serve", tmp_path / "m", *QUICK)
    assert completed.returncode == 1
    lines = [json.loads(line) for line in completed.stderr.splitlines()]
    assert lines[-1]["level"] == "CRITICAL"
    assert lines[-1]["message"].startswith("1 of the models could not be loaded (m); ")
    assert any("ZeroDivisionError" in line["message"] for line in lines)
    assert any(line["logger"] == "py.warnings" and "UserWarning: old" in line["message"] for line in lines)
