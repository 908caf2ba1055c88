"""Measures the cost of codecs, bytes to array and array to bytes, against plain protobuf.

It also measures telemetry, credentials, and the garbage collector.

From the repository's root: `python -m bench.micro`. `--keep-memory` runs it with a malloc that keeps freed
memory; by default, glibc's malloc returns large blocks to the kernel, and page faults are then most of what is
measured.
"""

import argparse
import asyncio
import gc
import importlib
import itertools
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jwt
import numpy as np
import orjson
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from bench import report
from bench.payloads import Floats, infer_request, infer_response, tensor
from bench.scenarios import IMAGE, KEEP_MEMORY, MIB, THREAD
from triglot.access.control import AccessControl
from triglot.access.credentials import digest
from triglot.access.issuers import MAX_VERIFIED
from triglot.config.options import Config
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.http import HttpRequest
from triglot.core.operation import GRPC, Operation, Permission
from triglot.core.types import InferenceResponse, OutputTensor
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve import codec
from triglot.protocols.kserve.codec import InferDecoder
from triglot.protocols.kserve.rest import decode_infer
from triglot.telemetry.calls import Endpoint
from triglot.telemetry.store import Telemetry
from triglot.transports.off_loop import OFF_LOOP_BYTES

SIZES = {"64 B": 16, "4 KiB": 1024, "602 kB": IMAGE, "16 MiB": 16 * MIB}
HOPS = 1000
BATCH = 0.02  # least seconds of one timed batch


@dataclass(frozen=True, slots=True)
class Codec:
    """Decodes requests to arrays, and encodes arrays as responses."""

    name: str
    decode: Callable[[bytes], Floats]  # ModelInferRequest
    encode: Callable[[Floats], bytes]  # ModelInferResponse


def _protobuf_decode(data: bytes) -> Floats:
    message = pb.ModelInferRequest.FromString(data)
    return np.frombuffer(message.raw_input_contents[0], "<f4").reshape(message.inputs[0].shape)


def _protobuf_encode(values: Floats) -> bytes:
    return infer_response(THREAD, values).SerializeToString()


def _our_decode(data: bytes) -> Floats:
    given = codec.decode_infer(data).inputs[0]
    return np.frombuffer(given.data, "<f4").reshape(given.shape)


def _our_decode_again(data: bytes) -> Floats:
    given = _decoder(data).inputs[0]
    return np.frombuffer(given.data, "<f4").reshape(given.shape)


def _our_encode(values: Floats) -> bytes:
    return codec.encode_infer(InferenceResponse(THREAD, "1", "", [OutputTensor("y", "FP32", values)]))


_decoder = InferDecoder()
CODECS = (
    Codec("protobuf", _protobuf_decode, _protobuf_encode),
    Codec("triglot", _our_decode, _our_encode),
    # As the server does: small messages that differ only in their values are not parsed again.
    Codec("triglot again", _our_decode_again, _our_encode),
)


def check(values: Floats, request: bytes) -> None:
    """Check that all codecs give the same results: timing a wrong one is of no use."""
    wanted = infer_response(THREAD, values)
    for timed in CODECS:
        if not np.array_equal(timed.decode(request), values):
            raise SystemExit(f"{timed.name} decodes {values.nbytes} bytes to something else")
        if pb.ModelInferResponse.FromString(timed.encode(values)) != wanted:
            raise SystemExit(f"{timed.name} encodes {values.nbytes} bytes to something else")


def best_of(repeats: int, work: Sequence[Callable[[], object]]) -> list[tuple[float, float]]:
    """Return the minimum and median seconds per call of each; timed in turn, so that all see the same machine."""
    timers = [timeit.Timer(function) for function in work]
    loops = []
    for timer in timers:
        timer.timeit(1)  # first calls build caches
        loops.append(max(1, round(BATCH / max(timer.timeit(3) / 3, 1e-9))))
    times: list[list[float]] = [[] for _ in timers]
    for _ in range(repeats):
        for timer, number, mine in zip(timers, loops, times, strict=True):
            mine.append(timer.timeit(number) / number)
    return [(min(mine), statistics.median(mine)) for mine in times]


def lines(repeats: int) -> list[list[str]]:
    """Return one table line per payload and direction."""
    table = []
    for name, elements in SIZES.items():
        values = tensor(1, elements)
        request = infer_request(THREAD, values).SerializeToString()
        check(values, request)
        directions: dict[str, list[Callable[[], object]]] = {
            "decode": [partial(codec.decode, request) for codec in CODECS],
            "encode": [partial(codec.encode, values) for codec in CODECS],
        }
        for direction, work in directions.items():
            timed = best_of(repeats, work)
            cells = [f"{seconds * 1e6:,.1f}" for pair in timed for seconds in pair]
            ratios = [f"{mine[0] / timed[0][0]:.3f}" for mine in timed[1:]]
            table.append([f"{direction} {name}", *cells, *ratios])
    return table


def observed(endpoint: Endpoint, call: Call) -> None:
    """Do all the work of counting and timing one call."""
    endpoint.begin(call, 64)
    call.decoded()
    call.answered()
    call.encoded(64)
    endpoint.end(call, Code.OK)


def telemetry_lines(repeats: int) -> list[list[str]]:
    """Return the table lines for telemetry of an inference call of a kind that occurred before."""
    endpoint = Telemetry().endpoint("kserve", "GRPC", "ModelInfer", inference=True)
    call = Call()
    call.model_name, call.model_version = THREAD, 1
    call.batch_size, call.queue_seconds, call.compute_seconds = 1, 1e-5, 1e-4
    timed = best_of(repeats, [partial(observed, endpoint, call)])
    return [["telemetry", *(f"{seconds * 1e6:,.1f}" for seconds in timed[0])]]


