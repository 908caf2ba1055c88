"""The scenarios: loads, and the servers that each of them compares."""

import sys
from dataclasses import dataclass, replace

from bench.payloads import (
    MESSAGES,
    binary_exchange,
    bytes_exchange,
    contents_exchange,
    grpc_exchange,
    grps_exchange,
    grps_stream_exchange,
    json_exchange,
    predict_content_exchange,
    predict_json_exchange,
    predict_values_exchange,
    stream_exchange,
    two_exchange,
)
from bench.servers import Checkout
from bench.traffic import IDENTICAL, INDEXED, ONE_ROW, VARIED, Making, Traffic

MIB = 2**20 // 4  # FP32 elements in 1 MiB
IMAGE = 3 * 224 * 224  # 150528
THREAD, ASYNC = "identity_fp32", "identity_async"
OTHER, TWO, BYTES = "identity_other", "identity_two", "identity_bytes"
SPIN = "spin_200us"
RAW, CPP, PYTHON = "our own client", "gRPC's C++ client", "gRPC's Python client"

STARTS = 2
"""Starts in a round, for loads where equal processes differ: then not all are fast, or all slow, by chance."""

# By default, glibc's malloc may return the memory of large messages to the kernel after each call, and fault it in
# again. Whether it does depends on what happens to be at the end of the heap, so two equal processes may differ by
# a factor of two.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started; lines of a scenario with the same launch share its process."""

    name: str
    bare: str = ""
    """A kind of `bench.bare`; "" is `triglot serve`."""
    flags: tuple[str, ...] = ()
    keep_memory: bool = False
    """Whether malloc keeps freed memory; only for a bare server, as triglot sets that itself."""
    triton: bool = False
    """Whether it is Triton's server."""
    checkout: Checkout | None = None
    """The checkout whose server it is; None for this one."""
    python: str = sys.executable
    """The interpreter that runs it, unless it is Triton's."""

    @property
    def ours(self) -> bool:
        """Whether it is `triglot serve`."""
        return not self.bare and not self.triton


