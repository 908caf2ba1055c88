"""The clients, blocking and asyncio, against servers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import pytest
import trustme

import triglot
from tests import environments
from tests.process import write_model
from triglot.client import AsyncClient, Client, Outputs, Retries, SharedMemory, Tls
from triglot.client.wire import Query, kserve_request
from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb
from triglot.testing import GatedModel, serve

PREDICT, INFER = "tensorflow_serving", "kserve"
X = np.array([1.5, 2.0], np.float32)


class Echo(triglot.Model):
    """Returns each input that it gets, and the request's parameters."""

    inputs = tuple(
        triglot.TensorSpec(name.lower(), name, [-1, -1], optional=True)
        for name in ("BOOL", "INT8", "INT64", "UINT16", "UINT64", "FP16", "FP32", "FP64", "BF16", "BYTES")
    )
    outputs = tuple(triglot.TensorSpec(f"{spec.name}_out", spec.datatype, spec.shape) for spec in inputs)

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{name}_out": array for name, array in inputs.items()}


class Count(triglot.Model):
    inputs = (triglot.TensorSpec("x", "FP32", [-1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1]),)

    def infer(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for number in range(3):
            yield {"y": inputs["x"] + number}
        if inputs["x"].size > 2:
            raise triglot.InvalidArgument("x: expected at most 2 elements")


class OnLoop:
    """An `AsyncClient` on an event loop of its own, with the methods of `Client`."""

    def __init__(self, *servers: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()

        async def make() -> AsyncClient:
            return AsyncClient(*servers, **options)

        self._client = self._runner.run(make())

    def infer(self, *arguments: Any, **options: Any) -> Outputs:
        return self._runner.run(self._client.infer(*arguments, **options))

    @property
    def sent(self) -> int:
        return self._client.sent

    def is_ready(self, model: str = "") -> bool:
        return self._runner.run(self._client.is_ready(model))

    @contextlib.contextmanager
    def shared_memory(self, *arguments: Any, **options: Any) -> Iterator[SharedMemory]:
        shared = self._client.shared_memory(*arguments, **options)
        memory = self._runner.run(shared.__aenter__())
        try:
            yield memory
        finally:
            self._runner.run(shared.__aexit__(None, None, None))

    def stream(self, *arguments: Any, **options: Any) -> Iterator[Outputs]:
        return self._answers(self._client.stream(*arguments, **options))

    def call(self, *arguments: Any) -> bytes:
        return self._runner.run(self._client.call(*arguments))

    def call_stream(self, *arguments: Any) -> Iterator[bytes]:
        return self._answers(self._client.call_stream(*arguments))

    def _answers(self, answers: AsyncGenerator[Any, None]) -> Iterator[Any]:
        async def step() -> Any:
            return await anext(answers, None)

        try:
            while (outputs := self._runner.run(step())) is not None:
                yield outputs
        finally:
            self._runner.run(answers.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


KINDS = pytest.mark.parametrize("kind", [Client, OnLoop], ids=["blocking", "asyncio"])
Kind = Callable[..., Client]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve({"echo": Echo, "count": Count, "same": GatedModel()}) as server:
        yield server.grpc_address


@KINDS
@pytest.mark.parametrize("protocol", [INFER, PREDICT])
def test_every_datatype(address: str, kind: Kind, protocol: str) -> None:
    random = np.random.default_rng(3)
    inputs: dict[str, Any] = {"bytes": np.array([[b"", b"\xff\x00"], [b"a", b"bc"]], object)}
    for spec in Echo.inputs:
        if spec.datatype != "BYTES":
            dtype = triglot.core.tensor.DATATYPES[spec.datatype].dtype
            inputs[spec.name] = random.integers(0, 2, (3, 2)).astype(dtype)
    with kind(address, protocol=protocol) as client:
        outputs = client.infer("echo", inputs)
        assert set(outputs) >= {f"{name}_out" for name in inputs}
        for name, array in inputs.items():
            assert outputs[f"{name}_out"].dtype == array.dtype
            assert outputs[f"{name}_out"].tolist() == array.tolist()
        assert outputs.model_version == "1"


@KINDS
def test_what_a_call_may_say(address: str, kind: Kind) -> None:
    large = np.arange(2**21, dtype=np.float32).reshape(1, -1)
    with kind(address, headers={"X-Tenant": "a"}) as client:
        outputs = client.infer(
            "echo",
            {"fp32": large, "fp64": [[0.5]]},
            version=1,
            outputs=["fp32_out"],
            request_id="7",
            headers={"a": "b"},
        )
        assert list(outputs) == ["fp32_out"]
        assert outputs["fp32_out"].tobytes() == large.tobytes()
        assert outputs.request_id == "7"
        with pytest.raises(TypeError, match="unexpected keyword argument 'versions'"):
            client.infer("echo", {}, versions=1)  # type: ignore[call-arg]


@KINDS
def test_the_servers_errors(address: str, kind: Kind) -> None:
    with kind(address) as client:
        with pytest.raises(triglot.NotFound, match="none"):
            client.infer("none", {"x": X})
        with pytest.raises(triglot.InvalidArgument, match="fp32"):
            client.infer("echo", {"fp32": np.array([[1]], np.int32)})
    with kind(address, protocol=PREDICT) as client:
        with pytest.raises(triglot.NotFound):
            client.infer("none", {"x": X})
        with pytest.raises(TypeError, match="no streams"):
            client.stream("count", {"x": X})


@KINDS
def test_a_stream(address: str, kind: Kind) -> None:
    with kind(address) as client:
        assert [outputs["y"].tolist() for outputs in client.stream("count", {"x": X})] == [
            [1.5, 2.0],
            [2.5, 3.0],
            [3.5, 4.0],
        ]
        with contextlib.closing(client.stream("count", {"x": X})) as answers:
            assert next(answers)["y"].tolist() == [1.5, 2.0]
        answers = client.stream("count", {"x": np.zeros(3, np.float32)})
        assert [next(answers)["y"].tolist() for _ in range(3)][2] == [2.0, 2.0, 2.0]
        with pytest.raises(triglot.ServingError, match="at most 2 elements"):
            next(answers)


@KINDS
def test_calls_of_any_method(address: str, kind: Kind) -> None:
    service = "/inference.GRPCInferenceService/"
    with kind(address) as client:
        for name in ("echo", "none"):
            request = pb.ModelMetadataRequest(name=name)
            found = contextlib.nullcontext() if name == "echo" else pytest.raises(triglot.NotFound, match="none")
            with found:
                response = client.call(f"{service}ModelMetadata", request.SerializeToString())
                assert pb.ModelMetadataResponse.FromString(response).name == "echo"
        requests = [kserve_request(Query(model="count", inputs={"x": X}))] * 2
        responses = map(
            pb.ModelStreamInferResponse.FromString, client.call_stream(f"{service}ModelStreamInfer", requests)
        )
        assert [response.infer_response.model_name for response in responses] == ["count"] * 6


@KINDS
def test_readiness(address: str, kind: Kind) -> None:
    with kind([address, "127.0.0.1:1"]) as client:
        assert client.is_ready()
        assert client.is_ready("echo")
        assert not client.is_ready("none")


@KINDS
def test_a_server_that_refuses_connections(address: str, kind: Kind) -> None:
    """Of two servers, one refuses connections: every call has an answer of the other."""
    with kind(["127.0.0.1:1", address]) as client:
        for number in range(50):
            assert client.infer("same", {"x": [np.float32(number)]})["y"] == number
    with kind("127.0.0.1:1", retries=Retries(attempts=2)) as client, pytest.raises(triglot.Unavailable):
        client.infer("same", {"x": X})


@contextlib.contextmanager
def arriving_late(address: str, seconds: float) -> Iterator[str]:
    """Yield the address of a way to a server on which its bytes arrive late."""
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket, wait: float) -> None:
        with source, target, contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(wait)
                target.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):  # The listener was closed.
            while True:
                client, _ = listener.accept()
                host, _, port = address.rpartition(":")
                server = socket.create_connection((host, int(port)))
                threading.Thread(target=carry, args=(client, server, 0.0), daemon=True).start()
                threading.Thread(target=carry, args=(server, client, seconds), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@KINDS
def test_a_server_far_away(address: str, kind: Kind) -> None:
    """The time to connect is not that between two attempts, which is short."""
    with arriving_late(address, 0.5) as far, kind(far, retries=Retries(attempts=1)) as client:
        assert client.infer("same", {"x": X})["y"].tolist() == X.tolist()


@KINDS
def test_one_of_three_servers_ends_meanwhile(kind: Kind) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serve({"same": GatedModel()})) for _ in range(2)]
        with serve({"same": GatedModel()}) as last:
            client = stack.enter_context(kind([*(server.grpc_address for server in servers), last.grpc_address]))
            for number in range(30):
                assert client.infer("same", {"x": [np.float32(number)]})["y"] == number
        for number in range(100):
            assert client.infer("same", {"x": [np.float32(number)]})["y"] == number


