"""A load client as in ordinary programs: grpcio's client and protobuf messages, on threads."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import grpc

from bench.measure import CALL_LIMIT, Round, Subject, round_of
from bench.tally import BenchError, Outcome, Request
from triglot.pb.kserve import inference_pb2 as pb

SIZES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
PREFIX = 5
"""Bytes of gRPC's prefix, which an expected reply has before its message."""


async def load(subject: Subject, in_flight: int, settle: float, seconds: float, connections: int = 1) -> Round:
    """Measure one round of ModelInfer on new channels, with `in_flight` threads. Raise `BenchError`."""
    with _calling(subject, connections) as (connect, call):
        await asyncio.to_thread(connect)
        await asyncio.to_thread(_drive, call, in_flight, settle)
        before, started = subject.server.cpu_seconds(), time.process_time()
        outcome = await asyncio.to_thread(_drive, call, in_flight, seconds)
        used, after = time.process_time() - started, subject.server.cpu_seconds()
    return round_of(outcome, before, after, used)


@contextmanager
def _calling(subject: Subject, connections: int) -> Iterator[tuple[Callable[[], None], Callable[[], Any]]]:
    """Yield two functions: one connects and checks a first reply, one calls with the next request and channel.

    A reply must contain what its request names (`Request.holds`); if that is nothing, the first reply must be
    equal to the expected one, and the others must have its size.
    """
    requests = [
        (pb.ModelInferRequest.FromString(request.body), request)
        for request in subject.requests or [Request(subject.exchange.body)]
    ]
    metadata = [
        [(name.decode(), value.decode()) for name, value in request.metadata.fields] for _, request in requests
    ]
    expected = pb.ModelInferResponse.FromString(subject.expected[PREFIX:])
    size = expected.ByteSize()
    with ExitStack() as stack:
        channels, stubs = [], []
        for number in range(connections):
            # Channels with different options do not share a connection.
            options = [*SIZES, ("triglot.bench", number)]
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{subject.port}", options))
            channels.append(channel)
            stubs.append(
                channel.unary_unary(subject.exchange.path, pb.ModelInferRequest.SerializeToString, _parsed)
            )
        turn = count()

        def call() -> Any:
            number = next(turn)
            message, fields = requests[number % len(requests)]
            timeout = CALL_LIMIT if fields.timeout is None else fields.timeout / 1000
            try:
                data, reply = stubs[number % connections](message, timeout, metadata[number % len(requests)])
            except grpc.RpcError as error:
                raise BenchError(
                    f"{subject.exchange.path} answered {error.code().name}: {error.details()}"
                ) from None
            if wrong := fields.missing(data):
                raise BenchError(wrong)
            if not fields.holds and reply.ByteSize() != size:
                raise BenchError(f"a reply of {reply.ByteSize()} bytes in place of {size}")
            return reply

        def connect() -> None:
            for channel in channels:  # Else this would count towards the first calls' deadlines.
                grpc.channel_ready_future(channel).result(CALL_LIMIT)
            if call() != expected and not requests[0][1].holds:
                raise BenchError("the first reply is another one than before")

        yield connect, call


def _parsed(data: bytes) -> tuple[bytes, Any]:
    """Return a reply's bytes, to be searched for `Request.holds`, and its message, which clients parse, too."""
    return data, pb.ModelInferResponse.FromString(data)


def _drive(call: Callable[[], Any], in_flight: int, seconds: float) -> Outcome:
    over = threading.Event()

    def drive() -> list[float]:
        latencies = []
        while not over.is_set():
            before = time.perf_counter()
            call()
            after = time.perf_counter()
            latencies.append(after - before)
            if after > started + seconds:
                over.set()
        return latencies

    started = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as threads:
        taken = [threads.submit(drive) for _ in range(in_flight)]
        latencies = [latency for time in taken for latency in time.result()]
    return Outcome(len(latencies), time.perf_counter() - started, latencies, [])
