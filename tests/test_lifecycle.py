"""A server process from its start to its end: ports, readiness, signals."""

from __future__ import annotations

import http.client
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.gates import Gate
from tests.process import (
    FREE_PORTS,
    SECONDS,
    Triglot,
    is_listening,
    run_triglot,
    taken_port,
    unused_ports,
    write_model,
)
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import answer_value, infer, infer_request, server_ready
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until
from triglot.pb.kserve import inference_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NEVER = "3600"
CLOSING = """
import triglot

class Closing(triglot.Model):
    def load(self, folder):
        self.folder = folder

    def infer(self, inputs):
        return {}

    def close(self):
        (self.folder / "closed").touch()
"""


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A model that has leave to load."""
    gate = Gate(tmp_path / "gate")
    gate.open("load")
    return gate


def health(channel: grpc.Channel, service: str = "") -> Any:
    request = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS).status


def watch(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)


def code_of(call: Any) -> Any:
    """The code that a call ends with, whatever it answers before."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    return caught.value.code()


def assert_clean(log: str) -> None:
    assert "Traceback" not in log
    assert "Error" not in log


# --- start ---


@pytest.mark.parametrize(("options", "on_every_address"), [((), False), (("--host", "0.0.0.0"), True)])
def test_only_this_machine_can_connect_by_default(
    tmp_path: Path, options: tuple[str, ...], on_every_address: bool
) -> None:
    """127.0.0.2 stands for any other address of the machine."""
    write_model(tmp_path / "model")
    with Triglot(tmp_path, *options, *FREE_PORTS) as server:
        server.stderr.wait_for(r"gRPC on [\d.]+:\d+ and REST on [\d.]+:\d+")
        for port in re.findall(r" on [\d.]+:(\d+)", server.stderr.text()):
            assert is_listening(int(port))
            assert is_listening(int(port), "127.0.0.2") is on_every_address


def test_the_ports_open_when_every_model_is_loaded(tmp_path: Path) -> None:
    write_model(tmp_path / "a_first")
    gate = Gate(tmp_path / "gate")
    grpc_port, rest_port = unused_ports()
    with Triglot(tmp_path, "--grpc-port", str(grpc_port), "--rest-port", str(rest_port)) as server:
        gate.wait_until_it_waits("load")
        assert not is_listening(grpc_port)
        assert not is_listening(rest_port)
        gate.open("load")
        assert server.ports() == (grpc_port, rest_port)
        assert Rest(rest_port).get("/v2/health/ready") == (200, {"ready": True, "live": True})
        with grpc_channel(grpc_port) as channel:
            assert server_ready(channel)
            assert infer(channel, "a_first") == 7


LOGS_OFTEN = "import triglot.progress; triglot.progress.LOG_SECONDS = 0.05"


def test_a_long_load_is_logged_now_and_then(tmp_path: Path) -> None:
    """Without a terminal; on one, a line below the log shows it."""
    gate = Gate(tmp_path / "gate")
    with Triglot(tmp_path, *FREE_PORTS, before=LOGS_OFTEN) as server:
        gate.wait_until_it_waits("load")
        server.stderr.wait_for(r"I 0 of 1 loaded; loading gate version 1 \(\d+ s\)")
        gate.open("load")
        server.ports()


@pytest.mark.parametrize("interface", ["grpc", "rest"])
def test_a_port_in_use_ends_the_start_before_a_model_is_loaded(tmp_path: Path, interface: str) -> None:
    gate = Gate(tmp_path / "gate")  # It would never load.
    other = "rest" if interface == "grpc" else "grpc"
    with taken_port() as port:
        completed = run_triglot("serve", gate.folder, f"--{interface}-port", str(port), f"--{other}-port", "0")
    assert completed.returncode == 1
    (line,) = completed.stderr.splitlines()
    assert line.startswith("triglot: ")
    assert "127.0.0.1" in line
    assert str(port) in line
    assert "Address already in use" in line
    assert not completed.stdout