@KINDS
def test_a_second_server_answers_for_a_slow_one(kind: Kind) -> None:
    slow, quick = GatedModel("infer"), GatedModel()
    with serve({"gated": slow}) as first, serve({"gated": quick}) as other:
        addresses = [first.grpc_address, other.grpc_address]
        try:
            with kind(addresses, retries=Retries(hedge_after=0.05)) as client:
                for _ in range(10):
                    assert client.infer("gated", {"x": X})["y"].tolist() == X.tolist()
            slow.wait_until_at("infer")
        finally:
            slow.open_point("infer")


@pytest.mark.parametrize(
    ("streams", "hedge_after"), [(False, None), (False, 60.0), (True, None)], ids=["plain", "hedged", "stream"]
)
def test_a_call_ends_when_its_asyncio_client_is_closed(streams: bool, hedge_after: float | None) -> None:
    slow = GatedModel("infer")

    async def call(client: AsyncClient) -> Outputs:
        if streams:
            return await anext(client.stream("gated", {"x": X}))
        return await client.infer("gated", {"x": X})

    async def close_meanwhile(address: str) -> None:
        client = AsyncClient([address, address], retries=Retries(hedge_after=hedge_after))
        await asyncio.gather(call(client), closing(client))

    async def closing(client: AsyncClient) -> None:
        await asyncio.to_thread(slow.wait_until_at, "infer")
        await client.close()

    with serve({"gated": slow}) as server:
        try:
            with pytest.raises(triglot.core.errors.Cancelled):
                asyncio.run(asyncio.wait_for(close_meanwhile(server.grpc_address), 20))
        finally:
            slow.open_point("infer")


