"""Compares 16 MiB in and out of a model through system shared memory with the same bytes in gRPC messages.

From the repository's root: `python -m bench.shared_memory --help`. One server with one model, and a bare grpc.aio
handler that replies with the same bytes. The client's tensor is already in its region, as in a program that works
there; the output in the other region is compared with it after each round. The load client costs as little as
possible; the same is measured with grpcio's client, on which tritonclient is built, with a request made once.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import grpc

from bench import report, rounds, servers, stockclient
from bench.measure import CALL_LIMIT, Round, Subject, call_once, load
from bench.payloads import GRPC_PATH, Exchange, Floats, grpc_exchange, tensor
from bench.rounds import Measured, Plan
from bench.scenarios import BARE_GRPC, MIB, STARTS, Scenario
from bench.tally import BenchError
from triglot.pb.kserve import inference_pb2 as pb

MODEL = "identity_fp32"
SERVICE = "/inference.GRPCInferenceService/"
ELEMENTS = 16 * MIB
IN_FLIGHT = (1, 4)
GOAL = 10
PREFIX = "/triglot_bench_"
IN, OUT = "in", "out"
RAW, SHARED = "raw gRPC", "shared memory"
BY_GRPCIO = ", by grpcio's client"
COLUMNS = (
    "through",
    "calls/s",
    "x bare",
    "(min-max)",
    "p50 ms",
    "p99 ms",
    "CPU µs/call",
    "x bare",
    "client busy",
)
LEGEND = f"""\
Medians over rounds, each of them {STARTS} times with new servers, since what malloc costs differs from start to
start; they are loaded in turn, one at a time. The first is a bare grpc.aio handler that answers with bytes it has;
the others are a model on the same server. The client is the bench's own, which costs less than others, and where
the line says so grpcio's, with protobuf's messages. "x bare" is the median of the rounds' own ratios to the first
line (and, in brackets, their range). CPU is user and kernel time of the server for one call. "client busy" is the
share of its core that the load client used."""


def _bytes(region: SharedMemory) -> memoryview:
    """Return the region's memory, which only a closed region lacks."""
    assert region.buf is not None
    return region.buf


@dataclass(frozen=True, slots=True)
class Regions:
    """The shared memory regions of input (`given`) and output (`taken`)."""

    given: SharedMemory
    taken: SharedMemory
    values: Floats

    def expect(self) -> None:
        """Clear the output region."""
        _bytes(self.taken)[: self.values.nbytes] = bytes(self.values.nbytes)

    def check(self) -> None:
        """Raise `BenchError` when the output differs from the input."""
        if _bytes(self.taken)[: self.values.nbytes] != _bytes(self.given)[: self.values.nbytes]:
            raise BenchError("the region of the output does not hold what went in")


@contextmanager
def _region(name: str, size: int) -> Iterator[SharedMemory]:
    region = SharedMemory(f"{PREFIX}{os.getpid()}_{name}", create=True, size=size)
    try:
        yield region
    finally:
        region.close()
        region.unlink()


@contextmanager
def _regions(values: Floats) -> Iterator[Regions]:
    with _region(IN, values.nbytes) as given, _region(OUT, values.nbytes) as taken:
        _bytes(given)[: values.nbytes] = values.tobytes()
        yield Regions(given, taken, values)


def region_exchange(values: Floats) -> Exchange:
    """Return an exchange whose request and reply refer to tensors in the regions."""
    request = pb.ModelInferRequest(model_name=MODEL)
    tensors = (
        (request.inputs.add(name="x", datatype="FP32", shape=values.shape), IN),
        (request.outputs.add(name="y"), OUT),
    )
    for placed, region in tensors:
        placed.parameters["shared_memory_region"].string_param = region
        placed.parameters["shared_memory_byte_size"].int64_param = values.nbytes

    def check(_: Mapping[str, str], body: bytes) -> None:
        reply = pb.ModelInferResponse.FromString(body)
        described = [(output.name, output.datatype, list(output.shape)) for output in reply.outputs]
        if described != [("y", "FP32", list(values.shape))] or any(reply.raw_output_contents):
            raise BenchError(f"the reply has the outputs {described} and {reply.ByteSize()} bytes")

    return Exchange(GRPC_PATH, request.SerializeToString(), b"", check)