BARE_GRPC = Launch("bare grpc.aio", "grpc")
# With what triglot uses over grpc.aio, too: the same loop, and a malloc that keeps its memory.
TUNED_GRPC = Launch("bare grpc.aio, tuned", "grpc", ("--loop", "uvloop"), keep_memory=True)
BARE_REST, BARE_JSON = Launch("bare aiohttp", "rest"), Launch("bare aiohttp + json", "rest-json")
TUNED_REST = Launch("bare aiohttp, tuned", "rest", ("--loop", "uvloop"), keep_memory=True)
H2, AIO, REST = (
    Launch("h2", flags=("--grpc-transport", "h2")),
    Launch("aio", flags=("--grpc-transport", "aio")),
    Launch("rest"),
)
TRITON = Launch("tritonserver", triton=True)
ONE_WORKER, TWO_WORKERS = (
    replace(H2, name="1 worker"),
    replace(H2, name="2 workers", flags=(*H2.flags, "--workers", "2")),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line: a model on one of the servers, with the scenario's exchange and traffic, or its own."""

    name: str
    launch: Launch
    model: str = THREAD
    exchange: Making | None = None
    traffic: Traffic | None = None
    and_model: str = ""
    """Model of every second call; "" for none."""
    client: str = RAW

    @property
    def models(self) -> tuple[str, ...]:
        """The models that are called in turn."""
        return (self.model, self.and_model) if self.and_model else (self.model,)


BARE, TUNED = Line(BARE_GRPC.name, BARE_GRPC), Line(TUNED_GRPC.name, TUNED_GRPC)
H2_THREAD, AIO_THREAD = Line("h2, thread", H2), Line("aio, thread", AIO)
H2_ASYNC, AIO_ASYNC = Line("h2, async", H2, ASYNC), Line("aio, async", AIO, ASYNC)
IDENTICAL_CALLS = "h2, thread, identical calls"
H2_IDENTICAL = Line(IDENTICAL_CALLS, H2, traffic=IDENTICAL)
OVER_TRITON = Line(TRITON.name, TRITON)
PLAIN, PLAIN_JSON = Line(BARE_REST.name, BARE_REST), Line(BARE_JSON.name, BARE_JSON)
PLAIN_TUNED, OVER_REST = Line(TUNED_REST.name, TUNED_REST), Line("rest, thread", REST)
REST_IDENTICAL = Line("rest, thread, identical calls", REST, traffic=IDENTICAL)
REST_ONE_ROW = Line("rest, thread, one row", REST, traffic=ONE_ROW)
TOKENS = (
    BARE,
    Line("h2, thread", H2, "tokens"),
    Line("h2, async", H2, "tokens_async"),
    Line("aio, thread", AIO, "tokens"),
)
EVERY_WAY = (BARE, TUNED, H2_THREAD, H2_IDENTICAL, H2_ASYNC, AIO_THREAD, AIO_ASYNC, OVER_TRITON)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of request at one load; the lines are compared with the first one."""

    name: str
    elements: int
    in_flight: int
    exchange: Making
    lines: tuple[Line, ...] = ()
    rows: int = 1
    connections: int = 1
    """Number of gRPC connections; over REST each call in flight has one."""
    traffic: Traffic | None = None
    """How small calls differ; None: one request is repeated."""
    starts: int = 0
    """Starts of the servers per round, for results that differ from start to start; 0: one for all rounds."""
    shared_cores: bool = False
    """Whether client and servers share all cores."""
    needs: str = ""
    """Option of the server without which the scenario is skipped; "" for none."""

    @property
    def messages(self) -> int:
        """Number of messages of one reply."""
        return MESSAGES if self.exchange is grps_stream_exchange else 1

    @property
    def title(self) -> str:
        what = f", {self.messages} messages each" if self.messages > 1 else ""
        starts = f", started {self.starts} times a round" if self.starts else ""
        return f"{self._size}, {self.in_flight} {self._how}{what}{starts}"

    @property
    def _size(self) -> str:
        if self.traffic is not None and self.traffic.varied:
            rows = "1" if self.traffic.rows == 1 else f"1-{self.traffic.rows}"
            return f"FP32 [{rows},{self.elements}], no call like another one"
        nbytes = self.rows * self.elements * 4
        size = f"{nbytes} B" if nbytes < 1024 else f"{nbytes / 2**20:.3g} MiB"
        return f"FP32 [{self.rows},{self.elements}] ({size})"

    @property
    def _how(self) -> str:
        if self.exchange in REST_EXCHANGES:
            return "connections with one call in flight each"
        if self.exchange is stream_exchange:
            return "sent ahead on one stream"
        return f"in flight on {'one connection' if self.connections == 1 else f'{self.connections} connections'}"


REST_EXCHANGES = (json_exchange, binary_exchange, predict_json_exchange)


def _small(in_flight: int, connections: int = 1) -> Scenario:
    name = f"infer-c{in_flight}"
    return Scenario(name, 16, in_flight, grpc_exchange, EVERY_WAY, connections=connections, traffic=VARIED)


def _large(name: str, elements: int, in_flight: int, making: Making, starts: int = 0) -> Scenario:
    lines = (BARE, TUNED, H2_THREAD, H2_ASYNC, AIO_THREAD, *([OVER_TRITON] if making is grpc_exchange else []))
    return Scenario(name, elements, in_flight, making, lines, starts=starts)


def _rest(name: str, elements: int, in_flight: int, making: Making, rows: int = 1) -> Scenario:
    lines = (PLAIN_JSON, PLAIN, OVER_REST) if making is not binary_exchange else (PLAIN, PLAIN_TUNED, OVER_REST)
    return Scenario(name, elements, in_flight, making, lines, rows=rows)


def _small_rest(name: str, in_flight: int, making: Making) -> Scenario:
    lines = [PLAIN_JSON, PLAIN, OVER_REST, REST_ONE_ROW, REST_IDENTICAL]
    if making is json_exchange:
        lines.append(OVER_TRITON)
    return Scenario(f"{name}-c{in_flight}", 16, in_flight, making, tuple(lines), traffic=VARIED)


def _small_stream(ahead: int) -> Scenario:
    lines = (BARE, TUNED, H2_THREAD, H2_IDENTICAL, H2_ASYNC, AIO_THREAD, OVER_TRITON)
    return Scenario(f"stream-c{ahead}", 16, ahead, stream_exchange, lines, traffic=VARIED)


def _tokens(streams: int) -> Scenario:
    return Scenario(f"grps-stream-c{streams}", 16, streams, grps_stream_exchange, TOKENS, traffic=ONE_ROW)


CLIENTS = Scenario(
    "clients-c64",
    16,
    64,
    grpc_exchange,
    tuple(
        replace(line, name=f"{line.name}, by {client}", client=client)
        for line in (H2_THREAD, BARE, OVER_TRITON)
        for client in (RAW, CPP, PYTHON)
    ),
    connections=8,
    traffic=VARIED,
)
KINDS = Scenario(
    "kinds-c64",
    16,
    64,
    grpc_exchange,
    tuple(
        replace(line, name=f"{kind}, {launch.name}", launch=launch)
        for launch in (H2, TRITON)
        for kind, line in {
            "one model": Line("", launch),
            "two models in turn": Line("", launch, and_model=OTHER),
            "fp32_contents": Line("", launch, exchange=contents_exchange),
            "two inputs": Line("", launch, TWO, exchange=two_exchange),
            "BYTES": Line("", launch, BYTES, exchange=bytes_exchange),
            "metadata added to HPACK's table": Line("", launch, traffic=INDEXED),
        }.items()
    ),
    connections=8,
    traffic=VARIED,
)
PROTOCOLS = Scenario(
    "protocols-c64",
    16,
    64,
    grpc_exchange,
    (
        Line("ModelInfer h2", H2),
        Line("Predict h2", H2, exchange=predict_content_exchange),
        Line("Predict, float_val h2", H2, exchange=predict_values_exchange),
        Line("grps Predict h2", H2, exchange=grps_exchange),
        Line("ModelInfer bare", BARE_GRPC),
        Line("ModelInfer bare, tuned", TUNED_GRPC),
        Line("Predict aio", AIO, exchange=predict_content_exchange),
        Line("grps Predict aio", AIO, exchange=grps_exchange),
    ),
    connections=8,
    traffic=VARIED,
)
WORKERS = Scenario(
    "workers-c64",
    16,
    64,
    grpc_exchange,
    (Line("1 worker", ONE_WORKER, SPIN), Line("2 workers", TWO_WORKERS, SPIN)),
    connections=16,
    traffic=VARIED,
    shared_cores=True,
    needs="workers",
)
SCENARIOS = (
    _small(1),
    _small(8),
    _small(64, 8),
    CLIENTS,
    KINDS,
    PROTOCOLS,
    _large("infer-1MiB-c8", MIB, 8, grpc_exchange, starts=STARTS),
    _large("infer-16MiB-c1", 16 * MIB, 1, grpc_exchange, starts=STARTS),
    _large("infer-16MiB-c4", 16 * MIB, 4, grpc_exchange, starts=STARTS),
    _small_stream(1),
    _small_stream(16),
    _small_stream(64),
    _large("predict-1MiB-c8", MIB, 8, predict_content_exchange),
    _large("predict-16MiB-c1", 16 * MIB, 1, predict_content_exchange),
    _large("predict-values-16MiB-c1", 16 * MIB, 1, predict_values_exchange),
    _large("grps-1MiB-c8", MIB, 8, grps_exchange),
    _tokens(1),
    _tokens(8),
    _small_rest("rest-json", 8, json_exchange),
    _small_rest("rest-json", 64, json_exchange),
    _rest("rest-json-1x150528-c4", IMAGE, 4, json_exchange),
    _rest("rest-binary-1x150528-c4", IMAGE, 4, binary_exchange),
    _small_rest("rest-predict", 8, predict_json_exchange),
    _small_rest("rest-predict", 64, predict_json_exchange),
    _rest("rest-predict-1000x16-c4", 16, 4, predict_json_exchange, rows=1000),
    _rest("rest-predict-1x150528-c4", IMAGE, 4, predict_json_exchange),
    WORKERS,
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