@contextlib.contextmanager
def answering(code: grpc.StatusCode, *trailers: tuple[str, str]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that ends every call with this status; yields its address, and the requests that came."""
    came: list[bytes] = []

    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        came.append(request)
        context.set_trailing_metadata(trailers)
        context.abort(code, "not now")
        return b""

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", came
    finally:
        server.stop(None).wait()


PUSHBACK = "grpc-retry-pushback-ms"


@KINDS
@pytest.mark.parametrize(
    ("code", "trailers", "parameters", "attempts"),
    [
        (grpc.StatusCode.UNAVAILABLE, [], {}, 3),
        (grpc.StatusCode.UNAVAILABLE, [(PUSHBACK, "10")], {}, 3),
        (grpc.StatusCode.UNAVAILABLE, [(PUSHBACK, "-1")], {}, 1),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [(PUSHBACK, "60000")], {}, 1),  # Later than the deadline.
        (grpc.StatusCode.INVALID_ARGUMENT, [], {}, 1),
        (grpc.StatusCode.UNAVAILABLE, [], {"sequence_id": 7}, 1),
    ],
)
def test_when_a_call_is_tried_again(
    kind: Kind, code: grpc.StatusCode, trailers: list[tuple[str, str]], parameters: dict[str, Any], attempts: int
) -> None:
    retries = Retries(attempts=3, first_delay=0.01)
    with (
        answering(code, *trailers) as (address, came),
        kind(address, timeout=20, retries=retries) as client,
        pytest.raises(triglot.ServingError, match="not now") as raised,
    ):
        client.infer("m", {"x": X}, parameters=parameters)
    assert raised.value.code is Code(code.value[0])
    assert len(came) == attempts == client.sent


@KINDS
def test_calls_of_a_sequence_go_to_one_server(kind: Kind) -> None:
    with (
        answering(grpc.StatusCode.INTERNAL) as (address, came),
        answering(grpc.StatusCode.INTERNAL) as (other, also_came),
        kind([address, other]) as client,
    ):
        for _ in range(6):
            with pytest.raises(triglot.Internal):
                client.infer("m", {"x": X}, parameters={"sequence_id": "a"})
    assert sorted((len(came), len(also_came))) == [0, 6]


@KINDS
def test_tls_and_a_token(kind: Kind, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    hashed = hashlib.sha256(b"secret").hexdigest()
    access = tmp_path / "access.toml"
    access.write_text(f'[client.a]\ntokens_sha256 = ["{hashed}"]\noperations = ["infer"]\n')
    pem = str(tmp_path / "server.pem")
    with serve({"same": GatedModel()}, tls_certificate=pem, tls_key=pem, access=str(access)) as server:
        address, tls = f"localhost:{server.grpc_port}", Tls(ca=tmp_path / "ca.pem")
        with kind(address, tls=tls, token=lambda: "secret") as client:
            assert client.infer("same", {"x": X})["y"].tolist() == X.tolist()
        with kind(address, tls=tls) as client, pytest.raises(triglot.ServingError) as raised:
            client.infer("same", {"x": X})
        assert raised.value.code is Code.UNAUTHENTICATED
        with kind(address, retries=Retries(attempts=1), timeout=20) as client, pytest.raises(triglot.Unavailable):
            client.infer("same", {"x": X})
    with pytest.raises(ValueError, match="a certificate and its key, or neither"):
        Tls(certificate=tmp_path / "server.pem")


@KINDS
def test_a_server_that_is_stopped(kind: Kind, tmp_path: Path) -> None:
    """The system stops a server: its calls are answered by the other one, and all once it continues."""
    write_model(tmp_path / "same")
    with serve(tmp_path, process=True) as first, serve(tmp_path, process=True) as other:
        inputs = {"x": np.array([7], np.int32)}
        with kind([first.grpc_address, other.grpc_address], retries=Retries(hedge_after=0.05)) as client:
            for _ in range(4):
                assert client.infer("same", inputs)["y"] == 7
            first.process.signal(signal.SIGSTOP)
            try:
                for _ in range(30):
                    assert client.infer("same", inputs)["y"] == 7
            finally:
                first.process.signal(signal.SIGCONT)
            for _ in range(10):
                assert client.infer("same", inputs)["y"] == 7


@KINDS
def test_a_server_that_does_not_answer_health_checks(kind: Kind, tmp_path: Path) -> None:
    """Without hedging, too, calls leave a server that the system stopped, and come back once it continues."""
    write_model(tmp_path / "same")
    with serve(tmp_path, process=True) as first, serve(tmp_path, process=True) as other:
        inputs, retries = {"x": np.array([7], np.int32)}, Retries(check_after=0.5)
        with kind([first.grpc_address, other.grpc_address], retries=retries) as client:
            for stopped in (first, other):
                stopped.process.signal(signal.SIGSTOP)
                try:
                    for _ in range(4):
                        assert client.infer("same", inputs)["y"] == 7
                finally:
                    stopped.process.signal(signal.SIGCONT)


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "asyncio"])
def test_servers_are_checked_at_once(address: str, blocking: bool) -> None:
    """Of many servers that send nothing, each is found out before its calls' deadlines."""
    retries, inputs = Retries(check_after=0.5), {"x": X}

    async def on_loop(addresses: list[str]) -> list[Outputs]:
        async with AsyncClient(addresses, timeout=4, retries=retries) as client:
            return await asyncio.gather(*(client.infer("same", inputs) for _ in addresses))

    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(12)]
        addresses = [address, *(f"127.0.0.1:{each.getsockname()[1]}" for each in silent)]
        if blocking:
            threads = stack.enter_context(futures.ThreadPoolExecutor(len(addresses)))
            client = stack.enter_context(Client(addresses, timeout=4, retries=retries))
            answers = list(threads.map(lambda _: client.infer("same", inputs), addresses))
        else:
            answers = asyncio.run(on_loop(addresses))
    assert [answer["y"].tolist() for answer in answers] == [X.tolist()] * len(addresses)