def test_one_port_for_both_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    port = str(unused_ports()[0])
    ports = ("--grpc-port", port, "--rest-port", port)
    completed = run_triglot("serve", gate.folder, "--grpc-transport", "aio", *ports)
    assert completed.returncode in (1, 2)
    assert port in completed.stderr
    assert_clean(completed.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_model_loads_ends_the_process(tmp_path: Path, number: signal.Signals) -> None:
    gate = Gate(tmp_path / "gate")
    with Triglot(gate.folder, *FREE_PORTS) as server:
        gate.wait_until_it_waits("load")
        server.signal(number)
        assert server.wait() == 1
        assert "stopped while loading" in server.stderr.text()
        assert_clean(server.stderr.text())


# --- stop ---


def test_sigterm_turns_readiness_off_and_calls_still_run(gate: Gate) -> None:
    gate.open(7)
    with Triglot(gate.folder, *FREE_PORTS, "--drain-delay", NEVER) as server:
        grpc_port, rest_port = server.ports()
        rest = Rest(rest_port)
        with grpc_channel(grpc_port) as channel, grpc_channel(grpc_port) as watching:
            statuses = watch(watching)
            assert next(statuses).status == SERVING
            assert [health(channel, name) for name in ("", "inference.GRPCInferenceService", "gate")] == [
                SERVING
            ] * 3
            server.signal(signal.SIGTERM)
            server.stderr.wait_for("draining: readiness is off, requests are accepted for another 3600 s")
            assert next(statuses).status == NOT_SERVING
            assert rest.get("/v2/health/ready") == (503, {"ready": False, "live": True})
            assert rest.get("/v2/health/live") == (200, {"live": True})
            assert not server_ready(channel)
            assert [health(channel, name) for name in ("", "inference.GRPCInferenceService", "gate")] == [
                NOT_SERVING
            ] * 3
            assert infer(channel, "gate") == 7
            with grpc_channel(grpc_port) as newcomer:
                assert infer(newcomer, "gate") == 7
            assert rest.infer("gate")[0] == 200
            server.signal(signal.SIGTERM)
            assert server.wait() == 1
        assert "stopped at once" in server.stderr.text()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """For calls that block while the test continues."""
    with ThreadPoolExecutor() as executor:
        yield executor


def open_stream(channel: grpc.Channel, *requests: pb.ModelInferRequest) -> Any:
    """A ModelStreamInfer on which these requests are sent and no end."""
    sent: SimpleQueue[pb.ModelInferRequest] = SimpleQueue()
    for request in requests:
        sent.put(request)
    return channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )(iter(sent.get, None), timeout=SECONDS)


def test_calls_that_run_are_finished_and_streams_end(gate: Gate, threads: ThreadPoolExecutor) -> None:
    with Triglot(gate.folder, *FREE_PORTS, "--drain-delay", "0", "--grace", NEVER) as server:
        grpc_port, rest_port = server.ports()
        with (
            closing(http.client.HTTPConnection("127.0.0.1", rest_port, timeout=SECONDS)) as idle,
            grpc_channel(grpc_port) as channel,
        ):
            idle.request("GET", "/v2/health/live")
            assert idle.getresponse().read()
            stream = open_stream(channel, infer_request("gate", 3))
            unary = rpc(channel, "ModelInfer", pb.ModelInferResponse).future(infer_request("gate", 1))
            rest = threads.submit(Rest(rest_port).infer, "gate", 2)
            for value in (1, 2, 3):
                gate.wait_until_it_waits(value)
            server.signal(signal.SIGTERM)
            assert code_of(stream) is grpc.StatusCode.UNAVAILABLE
            assert stream.details() == "the server is shutting down"
            wait_until(lambda: not is_listening(grpc_port) and not is_listening(rest_port))
            assert not unary.done()
            assert not rest.done()
            assert not gate.is_closed()
            gate.open(1)
            assert answer_value(unary.result(SECONDS)) == 1
            assert server.runs
            gate.open(2)
            status, answer = rest.result(SECONDS)
            assert (status, answer["outputs"][0]["data"]) == (200, [2])
            # The model still works for the stream; it is closed after that.
            gate.open(3)
            assert server.wait() == 0
        assert gate.is_closed()
        assert server.stderr.text().splitlines()[-1].endswith(" stopped")
        assert_clean(server.stderr.text())


