"""ModelStreamInfer with many requests sent ahead on one stream, against a bare grpc.aio handler of such streams.

From the repository's root: `python -m bench.stream --help`. The bare server answers each message with ready-made
bytes; ours reads, runs and answers each request.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc

from bench import report, rounds, servers, streamclient
from bench.measure import CALL_LIMIT, Round, Subject, load_on
from bench.payloads import STREAM_PATH, Exchange, framed, stream_exchange, tensor
from bench.rounds import Measured, Plan
from bench.tally import BenchError

ELEMENTS = 16
IN_FLIGHT = (1, 16, 64)
OURS = ("identity_fp32", "identity_async")
GOAL = 0.70
COLUMNS = ("server", "answers/s", "x bare", "(min-max)", "p50 ms", "p99 ms", "CPU µs", "x bare", "client busy")
LEGEND = """\
Medians over rounds; what is compared is loaded in turn, one at a time, round by round. "x bare" is the median of
the rounds' own ratios to the first line (and, in brackets, their range). CPU is user and kernel time of the server
for one answer. "client busy" is the share of its core that the load client used; above 90%, marked with !, the
client was the limit, and CPU is the figure to compare."""


def _start(stack: ExitStack, exchange: Exchange, core: int | None) -> Iterator[Subject]:
    """The bare server and ours, until the stack ends."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triglot-bench-")))
    reply, port = folder / "reply", servers.free_port()
    reply.write_bytes(exchange.reply)
    bare = servers.started(
        "bare grpc",
        [sys.executable, "-m", "bench.bare", "grpc", "--port", str(port), "--reply", str(reply)],
        lambda: servers.accepts(port),
        core=core,
        log=folder / "bare.log",
        environment={},
    )
    yield Subject("bare grpc", stack.enter_context(bare), port, exchange)
    ours, grpc_port, _ = stack.enter_context(rounds.serving_models(core))
    for model in OURS:
        yield Subject(f"triglot {model}", ours, grpc_port, stream_exchange(model, tensor(1, ELEMENTS)))


def answer(subject: Subject) -> bytes:
    """One answer on a stream as an ordinary client gets it, checked for its meaning."""
    with grpc.insecure_channel(f"127.0.0.1:{subject.port}") as channel:
        call = channel.stream_stream(STREAM_PATH)
        try:
            answers: list[bytes] = list(call(iter([subject.exchange.body]), timeout=CALL_LIMIT))
        except grpc.RpcError as error:
            raise BenchError(f"{subject.name} answered {error.code().name}: {error.details()}") from None
    if len(answers) != 1:
        raise BenchError(f"{subject.name} gave {len(answers)} answers to one request")
    subject.exchange.check({}, answers[0])
    return answers[0]


async def _rounds(subjects: Sequence[Subject], in_flight: int, plan: Plan) -> list[Measured[str]]:
    async def load(subject: Subject, settle: float, seconds: float) -> Round:
        exchange = subject.exchange
        connection = await streamclient.connect(subject.port, exchange.path, exchange.body, in_flight)
        return await load_on([connection], subject, settle, seconds)

    return await rounds.interleaved(subjects, plan, load)


def measure(plan: Plan, in_flights: Sequence[int], core: int | None) -> dict[int, list[Measured[str]]]:
    """The same servers under each load."""
    with ExitStack() as stack:
        subjects = list(_start(stack, stream_exchange("bare", tensor(1, ELEMENTS)), core))
        for subject in subjects:
            subject.expected = framed([answer(subject)])
        try:
            return {in_flight: asyncio.run(_rounds(subjects, in_flight, plan)) for in_flight in in_flights}
        except BenchError as error:
            tails = "\n".join(f"{one.name}: {one.server.tail()}" for one in subjects[:2])
            raise BenchError(f"{error}\n{tails}") from error


def lines(measured: Sequence[Measured[str]]) -> Iterator[str]:
    """The table of one load, and what it comes to."""
    bare = measured[0]
    yield report.plain(COLUMNS, [rounds.row(one, bare) for one in measured])
    for one in measured[1:]:
        yield f"{one.setting} / bare: {rounds.middle(rounds.ratios(one, bare))}, goal {GOAL:.2f}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when something went wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.stream", description=__doc__.splitlines()[0])
    what = f"ModelStreamInfer, FP32 [1,{ELEMENTS}], one stream"
    return rounds.main(parser, words, what, IN_FLIGHT, measure, lines, LEGEND)


if __name__ == "__main__":
    sys.exit(main())
