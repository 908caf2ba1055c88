"""Which loads there are, and which servers each of them compares."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.payloads import (
    MESSAGES,
    Exchange,
    Floats,
    binary_exchange,
    grpc_exchange,
    grps_exchange,
    grps_stream_exchange,
    json_exchange,
    predict_content_exchange,
    predict_json_exchange,
    predict_values_exchange,
    stream_exchange,
)

MIB = 2**20 // 4  # FP32 elements in 1 MiB
IMAGE = 3 * 224 * 224  # 150528
THREAD, ASYNC = "identity_fp32", "identity_async"
SPIN = "spin_200us"
Making = Callable[[str, Floats], Exchange]

STARTS = 2
"""In a round, where equal processes differ: neither kind is then found in all of them by chance."""

# glibc's malloc as it comes gives the memory of large messages back to the kernel after each call and faults it
# in again, or it does not: that depends on what happens to lie at the heap's end, so two equal processes may
# differ by a factor of two.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started; the lines of a scenario that name the same one share its process."""

    name: str
    bare: str = ""
    """A kind of `bench.bare`; "" is `triglot serve`."""
    flags: tuple[str, ...] = ()
    keep_memory: bool = False
    """Only of a bare one; ours does what it does by itself."""


BARE_GRPC = Launch("bare grpc.aio", "grpc")
# What ours has over grpc.aio as well: the same loop, and a malloc that keeps its memory.
TUNED_GRPC = Launch("bare grpc.aio, tuned", "grpc", ("--loop", "uvloop"), keep_memory=True)
BARE_REST, BARE_JSON = Launch("bare aiohttp", "rest"), Launch("bare aiohttp + json", "rest-json")
TUNED_REST = Launch("bare aiohttp, tuned", "rest", ("--loop", "uvloop"), keep_memory=True)
H2, AIO, REST = (
    Launch("h2", flags=("--grpc-transport", "h2")),
    Launch("aio", flags=("--grpc-transport", "aio")),
    Launch("rest"),
)
ONE_WORKER, TWO_WORKERS = (
    replace(H2, name="1 worker"),
    replace(H2, name="2 workers", flags=(*H2.flags, "--workers", "2")),
)


@dataclass(frozen=True, slots=True)
class Line:
    """What is loaded: a model on one of the servers, with the scenario's exchange or with its own."""

    name: str
    launch: Launch
    model: str = THREAD
    exchange: Making | None = None


