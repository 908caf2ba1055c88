"""What /metrics says of the calls of a grps project: each once, as what it was."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.grps_toys import TOYS, grps_arguments
from tests.process import SECONDS, Triglot
from tests.protocol_clients.channel import grpc_channel
from tests.protocol_clients.grps import PREDICT_PATH, SERVICE, post, predict, predict_streaming
from tests.waiting import wait_until
from triglot.pb.grps.grps_pb2 import GrpsMessage

CALLS = ("Predict", "PredictStreaming", "predict")
Samples = dict[str, list[tuple[Mapping[str, str], float]]]


def samples_of(address: str) -> Samples:
    """What /metrics says, by name."""
    connection = HTTPConnection(address, timeout=SECONDS)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def counts_at(address: str) -> Counter[Any]:
    """Calls of models by method, model and code, once none runs."""
    wait_until(lambda: not any(n for labels, n in samples_of(address)["triglot_in_flight"] if is_call(labels)))
    return Counter(
        {
            (labels["method"], labels["model"], labels["version"], labels["code"]): int(count)
            for labels, count in samples_of(address)["triglot_requests_total"]
            if is_call(labels)
        }
    )


def is_call(labels: Mapping[str, str]) -> bool:
    return labels["protocol"] == "grps" and labels["method"] in CALLS


def total(samples: Samples, name: str, **wanted: str) -> float:
    """The sum of what has these labels."""
    return sum(n for labels, n in samples.get(name, []) if wanted.items() <= labels.items())


@contextmanager
def serving(folder: Path, config: str = "default") -> Iterator[tuple[str, grpc.Channel]]:
    """The HTTP address of the toy project, and a channel to it."""
    with Triglot(*grps_arguments(TOYS, folder, config), command="grps") as server:
        grpc_port, http_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            yield f"127.0.0.1:{http_port}", channel


def test_every_kind_of_call(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, channel):
        predict(channel, GrpsMessage(str_data="x"))
        predict(channel, GrpsMessage(model="raise-1.0.0", str_data="x"))
        failed = predict(channel, GrpsMessage(model="set_err-1.0.0", str_data="x"))
        predict(channel, GrpsMessage(model="nobody-1.0.0", str_data="x"))
        stream = channel.unary_stream(SERVICE + "PredictStreaming")
        answers = list(stream(GrpsMessage(model="stream2-1.0.0").SerializeToString(), timeout=SECONDS))
        predict_streaming(channel, GrpsMessage(model="stream_err-1.0.0"))
        post(address, {"str_data": "x"}, "model=echo-1.0.0")
        post(address, {"str_data": "x"}, "model=raise-1.0.0")
        post(address, {"nothing": 1}, "model=echo-1.0.0")
        _, chunks = post(address, {"str_data": "x"}, "model=stream2-1.0.0&streaming=true")
        post(address, {"str_data": "x"}, "model=stream_err-1.0.0&streaming=true")
        assert counts_at(address) == {
            ("Predict", "echo_dag", "1", "OK"): 1,
            ("Predict", "raise", "1", "INTERNAL"): 1,
            ("Predict", "set_err", "1", "INTERNAL"): 1,
            ("Predict", "nobody-1.0.0", "", "NOT_FOUND"): 1,
            ("PredictStreaming", "stream2", "1", "OK"): 1,
            ("PredictStreaming", "stream_err", "1", "INTERNAL"): 1,
            ("predict", "echo", "1", "OK"): 1,
            ("predict", "echo", "1", "INVALID_ARGUMENT"): 1,
            ("predict", "raise", "1", "INTERNAL"): 1,
            ("predict", "stream2", "1", "OK"): 1,
            ("predict", "stream_err", "1", "INTERNAL"): 1,
        }
        samples = samples_of(address)
        assert total(samples, "triglot_response_bytes_total", model="set_err") == failed.ByteSize()
        for method, sent in ("PredictStreaming", b"".join(answers)), ("predict", chunks):
            labels = {"model": "stream2", "method": method}
            assert total(samples, "triglot_response_bytes_total", **labels) == len(sent)


def test_a_pause_of_the_model_is_nobodys_decoding_or_encoding(tmp_path: Path) -> None:
    pause = 3  # Seconds, of the toy: no codec takes as long, however slow the machine is.
    with serving(tmp_path) as (address, channel):
        predict_streaming(channel, GrpsMessage(model="slow-1.0.0", str_data="x"))
        post(address, {"str_data": "x"}, "model=slow-1.0.0&streaming=true")
        assert counts_at(address) == {
            ("PredictStreaming", "slow", "1", "OK"): 1,
            ("predict", "slow", "1", "OK"): 1,
        }
        samples = samples_of(address)
        assert total(samples, "triglot_compute_seconds_sum", model="slow") >= 2 * pause
        assert total(samples, "triglot_codec_seconds_sum") < pause


def until_in_flight(address: str, method: str, calls: int = 1) -> None:
    """Wait until the server has so many calls of this method."""
    wait_until(lambda: total(samples_of(address), "triglot_in_flight", method=method) == calls)


@contextmanager
def occupied(address: str, channel: grpc.Channel, gate: Path) -> Iterator[None]:
    """The one call that max_concurrency allows, over all models, is at work until the block ends."""
    with ThreadPoolExecutor() as threads:
        first = threads.submit(predict, channel, GrpsMessage(model="gated-1.0.0", str_data=str(gate)))
        try:
            until_in_flight(address, "Predict")
            yield
        finally:
            gate.touch()
            first.result(SECONDS)


def test_waiting_for_a_turn_is_no_computing(tmp_path: Path) -> None:
    waits = 1.0
    with serving(tmp_path, "limits") as (address, channel), ThreadPoolExecutor() as threads:
        with occupied(address, channel, tmp_path / "go"):
            second = threads.submit(post, address, {"model": "echo-1.0.0", "str_data": "x"})
            until_in_flight(address, "predict")
            time.sleep(waits)  # It is what is measured.
        second.result(SECONDS)
        samples = samples_of(address)
        waited = total(samples, "triglot_queue_seconds_sum", model="echo")
        assert waited >= waits / 2  # It is counted as in flight before its body has come.
        assert total(samples, "triglot_compute_seconds_sum", model="echo") < waited
        assert total(samples, "triglot_compute_seconds_sum", model="gated") >= waits


def test_a_caller_who_leaves_before_its_turn_was_not_executed(tmp_path: Path) -> None:
    with serving(tmp_path, "limits") as (address, channel):
        with occupied(address, channel, tmp_path / "go"):
            connection = HTTPConnection(address, timeout=SECONDS)
            body = json.dumps({"model": "echo-1.0.0", "str_data": "x"})
            connection.request("POST", PREDICT_PATH, body, {"Content-Type": "application/json"})
            until_in_flight(address, "predict")
            connection.close()
            until_in_flight(address, "predict", 0)
        assert counts_at(address) == {
            ("Predict", "gated", "1", "OK"): 1,
            ("predict", "echo", "1", "CANCELLED"): 1,
        }
        assert total(samples_of(address), "triglot_compute_seconds_count", model="echo") == 0


def test_a_batch(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, channel), ThreadPoolExecutor(4) as threads:
        request = GrpsMessage(model="double_batched-1.0.0", str_data="4")
        for answer in [threads.submit(predict, channel, request) for _ in range(4)]:
            answer.result(SECONDS)
        # Alone it waits for the others until the window ends, three seconds later.
        assert predict(channel, request).str_data == "8@1"
        samples = samples_of(address)
        model = {"model": "double_batched"}
        assert total(samples, "triglot_batch_size_count", **model) == 5
        assert total(samples, "triglot_batch_size_bucket", **model, le="1.0") == 1
        assert total(samples, "triglot_queue_seconds_sum", **model) >= 3
        assert total(samples, "triglot_compute_seconds_sum", **model) < 3


def test_customised_http(tmp_path: Path) -> None:
    with serving(tmp_path, "custom") as (address, _):
        path = "/v1/chat/completions"
        for query in ("m=str", "m=raise", "m=err"):
            post(address, {}, query, path)
        post(address, {"a": 1, "b": 2}, "model=custsum-1.0.0", path)
        assert post(address, {}, "model=custsum-1.0.0", path)[0] == 500
        assert counts_at(address) == {
            ("predict", "custom", "1", "OK"): 1,
            ("predict", "custom", "1", "INTERNAL"): 2,
            ("predict", "custsum", "1", "OK"): 1,
            ("predict", "custsum", "1", "INTERNAL"): 1,
        }