@KINDS
def test_a_slow_answer_is_waited_for_while_the_server_answers_health_checks(kind: Kind) -> None:
    came = []

    class Slow(GatedModel):
        def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
            came.append(inputs["x"])
            outputs: dict[str, Any] = self._infer(inputs)
            return outputs

    slow, checks = Slow("infer"), Retries(check_after=0.1)
    with serve({"gated": slow}) as server, kind([server.grpc_address, "127.0.0.1:1"], retries=checks) as client:
        with futures.ThreadPoolExecutor(1) as threads:
            try:
                call = threads.submit(client.infer, "gated", {"x": X})
                slow.wait_until_at("infer")
                assert not futures.wait([call], timeout=1).done
            finally:
                slow.open_point("infer")
            assert call.result()["y"].tolist() == X.tolist()
        assert len(came) == 1


@KINDS
def test_settings_of_the_environment(address: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIGLOT_CLIENT_SERVERS", f"{address}, 127.0.0.1:1")
    monkeypatch.setenv("TRIGLOT_CLIENT_PROTOCOL", PREDICT)
    monkeypatch.setenv("TRIGLOT_CLIENT_TIMEOUT", "20")
    with Client.from_env() as client:
        assert client.infer("same", {"x": [np.float32(1)]})["y"] == 1
    monkeypatch.setenv("TRIGLOT_CLIENT_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="TRIGLOT_CLIENT_TIMEOUT: expected seconds, got 'soon'"):
        Client.from_env()
    monkeypatch.delenv("TRIGLOT_CLIENT_TIMEOUT")
    monkeypatch.setenv("TRIGLOT_CLIENT_SERVER", "x")
    with pytest.raises(ValueError, match=r"unknown variable TRIGLOT_CLIENT_SERVER$"):
        Client.from_env()
    monkeypatch.delenv("TRIGLOT_CLIENT_SERVERS")
    with pytest.raises(ValueError, match="TRIGLOT_CLIENT_SERVERS: expected addresses"):
        Client.from_env()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"servers": "http://127.0.0.1:8000"}, "expected HOST:PORT of a server's gRPC port, got 'http"),
        ({"servers": []}, "at least one server"),
        ({"servers": ["a:1", ""]}, "expected HOST:PORT of a server's gRPC port, got ''"),
        ({"servers": "a:1", "headers": {"a b": "c"}}, "headers: expected names of ASCII letters.*got 'a b'"),
        ({"servers": "a:1", "protocol": "v2"}, "expected kserve or tensorflow_serving, got 'v2'"),
    ],
)
def test_wrong_settings(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Client(**options)


@KINDS
def test_wrong_and_long_timeouts_and_headers(address: str, kind: Kind) -> None:
    with kind(address, timeout=float("inf")) as client:
        for timeout in (None, float("inf"), 1e12):
            assert client.infer("same", {"x": X}, timeout=timeout)["y"].tolist() == X.tolist()
        with pytest.raises(ValueError, match="timeout: expected seconds, got NaN"):
            client.infer("same", {"x": X}, timeout=float("nan"))
        for value in ("a\n", "\N{SNOWMAN}"):
            with pytest.raises(ValueError, match=r"headers: expected printable ASCII.*value of X-Tenant"):
                client.infer("same", {"x": X}, headers={"X-Tenant": value})


@pytest.mark.parametrize("other", ["tritonclient", "kserve", "tensorflow"])
def test_imported_before_and_after_another_client(address: str, other: str) -> None:
    """Whichever of both is imported first, both call, and no part of the server is loaded."""
    python, script = environments.python(other), environments.ROOT / "tests/e2e/clients/client_imports.py"
    for order in ("first", "last"):
        command = [str(python), str(script), order, other, address]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
