"""Caches whose keys come from requests: each is listed here, filled with the largest keys, and bounded by bytes.

What strangers can fill takes 16 MiB at most in all, over both transports.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from yarl import URL

import triglot
from tests.access.access_clients import GuardedServer, guarded_server
from tests.access.access_files import anonymous, client
from tests.process import write_model
from tests.recorded_calls import record_call
from tests.transports.h2_peers import Client, request_fields
from triglot.access.control import AccessControl
from triglot.access.jwks import Asked
from triglot.config.options import Config
from triglot.core.call import Call
from triglot.core.errors import Code, InvalidArgument
from triglot.core.operation import REST, Operation, Permission
from triglot.core.request_scheduling import Scheduling
from triglot.core.tensor import MessageBytes
from triglot.core.types import TensorSpec
from triglot.dataplane.control import UNLOAD_MODEL, UNREGISTER, Arguments
from triglot.model.signature import TensorRule
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.tfserving import predict_pb2
from triglot.pb.tfserving.tensor_pb2 import DT_FLOAT
from triglot.platform.tallies import shared_size
from triglot.protocols.grps import answers as grps_answers
from triglot.protocols.grps import generic_tensor
from triglot.protocols.grps.codec import decode_message
from triglot.protocols.grps.request import Request, RequestDecoder
from triglot.protocols.kserve import codec as kserve_codec
from triglot.protocols.kserve import rest as kserve_rest
from triglot.protocols.kserve.codec import InferDecoder
from triglot.protocols.rows import Route
from triglot.protocols.tfserving import codec as tfserving_codec
from triglot.protocols.tfserving import routes as rest_routes
from triglot.protocols.tfserving import tensor as tfserving_tensor
from triglot.protocols.tfserving.codec import PredictDecoder
from triglot.protocols.wire import length_prefix
from triglot.scheduling.sequences.table import SequenceTable
from triglot.telemetry.spans import recorder
from triglot.telemetry.store import Telemetry
from triglot.transports.certificates import certificate_names
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.fields import Field, Name, field_of, name_of
from triglot.transports.http2.core.receiving import read_head
from triglot.transports.rest.routes import Origins, Router
from triglot.workers.changes import Changes

MIB, KIB = 2**20, 2**10
SOURCE = Path(triglot.__file__).parent
ALL_STRANGERS = 16 * MIB
ROUNDS = 5120
"""More entries than any cache has."""


@dataclass(frozen=True)
class Cache:
    """One or several caches. `fill` uses them with the largest keys and returns what has to stay alive.

    `most`: bytes that they may take. `decorated`: functions of the source whose results are cached, by file.
    """

    fill: Callable[[], object]
    most: int
    decorated: str = ""
    strangers: bool = True


def long_text(number: int, size: int) -> str:
    """A text of this size, which no other number gives; of characters that take the most memory."""
    return f"{number:06}" + "\U0001f600" * (size - 6)


def long_ascii(number: int, size: int) -> str:
    return f"{number:06}".ljust(size, "a")


def long_shape(number: int) -> tuple[int, ...]:
    """A shape of the most dims that a request may have."""
    return (number, *[2**14] * 15)


def permissions() -> object:
    permission = Permission("c", ("half_*", "*"[:0]))
    for number in range(ROUNDS):
        permission.covers("half_" + long_text(number, 123))
        permission.covers("half_" + long_ascii(number, 4 * KIB))
        permission.covers(long_text(number, 128))
    return [permission] * len(Operation)


def credentials() -> object:
    folder = Path(tempfile.mkdtemp())
    (folder / "a").write_text('[anonymous]\noperations = ["health"]\n')
    control = AccessControl(Config(access=str(folder / "a")))
    for number in range(ROUNDS):
        control.permission(Operation.HEALTH, REST, [("x-api-key", long_ascii(number, 8 * KIB))], lambda: ())
        control.permission(Operation.HEALTH, REST, [("x-api-key", str(number))], lambda: ())
    return control


def paths() -> object:
    router = Router()
    endpoint = Telemetry().endpoint("p", "REST", "m", inference=False)
    router.add(Route("*", "/a/{b}", Operation.PUBLIC, _nothing, _none, _nothing), endpoint)
    for number in range(ROUNDS):
        escaped = "%F0%9F%98%80" + long_ascii(number, 140)
        for verb, path in (("GET", f"/a/{escaped}"), (long_ascii(number, 40 * KIB), "/a/b")):
            router.find(verb, path)
    return router


async def _none(*_: Any) -> None:
    """A row that is not called."""


def _nothing(*_: Any) -> Any:
    """What it decodes and encodes."""


def hosts() -> object:
    origins = Origins(Config())
    route = Route("GET", "/", Operation.HEALTH, _nothing, _none, _nothing)
    for number in range(ROUNDS // 10):
        for host in (long_ascii(number, 240) + ".localhost", long_ascii(number, 8 * KIB) + ".localhost"):
            origins.check(route, {"host": host})
    return origins


def fields() -> object:
    for number in range(ROUNDS // 10):
        name = name_of(long_ascii(number, 60).encode() + b"-bin")
        name_of(long_ascii(number, KIB).encode())
        field_of(name, f"{number:06}==,".encode() + b"AA==," * 338)
        field_of(Name(b"x-api-key"), long_ascii(number, 2048).encode()).text.upper()
    return None


def starts() -> object:
    begin = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/s/m"),
        (b"content-type", b"application/grpc"),
    ]
    for number in range(ROUNDS // 10):
        large = Field(Name(b"x-api-key"), long_ascii(number, 3900).encode())
        read_head((*(Field(Name(name), value) for name, value in begin), large))
        large = Field(Name(b"x-bin"), b",".join([b"AA=="] * 780))
        read_head((*(Field(Name(name), value) for name, value in begin), large), [large])
    return None


def unknown_keys() -> object:
    asked = Asked()
    for number in range(ROUNDS):
        asked.add(long_ascii(number, 8 * KIB))
        if number % 1500 == 0:
            asked.look()
    return asked


def kserve_layouts() -> object:
    decode = InferDecoder()
    for number in range(200):
        decode(infer_layout(number))
    return decode


def entry(number: int, payload: bytes) -> bytes:
    return length_prefix(number, len(payload)) + payload


def infer_layout(number: int) -> bytes:
    """A small ModelInferRequest of many inputs: of all layouts, what is parsed takes the most memory."""
    inputs = b"".join(entry(5, entry(1, b"%x" % at)) for at in range(290))
    return entry(1, b"%06d" % number) + inputs + entry(7, b"") * 290


def predict_layouts() -> object:
    decode = PredictDecoder()
    for number in range(200):
        decode(predict_layout(number))
    return decode


def predict_layout(number: int) -> bytes:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = f"{number:06}"
    for at in range(100):
        request.inputs[f"{at:x}"].dtype = DT_FLOAT
        request.inputs[f"{at:x}"].tensor_content = b"1234"
    encoded: bytes = request.SerializeToString()
    return encoded


def grps_layouts() -> object:
    def decode_all(data: MessageBytes) -> Request:
        message = decode_message(data)
        return Request(message.model, message)

    decode = RequestDecoder(decode_all)
    for number in range(200):
        decode(grps_layout(number))
    return decode


def grps_layout(number: int) -> bytes:
    request = grps_pb2.GrpsMessage(model=f"{number:06}")
    for at in range(150):
        request.gtensors.tensors.add(name=f"{at:x}", dtype=grps_pb2.DT_FLOAT32, flat_float32=[1.0])
    encoded: bytes = request.SerializeToString()
    return encoded


def labels() -> object:
    telemetry = Telemetry()
    endpoints = [telemetry.endpoint("p", "REST", f"m{number}", inference=True) for number in range(25)]
    for endpoint in endpoints:
        for number in range(300):
            for code in (Code.NOT_FOUND, Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED):
                call = Call()
                # Seconds of its own: the latest ones are kept, each a float.
                call.model_name, seconds = long_text(number, 128), 0.1 + number
                record_call(endpoint, call, code, seconds, 0.1, 1, 1)
                call.model_name = long_ascii(number, 4 * KIB)
                record_call(endpoint, call, code, seconds + 0.1, 0.1, 1, 1)
    return telemetry


def sequences() -> object:
    table = SequenceTable(instances=8, rows=128, max_idle=60)
    work: Any = SimpleNamespace(call=SimpleNamespace(model_name="m"))
    for number in range(8 * 128):
        for size in (128, 64 * KIB):
            scheduling = Scheduling(sequence_id=long_ascii(number, size), sequence_start=True)
            if size > 128:
                with pytest.raises(InvalidArgument, match="expected at most 128 bytes, got 65536"):
                    table.add(work, scheduling, {}, None, 0.0)
                continue
            table.take([table.add(work, scheduling, {}, None, 0.0)])
    return table


def shapes() -> object:
    rule = TensorRule(TensorSpec("x", "FP32", None))
    for number in range(ROUNDS):
        rule.remember(long_shape(number))
        rule.remember((*long_shape(number), *[1] * 100))
    return rule


def span_attributes() -> object:
    for number in range(ROUNDS):
        name, peer = long_text(number, 128), long_ascii(number, 45)
        recorder._path(long_text(number, 256))
        recorder._on_model("compute", name, 1)
        recorder._of_model_call("m", Code.OK, name, 1, peer, "c")
        recorder._of_rpc("m", "p", Code.OK, name, 1, peer, "c")
        recorder._of_http(long_text(number, 16), "/", 200, "http", "p", Code.OK, name, 1, peer, "c")
    return None


def certificates() -> object:
    for number in range(ROUNDS // 10):
        assert certificate_names(long_ascii(number, 4096).encode()) == ()
        assert certificate_names(long_ascii(number, 64 * KIB).encode()) == ()
    return None


def prediction_paths() -> object:
    for number in range(ROUNDS):
        for size in (230, KIB):
            path = f"/v1/models/{long_ascii(number, size)}:predict"
            rest_routes.model_of_path(path)
            rest_routes.parse_call(path)
    return None


def answers() -> object:
    """Of models that answer with the shapes of their requests; names are those of the model."""
    for number in range(ROUNDS):
        shape = long_shape(number)
        kserve_codec._response_head("m", "1", (("y", "FP32", shape, ()),))
        kserve_codec._framing("m", "1", None, (("y", "FP32", shape, ()),))
        kserve_codec._response_flag("k", True)
        kserve_rest._response_head("m", "1")
        kserve_rest._output_head("y", "FP32", shape)
        tfserving_codec._memory_entry_head(1, "y", "FP32", shape, 4)
        tfserving_codec._encoded_spec("m", number, "s")
        tfserving_tensor.memory_head("FP32", shape, 4)
        grps_answers._outputs_head("y", 1, shape, 4)
        generic_tensor._cached_head(long_text(number, 256), 1, shape, 4)
        length_prefix(1, number)
    return None


class Member:
    """A worker that has no model and no region."""

    number = 1

    async def ask(self, what: str, argument: Any = None) -> Any:
        return False


def changes() -> object:
    """What new workers have to know of what clients have changed; of unloads that changed nothing, nothing."""
    made = Changes(lambda _: None, 1.0)
    member = Member()

    async def make(name: str, arguments: Arguments) -> None:
        await made.make(member, name, arguments)

    async def all_of_them() -> None:
        made.join(member, 0)
        for number in range(ROUNDS):
            await make(UNLOAD_MODEL, {"name": long_ascii(number, 128), "dependents": False})
            await make(UNREGISTER, {"name": long_text(number, 255)})

    asyncio.run(all_of_them())
    return made


CACHES = {
    "permissions": Cache(permissions, KIB * 256),
    "credentials": Cache(credentials, MIB),
    "paths": Cache(paths, 5 * MIB // 4),
    "hosts": Cache(hosts, MIB // 4, "transports/rest/routes.py"),
    "fields": Cache(fields, 5 * MIB // 4, "transports/http2/core/fields.py transports/http2/core/fields.py"),
    "starts": Cache(starts, 11 * MIB // 4, 2 * "transports/http2/core/receiving.py "),
    "ids of unknown keys": Cache(unknown_keys, MIB // 4),
    "layouts of ModelInfer": Cache(kserve_layouts, 7 * MIB // 4),
    "layouts of Predict": Cache(predict_layouts, MIB),
    "layouts of grps": Cache(grps_layouts, 7 * MIB // 4),
    "labels": Cache(labels, 7 * MIB // 4),
    "tallies": Cache(lambda: bytes(shared_size(8)), 5 * MIB // 16),
    "prediction paths": Cache(prediction_paths, 3 * MIB // 4, "protocols/tfserving/routes.py"),
    "sequences": Cache(sequences, 2 * MIB, strangers=False),
    "shapes": Cache(shapes, MIB // 8),
    "spans": Cache(span_attributes, 3 * MIB // 2, " ".join(["telemetry/spans/recorder.py"] * 5)),
    "certificates": Cache(certificates, 2 * MIB, "transports/certificates.py", strangers=False),
    "answers": Cache(
        answers,
        6 * MIB,
        "protocols/kserve/codec.py protocols/kserve/codec.py protocols/kserve/codec.py protocols/kserve/rest.py "
        "protocols/kserve/rest.py protocols/tfserving/codec.py protocols/tfserving/codec.py "
        "protocols/tfserving/tensor.py protocols/tfserving/tensor.py protocols/grps/answers.py "
        "protocols/grps/generic_tensor.py protocols/wire.py",
        strangers=False,
    ),
    "changes": Cache(changes, MIB, strangers=False),
}
OPERATORS = Counter(
    {
        "executors/remote/frames.py": 2,
        "platform/mapping.py": 1,
        "platform/bus_errors.py": 1,
        "repository/storage/http.py": 1,
        "repository/storage/azure.py": 1,
        "repository/storage/google.py": 1,
        "repository/storage/aws.py": 1,
        "transports/rest/exchange.py": 1,
        "transports/http1/requests.py": 2,
        "transports/http2/core/hpack.py": 1,
        "protocols/rows.py": 1,
        "protocols/pages.py": 2,
        "protocols/grps/json_reader.py": 1,
        "protocols/tfserving/json_printer.py": 1,
        "protocols/tfserving/tfrecord.py": 1,
    }
)
"""Caches of functions whose arguments are the server's own: files, routes, status lines, fields, powers of ten.