def credential_lines(repeats: int) -> list[list[str]]:
    """Return the table lines for finding a call's permission: by a token of the access file, and by JWTs as
    Kubernetes issues them, one that was verified before, and new ones, more than are cached."""
    key, token, now = rsa.generate_private_key(public_exponent=65537, key_size=2048), "secret", int(time.time())
    pod = {kind: {"name": f"client-{kind}", "uid": "0" * 36} for kind in ("node", "pod", "serviceaccount")}
    claims = {"iss": "https://issuer", "aud": ["triglot"], "exp": now + 3600, "iat": now, "nbf": now}
    claims |= {"kubernetes.io": {"namespace": "ml", **pod}, "sub": "system:serviceaccount:ml:client"}
    jwts = [jwt.encode({**claims, "jti": f"{number:036}"}, key, "RS256") for number in range(MAX_VERIFIED + 1)]
    with TemporaryDirectory() as folder:
        (Path(folder) / "jwks.json").write_text(f'{{"keys": [{RSAAlgorithm.to_jwk(key.public_key())}]}}')
        (Path(folder) / "access.toml").write_text(
            f"[client.friend]\ntokens_sha256 = ['{digest(token).hex()}']\noperations = ['infer']\n"
            "[issuer.cluster]\nissuer = 'https://issuer'\naudience = 'triglot'\njwks = 'jwks.json'\n"
            "operations = ['infer']\n"
        )
        control = AccessControl(Config(access=str(Path(folder) / "access.toml")))

    def allowed(token: str) -> Permission:
        return control.permission(Operation.INFER, GRPC, [("authorization", f"Bearer {token}")], tuple)

    new = itertools.cycle(jwts)
    timed = best_of(repeats, [partial(allowed, token), partial(allowed, jwts[0])]) + best_of(
        repeats, [lambda: allowed(next(new))]
    )
    names = "token", "JWT, again", "JWT, RS256"
    return [
        [name, *(f"{seconds * 1e6:,.1f}" for seconds in times)] for name, times in zip(names, timed, strict=True)
    ]


def json_lines(repeats: int) -> list[list[str]]:
    """Return the table lines for REST bodies of the largest size that is parsed on the event loop, and of a tenth
    of that, and for passing work to a thread and waiting for it."""
    bodies = []
    for size in (OFF_LOOP_BYTES // 10, OFF_LOOP_BYTES):
        values = np.random.default_rng(1).standard_normal(size // 21).tolist()
        given = {"name": "x", "datatype": "FP64", "shape": [len(values)], "data": values}
        bodies.append(orjson.dumps({"inputs": [given]}))
    decodes = [partial(decode_infer, HttpRequest({"model": "m"}, {}, body)) for body in bodies]
    with asyncio.Runner() as runner:
        timed = best_of(repeats, decodes)
        hops = [runner.run(_hops()) for _ in range(repeats)]
    names = [f"JSON of {len(body) / 1024:.0f} KiB" for body in bodies]
    timed.append((min(hops), statistics.median(hops)))
    return [
        [name, *(f"{seconds * 1e6:,.1f}" for seconds in times)]
        for name, times in zip([*names, "a thread and back"], timed, strict=True)
    ]


async def _hops() -> float:
    """Return the seconds for passing work to a thread once, averaged over many."""
    began = time.perf_counter()
    for _ in range(HOPS):
        await asyncio.to_thread(int)
    return (time.perf_counter() - began) / HOPS


def collection_lines(repeats: int) -> list[list[str]]:
    """Return the table lines for a full garbage collection with a server's modules, before and after a freeze."""
    importlib.import_module("triglot.server")
    gc.collect()
    through = best_of(repeats, [gc.collect])[0]
    gc.freeze()
    frozen = best_of(repeats, [gc.collect])[0]
    gc.unfreeze()
    named = ("collection", through), ("collection, frozen", frozen)
    return [[name, *(f"{seconds * 1e6:,.1f}" for seconds in times)] for name, times in named]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.micro", description="Codecs, telemetry, credentials, the garbage collector."
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed batches of each (default: %(default)s)")
    parser.add_argument("--keep-memory", action="store_true", help="with a malloc that keeps freed memory")
    arguments = parser.parse_args()
    kept = all(os.environ.get(name) == value for name, value in KEEP_MEMORY.items())
    if arguments.keep_memory and not kept:  # malloc reads it once, at the start of a process
        os.execve(
            sys.executable, [sys.executable, "-m", "bench.micro", *sys.argv[1:]], {**os.environ, **KEEP_MEMORY}
        )
    print(*report.machine(), f"malloc {'keeps its memory' if kept else 'as it comes'}", "", sep="\n")
    header = ["µs per call", *(f"{codec.name} {what}" for codec in CODECS for what in ("min", "median"))]
    header += [f"{codec.name} / protobuf" for codec in CODECS[1:]]
    print(report.plain(header, lines(arguments.repeats)))
    others = telemetry_lines(arguments.repeats) + credential_lines(arguments.repeats)
    others += json_lines(arguments.repeats)
    others += collection_lines(arguments.repeats)
    print("", report.plain(["µs per call", "min", "median"], others), sep="\n")


if __name__ == "__main__":
    main()
