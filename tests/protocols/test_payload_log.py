"""Payloads as CloudEvents: what a receiver gets, in which mode, and which events are dropped."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import triglot
from tests import environments
from tests.process import SECONDS, clean_environment
from tests.waiting import wait_until
from triglot import testing
from triglot.config.options import Config, ConfigError
from triglot.core.errors import ServingError
from triglot.inline import ServedAt
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve import payload_log

REQUEST = "org.kubeflow.serving.inference.request"
RESPONSE = "org.kubeflow.serving.inference.response"
Event = tuple[dict[str, str], Any]
"""Attributes and data."""


class Double(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if inputs["x"][0] < 0:
            raise triglot.InvalidArgument("below 0")
        return {"y": inputs["x"] * 2}


class Echo(triglot.Model):
    inputs = [triglot.TensorSpec("x", "BYTES", [-1]), triglot.TensorSpec("half", "FP16", [-1])]
    outputs = [triglot.TensorSpec("y", "BYTES", [-1]), triglot.TensorSpec("half", "FP16", [-1])]

    def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"], "half": inputs["half"]}


class Count(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def infer(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number in range(int(inputs["x"][0])):
            yield {"y": np.array([number], np.int32)}


MODELS = {"double": Double, "echo": Echo, "count": Count}


class Receiver:
    """A receiver of events over HTTP: what it got, and what it answers."""

    def __init__(self) -> None:
        self.messages: list[tuple[dict[str, str], str]] = []
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""

    def events(self) -> list[Event]:
        """Return the events in binary mode."""
        events = []
        for headers, body in self.messages:
            assert headers["content-type"] == "application/json"
            found = {key[3:]: unquote(value) for key, value in headers.items() if key.startswith("ce-")}
            events.append((found, json.loads(body)))
        return events


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            receiver.gate.wait(SECONDS)
            receiver.messages.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}/events?from=test"
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


def double(client: testing.Client, *values: float) -> list[float]:
    answer: list[float] = client.infer("double", {"x": np.array(values, np.float32)})["y"].tolist()
    return answer


def counts(server: ServedAt) -> dict[str, int]:
    """Return the metric of the model `double`, by outcome."""
    with testing.KServeRest(server) as client:
        _, _, text = client.send("GET", "/metrics")
    lines = [line for line in text.decode().splitlines() if line.startswith("triglot_payload_events_total{")]
    return {line.partition('outcome="')[2].partition('"')[0]: int(float(line.split()[-1])) for line in lines}


@pytest.mark.parametrize("client_class", testing.CLIENTS.values(), ids=testing.CLIENTS)
def test_pair_of_events_over_every_protocol(client_class: Callable[[ServedAt], testing.Client]) -> None:
    with receiving() as receiver:
        with testing.serve(MODELS, payload_log=receiver.url) as server, client_class(server) as client:
            assert double(client, 1.5, 2.0) == [3.0, 4.0]
        (asked, request), (answered, response) = receiver.events()
    assert asked["id"] == answered["id"]
    assert (asked["type"], answered["type"]) == (REQUEST, RESPONSE)
    for attributes in (asked, answered):
        assert attributes["inferenceservicename"] == "double"
        assert (attributes["component"], attributes["namespace"], attributes["endpoint"]) == ("predictor", "", "")
        assert (attributes["metadata"], attributes["annotations"]) == ("{}", "{}")
        assert (attributes["specversion"], attributes["source"]) == ("1.0", "triglot")
    (x,), (y,) = request["inputs"], response["outputs"]
    assert x == {"name": "x", "shape": [2], "datatype": "FP32", "data": [1.5, 2.0]}
    assert y == {"name": "y", "shape": [2], "datatype": "FP32", "data": [3.0, 4.0]}
    assert (response["model_name"], response["model_version"]) == ("double", "1")


def test_attributes_metadata_and_parameters() -> None:
    attributes = "namespace=ns,inferenceservicename=isvc,source=http://logger,annotations={}"
    with receiving() as receiver:
        options: dict[str, Any] = {"payload_log_attributes": attributes, "payload_log_metadata": "X-Tenant"}
        with testing.serve(MODELS, payload_log=receiver.url, **options) as server:
            body = {"id": "7", "parameters": {"p": 1}, "inputs": [tensor("x", "FP32", [1.0])]}
            headers = {"x-tenant": "ä b", "authorization": "secret", "content-type": "application/json"}
            with testing.KServeRest(server) as client:
                answer = client.send("POST", "/v2/models/double/infer", json.dumps(body).encode(), headers)
                assert answer[0] == 200, answer
        ((attributes_of, request), (_, response)) = receiver.events()
        assert "secret" not in str(receiver.messages)
    named = ("namespace", "inferenceservicename", "source")
    assert [attributes_of[name] for name in named] == ["ns", "isvc", "http://logger"]
    assert list(json.loads(attributes_of["metadata"])) == ["x-tenant"]
    assert (request["id"], request["parameters"], response["id"]) == ("7", {"p": 1}, "7")


def tensor(name: str, datatype: str, data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}


def test_bytes_that_are_no_text_and_half_precision() -> None:
    x, half = np.array([b"\xff", b"text"], object), np.array([0.5], np.float16)
    with receiving() as receiver:
        with testing.serve(MODELS, payload_log=receiver.url) as server, testing.KServeGrpc(server) as client:
            client.infer("echo", {"x": x, "half": half})
        ((_, request), (_, response)) = receiver.events()
    for tensors in (request["inputs"], response["outputs"]):
        texts, numbers = tensors
        assert texts["parameters"] == {"content_type": "base64"}
        assert list(map(base64.b64decode, texts["data"])) == [b"\xff", b"text"]
        assert (numbers["datatype"], numbers["data"]) == ("FP16", [0.5])


def test_each_response_of_a_stream_is_an_event() -> None:
    request = pb.ModelInferRequest(model_name="count")
    request.inputs.add(name="x", datatype="INT32", shape=[1]).contents.int_contents.append(3)
    method = "/inference.GRPCInferenceService/ModelStreamInfer"
    with receiving() as receiver:
        with testing.serve(MODELS, payload_log=receiver.url) as server, testing.KServeGrpc(server) as client:
            assert len(list(client.stream(method, [request], pb.ModelStreamInferResponse))) == 3
        events = receiver.events()
    assert [attributes["type"] for attributes, _ in events] == [REQUEST, RESPONSE, RESPONSE, RESPONSE]
    assert len({attributes["id"] for attributes, _ in events}) == 1
    assert [data["outputs"][0]["data"] for _, data in events[1:]] == [[0], [1], [2]]


def test_failed_request_has_no_response() -> None:
    with receiving() as receiver:
        with (
            testing.serve(MODELS, payload_log=receiver.url) as server,
            testing.KServeGrpc(server) as client,
            pytest.raises(ServingError, match="below 0"),
        ):
            double(client, -1.0)
        ((attributes, request),) = receiver.events()
    assert (attributes["type"], request["inputs"][0]["data"]) == (REQUEST, [-1.0])


def test_batches() -> None:
    with receiving() as receiver:
        receiver.gate.clear()
        options: dict[str, Any] = {"payload_log_batch": 4}
        with testing.serve(MODELS, payload_log=receiver.url, **options) as server:
            with testing.KServeGrpc(server) as client:
                for value in range(5):
                    double(client, float(value))
            receiver.gate.set()
        batches = [json.loads(body) for _, body in receiver.messages]
    assert {headers["content-type"] for headers, _ in receiver.messages} == {"application/cloudevents-batch+json"}
    assert max(map(len, batches)) == 4
    events = [event for batch in batches for event in batch]
    assert [event["type"] for event in events] == [REQUEST, RESPONSE] * 5
    assert [event["data"]["inputs"][0]["data"] for event in events[::2]] == [[float(value)] for value in range(5)]


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with testing.serve(MODELS, payload_log=str(file)) as server, testing.KServeGrpc(server) as client:
        double(client, 1.0)
        wait_until(lambda: len(file.read_bytes().splitlines()) == 2)
        file.rename(tmp_path / "old")
        double(client, 2.0)
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["type"], first["data"]["inputs"][0]["data"]) == (REQUEST, [2.0])
    assert file.stat().st_mode & 0o007 == 0
    assert (second["type"], second["data"]["outputs"][0]["data"]) == (RESPONSE, [4.0])


def test_slow_receiver_delays_no_call_and_drops_are_counted() -> None:
    """Its queue has room for 64 MiB."""
    calls, values = 8, [1.0] * 2**20
    with receiving() as receiver:
        receiver.gate.clear()
        with testing.serve(MODELS, payload_log=receiver.url) as server, testing.KServeGrpc(server) as client:
            for _ in range(calls):
                assert len(double(client, *values)) == len(values)
            assert receiver.messages == []
            assert counts(server)["dropped"] > 0
            receiver.gate.set()
            wait_until(lambda: sum(counts(server).values()) == 2 * calls)
            assert counts(server)["sent"] > 0


def test_small_events_that_wait_are_bounded_by_what_they_take() -> None:
    room, batch = payload_log.MAX_WAITING_BYTES // payload_log.EVENT_BYTES, 1000
    with receiving() as receiver:
        receiver.gate.clear()
        log = payload_log.PayloadLog(receiver.url, 1.0, batch, {}, ())
        event = payload_log.Event("double", lambda: {"id": "1"}, lambda: b"{}")
        for _ in range(room + 2 * batch):
            log.put(event, 0)
        (counter,) = log.counters()
        ((labels, dropped),) = counter.values
        assert labels == ("double", "dropped")
        assert batch <= dropped <= 2 * batch  # Of those that are not dropped, some are in the batch that is sent.
        receiver.gate.set()
        log.close()


def test_refused_events_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with receiving() as receiver:
        receiver.status = 500
        with testing.serve(MODELS, payload_log=receiver.url) as server, testing.KServeGrpc(server) as client:
            double(client, 1.0)
            wait_until(lambda: counts(server) == {"dropped": 2})
    assert f"payload events are lost: cannot write {receiver.url}: HTTP 500" in caplog.text


def test_share_of_requests() -> None:
    with receiving() as receiver:
        options: dict[str, Any] = {"payload_log_rate": 0.5}
        with (
            testing.serve(MODELS, payload_log=receiver.url, **options) as server,
            testing.KServeGrpc(server) as client,
        ):
            for _ in range(200):
                double(client, 1.0)
        events = receiver.events()
    assert 100 < len(events) < 300
    assert len({attributes["id"] for attributes, _ in events}) == len(events) // 2


@pytest.mark.newest
@pytest.mark.parametrize("batch", [1, 2])
def test_package_decodes_events(batch: int) -> None:
    with receiving() as receiver:
        options: dict[str, Any] = {"payload_log_batch": batch, "payload_log_attributes": "namespace=näme 1%"}
        with (
            testing.serve(MODELS, payload_log=receiver.url, **options) as server,
            testing.KServeGrpc(server) as client,
        ):
            double(client, 1.5)
        messages = receiver.messages
    if batch > 1:  # The package reads single events only.
        kind = {"content-type": "application/cloudevents+json"}
        messages = [(kind, json.dumps(event)) for _, body in messages for event in json.loads(body)]
    done = subprocess.run(
        [str(environments.python("cloudevents")), str(Path(__file__).with_name("clients") / "decode_events.py")],
        input=json.dumps(messages),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ((asked, request), (answered, response)) = json.loads(done.stdout)
    assert (asked["type"], answered["type"]) == (REQUEST, RESPONSE)
    assert asked["id"] == answered["id"]
    assert asked["namespace"] == "näme 1%"
    assert (request["inputs"][0]["data"], response["outputs"][0]["data"]) == ([1.5], [3.0])


@pytest.mark.parametrize("text", ["namespace", "Namespace=x", "id=7", "metadata=x"])
def test_wrong_attributes(text: str) -> None:
    with pytest.raises(ConfigError, match="payload_log_attributes: expected NAME=VALUE"):
        Config(payload_log_attributes=text)


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    for url in ("http://", "https:///path", "ftp://host"):
        with pytest.raises(ConfigError, match=f"payload_log: expected http://HOST, .* or a file, got '{url}'"):
            Config(payload_log=url)
    with pytest.raises(ConfigError, match=r"payload_log: cannot write .*: No such file"):
        testing.serve(MODELS, payload_log=str(tmp_path / "none" / "events")).__enter__()