In `executors/remote` they are the places of arrays in memory, 64 lists of at most 1 KiB.
"""


def cached_functions() -> Iterator[str]:
    """The files of the source, once for each use of `functools`' caches."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            found = [
                decorator
                for decorator in decorators
                if isinstance(decorator, ast.Name) and decorator.id == "cache"
            ]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lru_cache":
                found.append(node.func)
            for _ in found:
                yield str(file.relative_to(SOURCE))


def test_every_cached_function_is_listed() -> None:
    listed = Counter(file for cache in CACHES.values() for file in cache.decorated.split())
    assert Counter(cached_functions()) == listed + OPERATORS


@pytest.fixture
def growth() -> Iterator[Callable[[], int]]:
    """Bytes of Python's objects since the beginning of the test."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]

    def more() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    yield more
    tracemalloc.stop()


@pytest.mark.parametrize("name", CACHES)
def test_what_a_full_cache_takes(name: str, growth: Callable[[], int]) -> None:
    kept = CACHES[name].fill()
    assert growth() <= CACHES[name].most
    del kept


def test_what_strangers_can_fill_takes_16_mib() -> None:
    assert sum(cache.most for cache in CACHES.values() if cache.strangers) <= ALL_STRANGERS


# --- through real ports ---

RULES = (
    anonymous(["health", "infer"], models='["half_*"]'),
    client("limited", ["limited"], ["infer"], models='["half_*"]'),
)
SUM = """
import triglot

