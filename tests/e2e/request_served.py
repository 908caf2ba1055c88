"""Serves the models of `request_checkpoints` in this process, and checks that ended requests leave nothing."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NoReturn

import aiohttp
import grpc.aio

import triglot
from tests.e2e.request_cases import answers_of, carries, good
from tests.e2e.request_checkpoints import Checkpoints, checkpoints_in, write_models
from tests.process import SECONDS
from tests.protocol_clients.abortable import CLIENTS, Attempt, Client, Request
from tests.span_receivers import SERVER, Span, spans_of
from tests.transports.grpc_transport import transport_options
from tests.versions import OLD_AIOHTTP
from tests.waiting import until
from triglot.core.operation import EVERYTHING
from triglot.telemetry.spans.exporter import Exporter
from triglot.telemetry.spans.otlp import Envelope
from triglot.telemetry.spans.recorder import SpanRecorder, of_ratio
from triglot.telemetry.spans.rows import Row, encode
from triglot.telemetry.spans.settings import SpanSettings

TRIES = 8
"""Least number of attempts for a request that must reach some point before its deadline."""
POOL = "asyncio_"
"""Name prefix of the threads of the event loop's default executor, which start on demand and remain."""


class Served:
    """The server, its clients, and the checkpoints of its models.

    `hurried`: the server has a default timeout, so any request may expire on a busy machine.
    """

    def __init__(
        self,
        server: triglot.Server,
        checkpoints: Checkpoints,
        channel: grpc.aio.Channel,
        session: aiohttp.ClientSession,
    ) -> None:
        self.server = server
        self.checkpoints = checkpoints
        self._live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        url = f"http://127.0.0.1:{server.rest_port}"
        self.clients: dict[str, Client] = {name: client(channel, session, url) for name, client in CLIENTS.items()}
        self.hurried = server.config.default_timeout > 0
        self.spans = KeptSpans(server)
        self.threads: Counter[str] = Counter()
        self.old_calls: list[triglot.Call] = []

    async def infer(self, client: str, request: Request) -> tuple[str, list[str]]:
        """Send a request; returns its outcome and the texts of its responses."""
        attempt = self.clients[client].begin(request)
        return await attempt.wait_ended(), attempt.answers

    async def infer_well(self, model: str, client: str) -> None:
        """Send a request to this model that must succeed. Raise `AssertionError` when it does not."""
        for _ in tries(f"{model} by {client} gives no good answer"):
            found = await self.infer(client, good(model))
            if found == (self.clients[client].good, answers_of(model, "good")):
                return
            # With a default timeout, a busy machine may need another attempt.
            assert self.hurried, f"{model} by {client}: {found}"

    async def serves(self, model: str, client: str) -> None:
        """Check that a further request over the same connection succeeds, and leaves nothing."""
        await self.infer_well(model, client)
        await self.at_rest(aborted=self.hurried)

    def waiting(self, model: str) -> int:
        """Return the number of requests in a model's queue."""
        return self.server.manager.registry.servable(model).queue_depth

    def so_far(self, client: str) -> Counter[str]:
        """As `counted_code`, at the start of a test; `at_rest` allows the threads and calls that exist now."""
        self.threads, self.old_calls = threads(), calls()  # Other tests may keep calls alive.
        return self.counted_code(client)

    def counted_code(self, client: str) -> Counter[str]:
        """Return the number of this client's inferences that ended with each code."""
        endpoint = self.clients[client].endpoint
        counts: Counter[str] = Counter()
        for call, kind, stats in self.server.telemetry.calls():
            if (call.protocol, call.entrypoint, call.method) == endpoint:
                counts[kind.code.name] += stats.latency.count
        return counts

    async def at_rest(self, *, aborted: bool = False) -> None:
        """Wait until nothing is left of any request. Raise `AssertionError` when something remains.

        `aborted`: grpc.aio has ended a call with a status, so calls may need the garbage collector.
        """
        await until(lambda: not self.server.telemetry.in_flight, "calls are in flight")
        await until(lambda: not self.held(), "something is held", self.held)
        if aborted or OLD_AIOHTTP:
            await self._collect()
        await until(lambda: not self.calls(), "calls are alive", lambda: list(map(vars_of, self.calls())))
        await until(lambda: threads() <= self.threads, "threads have come", lambda: threads() - self.threads)

    def check_spans(self, attempts: Iterable[Attempt | None]) -> None:
        """Check that each inference, also by a model, has one ended span, with the client's span as ancestor."""
        counts = [stats.latency.count for call, _, stats in self.server.telemetry.calls() if call.inference]
        assert len(self.spans.calls()) == sum(counts)
        for attempt in filter(None, attempts):
            trace = self.spans.of(attempt.trace)
            roots = [span for span in trace if span.kind == SERVER]
            assert len(roots) <= 1  # None if the request did not reach the server's handler.
            assert all(root.parent == attempt.parent for root in roots)
            known = {span.id for span in trace}
            assert len(known) == len(trace), "a span was exported twice"
            assert all(span.parent in known for span in trace if span not in roots)
            children = Counter((span.parent, span.name) for span in trace if span.name in ("queue", "compute"))
            assert not children or max(children.values()) == 1

    async def _collect(self) -> None:
        """Run the garbage collector until no calls are alive.

        grpc.aio keeps the task of its last call until the next one, and leaves it to the garbage collector.
        """
        with suppress(TimeoutError):  # The caller's next check reports what remains.
            async with asyncio.timeout(SECONDS):
                while self.calls():
                    if not self.server.dataplane.stopping:
                        await self._live(b"")
                    await asyncio.sleep(0)
                    gc.collect()

    def calls(self) -> list[triglot.Call]:
        """Return the calls made since the test began that are alive, or wait for the garbage collector."""
        old = {id(call) for call in self.old_calls}
        return [call for call in calls() if id(call) not in old]

    def held(self) -> list[str]:
        """Return texts for versions with leases, queued requests, or readings of held requests and bytes."""
        held = []
        for version in self.server.dataplane.versions(EVERYTHING):
            servable = version.servable
            if servable is None:
                continue
            held += [f"{servable}: {servable.leases} leases"] if servable.leases else []
            held += [f"{servable}: {servable.queue_depth} requests are queued"] if servable.queue_depth else []
            held += [
                f"{servable}: {reading.name} {reading.value}"
                for reading in servable.readings()
                if reading.name in ("held_requests", "held_bytes") and reading.value
            ]
        return held