BARE, TUNED = Line(BARE_GRPC.name, BARE_GRPC), Line(TUNED_GRPC.name, TUNED_GRPC)
H2_THREAD, AIO_THREAD = Line("h2, thread", H2), Line("aio, thread", AIO)
H2_ASYNC, AIO_ASYNC = Line("h2, async", H2, ASYNC), Line("aio, async", AIO, ASYNC)
PLAIN, PLAIN_JSON = Line(BARE_REST.name, BARE_REST), Line(BARE_JSON.name, BARE_JSON)
PLAIN_TUNED, OVER_REST = Line(TUNED_REST.name, TUNED_REST), Line("rest, thread", REST)
TOKENS = (
    BARE,
    Line("h2, thread", H2, "tokens"),
    Line("h2, async", H2, "tokens_async"),
    Line("aio, thread", AIO, "tokens"),
)
EVERY_WAY = (BARE, TUNED, H2_THREAD, H2_ASYNC, AIO_THREAD, AIO_ASYNC)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of request, at one load; what is measured is compared with the first line."""

    name: str
    elements: int
    in_flight: int
    exchange: Making
    lines: tuple[Line, ...] = ()
    rows: int = 1
    connections: int = 1
    """Of gRPC; over REST each call in flight has one."""
    native: bool = False
    """A native client loads it, where there is one; for calls that are cheap beside what ours costs."""
    starts: int = 0
    """How often in a round servers are started anew, for what differs from start to start; 0: one start."""
    shared_cores: bool = False
    """Client and servers share all cores."""
    needs: str = ""
    """An option without which it is left out."""

    @property
    def messages(self) -> int:
        """Messages of one reply."""
        return MESSAGES if self.exchange is grps_stream_exchange else 1

    @property
    def title(self) -> str:
        nbytes = self.rows * self.elements * 4
        size = f"{nbytes} B" if nbytes < 1024 else f"{nbytes / 2**20:.3g} MiB"
        what = f", {self.messages} messages each" if self.messages > 1 else ""
        starts = f", started {self.starts} times a round" if self.starts else ""
        return f"FP32 [{self.rows},{self.elements}] ({size}), {self.in_flight} {self._how}{what}{starts}"

    @property
    def _how(self) -> str:
        if self.exchange in REST_EXCHANGES:
            return "connections with one call in flight each"
        if self.exchange is stream_exchange:
            return "sent ahead on one stream"
        return f"in flight on {'one connection' if self.connections == 1 else f'{self.connections} connections'}"


REST_EXCHANGES = (json_exchange, binary_exchange, predict_json_exchange)


def _small(in_flight: int) -> Scenario:
    return Scenario(f"infer-1x16-c{in_flight}", 16, in_flight, grpc_exchange, EVERY_WAY, native=True)


def _large(name: str, elements: int, in_flight: int, making: Making, starts: int = 0) -> Scenario:
    lines = (BARE, TUNED, H2_THREAD, H2_ASYNC, AIO_THREAD)
    return Scenario(name, elements, in_flight, making, lines, starts=starts)


def _rest(name: str, elements: int, in_flight: int, making: Making, rows: int = 1) -> Scenario:
    lines = (PLAIN_JSON, PLAIN, OVER_REST) if making is not binary_exchange else (PLAIN, PLAIN_TUNED, OVER_REST)
    return Scenario(name, elements, in_flight, making, lines, rows=rows, native=elements * rows == 16)


PROTOCOLS = Scenario(
    "protocols-1x16-c64",
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
    native=True,
)
WORKERS = Scenario(
    "workers-1x16-c64",
    16,
    64,
    grpc_exchange,
    (Line("1 worker", ONE_WORKER, SPIN), Line("2 workers", TWO_WORKERS, SPIN)),
    connections=16,
    shared_cores=True,
    needs="workers",
)
SCENARIOS = (
    _small(1),
    _small(8),
    _small(64),
    PROTOCOLS,
    _large("infer-1MiB-c8", MIB, 8, grpc_exchange, starts=STARTS),
    _large("infer-16MiB-c1", 16 * MIB, 1, grpc_exchange, starts=STARTS),
    *(
        Scenario(
            f"stream-1x16-c{ahead}", 16, ahead, stream_exchange, (BARE, TUNED, H2_THREAD, H2_ASYNC, AIO_THREAD)
        )
        for ahead in (1, 16, 64)
    ),
    _large("predict-1MiB-c8", MIB, 8, predict_content_exchange),
    _large("predict-16MiB-c1", 16 * MIB, 1, predict_content_exchange),
    _large("predict-values-16MiB-c1", 16 * MIB, 1, predict_values_exchange),
    _large("grps-1MiB-c8", MIB, 8, grps_exchange),
    *(Scenario(f"grps-stream-1x16-c{streams}", 16, streams, grps_stream_exchange, TOKENS) for streams in (1, 8)),
    _rest("rest-json-1x16-c64", 16, 64, json_exchange),
    _rest("rest-json-1x150528-c4", IMAGE, 4, json_exchange),
    _rest("rest-binary-1x150528-c4", IMAGE, 4, binary_exchange),
    _rest("rest-predict-1x16-c64", 16, 64, predict_json_exchange),
    _rest("rest-predict-1000x16-c4", 16, 4, predict_json_exchange, rows=1000),
    _rest("rest-predict-1x150528-c4", IMAGE, 4, predict_json_exchange),
    WORKERS,
)
