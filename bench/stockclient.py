"""A load client as programs have it: grpcio's own, and protobuf's messages, on threads."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from bench.measure import CALL_LIMIT, Round, Subject, round_of
from bench.tally import BenchError, Outcome
from triglot.pb.kserve import inference_pb2 as pb

SIZES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
PREFIX = 5
"""Bytes before a message, of what is expected."""


async def load(subject: Subject, in_flight: int, settle: float, seconds: float) -> Round:
    """One round of ModelInfer on a fresh channel, so many threads calling; raises `BenchError`."""
    with _calling(subject) as call:
        await asyncio.to_thread(_drive, call, in_flight, settle)
        before, started = subject.server.cpu_seconds(), time.process_time()
        outcome = await asyncio.to_thread(_drive, call, in_flight, seconds)
        used, after = time.process_time() - started, subject.server.cpu_seconds()
    return round_of(outcome, before, after, used)


@contextmanager
def _calling(subject: Subject) -> Iterator[Callable[[], None]]:
    """A call of it, whose reply must be the expected one: the first one to its last byte, others in size."""
    request = pb.ModelInferRequest.FromString(subject.exchange.body)
    expected = pb.ModelInferResponse.FromString(subject.expected[PREFIX:])
    size = expected.ByteSize()
    with grpc.insecure_channel(f"127.0.0.1:{subject.port}", SIZES) as channel:
        stub = channel.unary_unary(
            subject.exchange.path, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )

        def call() -> Any:
            try:
                reply = stub(request, timeout=CALL_LIMIT)
            except grpc.RpcError as error:
                raise BenchError(
                    f"{subject.exchange.path} answered {error.code().name}: {error.details()}"
                ) from None
            if reply.ByteSize() != size:
                raise BenchError(f"a reply of {reply.ByteSize()} bytes in place of {size}")
            return reply

        if call() != expected:
            raise BenchError("the first reply is another one than before")
        yield call


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
        latencies = [latency for one in taken for latency in one.result()]
    return Outcome(len(latencies), time.perf_counter() - started, latencies, [])