class Sums(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    sequence_batching = triglot.SequenceBatching()

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""
CALLS = 60


async def over_grpc(here: GuardedServer) -> None:
    """Calls of models that the client may not use, that do not exist, and of sequences with long ids."""
    paths = {
        "/inference.GRPCInferenceService/ModelInfer": infer_layout,
        "/tensorflow.serving.PredictionService/Predict": predict_layout,
        "/grps.protos.v1.GrpsService/Predict": grps_layout,
    }
    for number in range(CALLS):
        metadata = [("x-api-key", "limited"), ("x-own", long_ascii(number, 4000)), ("x-own-bin", b"1" * 3000)]
        for path, layout in paths.items():
            await called(here, path, layout(number), metadata)
    for number in range(CALLS // 3):
        name = long_ascii(number, MIB)
        for model in (name, "half_" + name):
            await called(here, next(iter(paths)), pb.ModelInferRequest(model_name=model).SerializeToString())
        request = pb.ModelInferRequest(model_name="half_sums", raw_input_contents=[b"1234"])
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        request.parameters["sequence_id"].string_param = name
        request.parameters["sequence_start"].bool_param = True
        await called(here, next(iter(paths)), request.SerializeToString())


async def called(
    here: GuardedServer, path: str, sent: bytes, metadata: list[tuple[str, Any]] | None = None
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) if "grps" not in path else nullcontext():
        await here.channel.unary_unary(path)(sent, metadata=metadata)


async def over_rest(here: GuardedServer) -> None:
    """Requests that are refused by each check, with long paths, names and headers of their own."""
    for number in range(3 * CALLS):
        name = long_ascii(number, 120)
        for method, path, headers in (
            ("POST", f"/v2/models/{name}/infer", {"x-api-key": "limited"}),
            ("POST", f"/v1/models/{name}:predict", {}),
            ("POST", f"/v1/models/half_{name}:predict", {"authorization": f"Bearer {number}" + "a" * 4000}),
            ("GET", "/v2/health/live", {"host": f"{name}.{'a' * 4000}.localhost"}),
            (name.upper(), f"/{name}", {}),
        ):
            async with here.session.request(method, URL(here.url + path, encoded=True), headers=headers) as answer:
                await answer.read()


async def over_http2(here: GuardedServer) -> None:
    """Fields that clients put in the connection's table, and send again."""
    for number in range(CALLS):
        reader, writer = await asyncio.open_connection("127.0.0.1", here.server.grpc_port)
        peer = Client(reader, writer)
        await peer.greet()
        fields = [
            *request_fields("/inference.GRPCInferenceService/ServerLive"),
            ("x-api-key", f"{number}".zfill(3500)),
        ]
        flags = frames.END_HEADERS | frames.END_STREAM
        for stream in (1, 3, 5):
            await peer.send(peer.raw_headers(stream, fields, flags))
        await peer.status(5)
        await peer.close()


@pytest.mark.parametrize(("grpc_transport", "http_transport"), [("h2", "h1"), ("aio", "aiohttp")])
async def test_what_strangers_send_is_not_kept(
    tmp_path: Path, grpc_transport: str, http_transport: str, growth: Callable[[], int]
) -> None:
    write_model(tmp_path / "models" / "half_sums", SUM)
    options = {"grpc_transport": grpc_transport, "http_transport": http_transport}
    async with guarded_server(tmp_path, *RULES, models=tmp_path / "models", **options) as here:
        assert (await here.status({}))[0] == 403
        before = growth()
        await over_grpc(here)
        await over_rest(here)
        if grpc_transport == "h2":
            await over_http2(here)
        assert growth() - before <= ALL_STRANGERS