class KeptSpans(Exporter):
    """An exporter that keeps all spans in memory. Makes the server sample every request."""

    def __init__(self, server: triglot.Server) -> None:
        super().__init__(SpanSettings(), make_sender=_no_sender)
        self._kept: list[Row] = []
        self._spans: list[Span] = []
        self._envelope = Envelope({}, "triglot", "")
        server.telemetry.observers.append(SpanRecorder(self, of_ratio(1.0)))

    def put(self, row: Row) -> None:
        """See the base class."""
        self._kept.append(row)

    def spans(self) -> list[Span]:
        """Return all ended spans."""
        kept, self._kept = self._kept, []
        self._spans += spans_of(self._envelope.request(encode(kept, 0)))
        return self._spans

    def calls(self) -> list[Span]:
        """Return the spans of calls, those of clients and of models."""
        return [span for span in self.spans() if span.name not in ("queue", "compute", "batch")]

    def of(self, trace: str) -> list[Span]:
        """Return the spans of a trace."""
        return [span for span in self.spans() if span.trace == trace]


def _no_sender() -> NoReturn:
    raise AssertionError("nothing is sent")


def tries(failure: str) -> Iterator[int]:
    """Yield the numbers, from 0, of attempts that may fail on a busy machine: at least `TRIES`, for `SECONDS`.

    Raise `AssertionError` with the text `failure` after the last one.
    """
    began = time.monotonic()
    for number in itertools.count():
        if number >= TRIES and time.monotonic() - began > SECONDS:
            raise AssertionError(f"in {number} tries: {failure}")
        yield number


def calls() -> list[triglot.Call]:
    """Return all calls that are alive in this process."""
    return [tracked for tracked in gc.get_objects() if isinstance(tracked, triglot.Call)]


def vars_of(call: triglot.Call) -> str:
    """Return a text for a failed check: the call's model, and the objects that keep the call alive."""
    kept = [_named(referrer) for referrer in gc.get_referrers(call)]
    return f"{call.model_name}, cancelled: {call.cancelled}, kept by {kept}"


def _named(item: object) -> str:
    return item.f_code.co_qualname if isinstance(item, FrameType) else type(item).__name__


def threads() -> Counter[str]:
    """Return the number of threads by name, with N for numbers, without those of the loop's default executor."""
    names = [thread.name for thread in threading.enumerate()]
    return Counter(re.sub(r"\d+", "N", name) for name in names if not name.startswith(POOL))


@contextmanager
def traces_as_text() -> Iterator[None]:
    """Make log records keep tracebacks as text: pytest keeps records, and so the frames and calls of errors."""
    usual = logging.getLogRecordFactory()

    def make(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = usual(*arguments, **named)
        if record.exc_info:
            record.exc_text, record.exc_info = logging.Formatter().formatException(record.exc_info), None
        return record

    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        logging.setLogRecordFactory(usual)


@asynccontextmanager
async def serving(
    models: Sequence[str], clients: Collection[str] = tuple(CLIENTS), **options: Any
) -> AsyncIterator[Served]:
    """Serve these models with checkpoints; yields once each has served one request of each of these clients."""
    gc.collect()
    gc.freeze()  # Searches for remaining calls then skip the objects that existed before.
    with traces_as_text(), TemporaryDirectory(prefix="checkpoints-") as folder:
        write_models(Path(folder), tuple(models))
        config = triglot.Config(
            grpc_port=0,
            rest_port=0,
            grace=0,
            protocols="kserve,tfserving,grps",
            max_total_queue_size=100,
            **transport_options(**options),
        )
        async with (
            checkpoints_in(Path(folder)) as checkpoints,
            triglot.Server([Path(folder)], config) as server,
            grpc.aio.insecure_channel(
                f"127.0.0.1:{server.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]
            ) as channel,
            aiohttp.ClientSession() as session,
        ):
            served = Served(server, checkpoints, channel, session)
            for model in models:
                for name in clients:
                    if carries(served.clients[name], model):
                        await served.infer_well(model, name)
            yield served