@pytest.mark.parametrize("delay", ["0", "0.1"])
def test_a_health_watch_ends_when_the_server_stops(tmp_path: Path, delay: str) -> None:
    write_model(tmp_path / "model")
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", delay, "--grace", NEVER) as server:
        grpc_port, _ = server.ports()
        with grpc_channel(grpc_port) as channel:
            statuses = watch(channel)
            assert next(statuses).status == SERVING
            server.signal(signal.SIGTERM)
            assert code_of(statuses) is grpc.StatusCode.UNAVAILABLE
            assert server.wait() == 0


def test_sigint_skips_the_drain_delay(gate: Gate) -> None:
    with Triglot(gate.folder, *FREE_PORTS, "--drain-delay", NEVER) as server:
        server.ports()
        server.stdout.wait_for("curl")
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        assert "new requests are taken" not in server.stderr.text()
    assert gate.is_closed()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(gate: Gate, second: signal.Signals) -> None:
    with Triglot(gate.folder, *FREE_PORTS, "--drain-delay", "0", "--grace", NEVER) as server:
        grpc_port, _ = server.ports()
        with grpc_channel(grpc_port) as channel:
            never_answered = rpc(channel, "ModelInfer", pb.ModelInferResponse).future(infer_request("gate"))
            gate.wait_until_it_waits(7)
            server.signal(signal.SIGTERM)
            wait_until(lambda: not is_listening(grpc_port))
            server.stderr.wait_for(r"stopping; waits up to \d+ s for calls of gate version 1 \(1\); ")
            assert server.runs
            server.signal(second)
            assert server.wait() == 1
            assert never_answered.exception(SECONDS).code() is grpc.StatusCode.UNAVAILABLE


def test_calls_that_never_finish_end_with_the_grace_period(gate: Gate, threads: ThreadPoolExecutor) -> None:
    with Triglot(gate.folder, *FREE_PORTS, "--drain-delay", "0", "--grace", "0.2") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            unary = rpc(channel, "ModelInfer", pb.ModelInferResponse).future(infer_request("gate", 1))
            rest = threads.submit(Rest(rest_port).infer, "gate", 2)
            gate.wait_until_it_waits(1)
            gate.wait_until_it_waits(2)
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            assert unary.exception(SECONDS).code() is grpc.StatusCode.UNAVAILABLE
            assert rest.result(SECONDS) == (503, {"error": "the server is shutting down"})
        # It is in its `infer`: closing it now could tear something down under it.
        assert not gate.is_closed()
        assert "gate version 1 still runs" in server.stderr.text()
        assert_clean(server.stderr.text())


STUBBORN = """
import asyncio
import triglot

class Stubborn(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def load(self, folder):
        self.begun = folder / "begun"

    async def infer(self, inputs):
        self.begun.touch()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
"""


@pytest.mark.parametrize("interface", ["gRPC", "REST"])
def test_code_on_the_loop_that_does_not_end_is_left_alone(
    tmp_path: Path, threads: ThreadPoolExecutor, interface: str
) -> None:
    """It swallows its cancellation; its caller gets an error, and the process ends."""
    write_model(tmp_path / "stubborn", STUBBORN)
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0", "--grace", "0.2") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            if interface == "gRPC":
                unary = rpc(channel, "ModelInfer", pb.ModelInferResponse).future(infer_request("stubborn"))
            else:
                rest = threads.submit(Rest(rest_port).infer, "stubborn")
            wait_until((tmp_path / "stubborn" / "begun").exists)
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            if interface == "gRPC":
                assert unary.exception(SECONDS).code() is grpc.StatusCode.UNAVAILABLE
            else:
                assert rest.exception(SECONDS) or rest.result(SECONDS)[0] == 503
        assert "stubborn version 1 still runs; the server does not wait for it" in server.stderr.text()
        assert_clean(server.stderr.text())


def test_a_model_that_fails_to_close_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    write_model(tmp_path / "a", CLOSING + "        raise RuntimeError('cannot close')\n")
    write_model(tmp_path / "b", CLOSING)
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0") as server:
        server.ports()
        server.signal(signal.SIGTERM)
        server.wait()
        assert "cannot close" in server.stderr.text()
    assert (tmp_path / "a" / "closed").exists()
    assert (tmp_path / "b" / "closed").exists()