def _register(port: int, regions: Regions) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        register = channel.unary_unary(f"{SERVICE}SystemSharedMemoryRegister")
        for name, region in ((IN, regions.given), (OUT, regions.taken)):
            request = pb.SystemSharedMemoryRegisterRequest(
                name=name, key=f"/{region.name.lstrip('/')}", byte_size=regions.values.nbytes
            )
            try:
                register(request.SerializeToString(), timeout=CALL_LIMIT)
            except grpc.RpcError as error:
                raise BenchError(f"the region was refused: {error.code().name}: {error.details()}") from None


@contextmanager
def _serving(regions: Regions, core: int | None) -> Iterator[list[Subject]]:
    """Run a bare handler and a server; yields a subject for each of the two clients."""
    messages = grpc_exchange(MODEL, regions.values)
    with (
        servers.bare(BARE_GRPC.bare, messages, core) as (handler, handler_port, _),
        rounds.serving_models(core, ["--shared-memory-prefix", PREFIX]) as (server, port, _),
    ):
        _register(port, regions)
        yield [
            Subject(BARE_GRPC.name, handler, handler_port, messages),
            Subject(RAW, server, port, messages),
            Subject(SHARED, server, port, region_exchange(regions.values)),
            Subject(RAW + BY_GRPCIO, server, port, messages),
            Subject(SHARED + BY_GRPCIO, server, port, region_exchange(regions.values)),
        ]


async def _rounds(
    subjects: Sequence[Subject], regions: Regions, scenario: Scenario, plan: Plan
) -> list[Measured[str]]:
    async def one_round(subject: Subject, settle: float, seconds: float) -> Round:
        regions.expect()
        if subject.name.endswith(BY_GRPCIO):
            taken = await stockclient.load(subject, scenario.in_flight, settle, seconds)
        else:
            taken = await load(scenario, subject, settle, seconds)
        if subject.name.startswith(SHARED):
            regions.check()
        return taken

    return await rounds.interleaved(subjects, plan, one_round)


def measure(
    plan: Plan, in_flights: Sequence[int], core: int | None, elements: int = ELEMENTS
) -> dict[int, list[Measured[str]]]:
    """Measure the same servers under each load; new servers are started `STARTS` times a round."""
    values = tensor(1, elements)
    found: dict[int, list[list[Measured[str]]]] = {in_flight: [] for in_flight in in_flights}
    for _ in range(plan.rounds * STARTS):
        with _regions(values) as regions, _serving(regions, core) as subjects:
            for in_flight, taken in found.items():
                scenario = Scenario("shared memory", elements, in_flight, grpc_exchange)
                for subject in subjects:
                    subject.expected = call_once(subject)
                regions.check()
                taken.append(asyncio.run(_rounds(subjects, regions, scenario, Plan(1, plan.seconds))))
    return {
        in_flight: [_joined(starts) for starts in zip(*taken, strict=True)] for in_flight, taken in found.items()
    }


def _joined(starts: Sequence[Measured[str]]) -> Measured[str]:
    """Return the rounds of all starts of one server."""
    return Measured(starts[0].setting, [run for start in starts for run in start.rounds])


def lines(measured: Sequence[Measured[str]]) -> Iterator[str]:
    """Yield the table of one load, and its conclusion."""
    yield report.plain(COLUMNS, [rounds.row(measurement, measured[0]) for measurement in measured])
    by_name = {measurement.setting: measurement for measurement in measured}
    bare = measured[0].setting
    for shared, other in ((SHARED, bare), (SHARED, RAW), (SHARED + BY_GRPCIO, RAW + BY_GRPCIO)):
        ratio = rounds.middle(rounds.ratios(by_name[shared], by_name[other]))
        yield f"{shared} / {other}: {ratio}, goal {GOAL}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.shared_memory", description=__doc__.splitlines()[0])
    what = f"{MODEL}, FP32 [1,{ELEMENTS}], {ELEMENTS * 4 / 2**20:g} MiB in and out"
    return rounds.main(parser, words, what, IN_FLIGHT, measure, lines, LEGEND)


if __name__ == "__main__":
    sys.exit(main())
