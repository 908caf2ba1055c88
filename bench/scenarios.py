"""Which loads there are, and which servers each of them compares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
)

MIB = 2**20 // 4  # FP32 elements in 1 MiB
IMAGE = 3 * 224 * 224  # 150528

GRPC_EXCHANGES = (
    grpc_exchange,
    predict_content_exchange,
    predict_values_exchange,
    grps_exchange,
    grps_stream_exchange,
)
TOKENS = ("tokens", "tokens_async")
THREAD, ASYNC = "identity_fp32", "identity_async"


@dataclass(frozen=True, slots=True)
class Bare:
    """A baseline: a kind of `bench.bare`, with an environment of its own."""

    name: str
    kind: str
    environment: Mapping[str, str] = field(default_factory=dict)


# glibc's malloc as it comes gives the memory of large messages back to the kernel after each call and faults it
# in again, or it does not: that depends on what happens to lie at the heap's end, so two equal processes may
# differ by a factor of two. A baseline that keeps its memory is steady, and it is the harder one to match.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
GRPC, GRPC_KEPT = Bare("bare grpc", "grpc"), Bare("bare grpc, memory kept", "grpc", KEEP_MEMORY)
REST, REST_KEPT = Bare("bare rest", "rest"), Bare("bare rest, memory kept", "rest", KEEP_MEMORY)
JSON = Bare("bare rest + json", "rest-json")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of request, at one load, for the bare servers and for the models of ours."""

    name: str
    elements: int
    in_flight: int
    exchange: Callable[[str, Floats], Exchange]
    bare: tuple[Bare, ...]
    """What is measured is compared with the first."""
    models: tuple[str, ...]
    rows: int = 1

    @property
    def grpc(self) -> bool:
        return self.exchange in GRPC_EXCHANGES

    @property
    def messages(self) -> int:
        """Messages of one reply."""
        return MESSAGES if self.exchange is grps_stream_exchange else 1

    @property
    def title(self) -> str:
        nbytes = self.rows * self.elements * 4
        size = f"{nbytes} B" if nbytes < 1024 else f"{nbytes / 2**20:.3g} MiB"
        how = "in flight on one connection" if self.grpc else "connections with one call in flight each"
        what = f", {self.messages} messages each" if self.messages > 1 else ""
        return f"FP32 [{self.rows},{self.elements}] ({size}), {self.in_flight} {how}{what}"


def _grpc(
    name: str, elements: int, in_flight: int, exchange: Callable[[str, Floats], Exchange] = grpc_exchange
) -> Scenario:
    bare = (GRPC_KEPT, GRPC) if elements >= MIB else (GRPC,)
    return Scenario(name, elements, in_flight, exchange, bare, (THREAD, ASYNC))


SCENARIOS = (
    _grpc("grpc-1x16-c1", 16, 1),
    _grpc("grpc-1x16-c8", 16, 8),
    _grpc("grpc-1x16-c64", 16, 64),
    _grpc("grpc-1MiB-c8", MIB, 8),
    _grpc("grpc-16MiB-c1", 16 * MIB, 1),
    Scenario("rest-json-1x16-c64", 16, 64, json_exchange, (REST, JSON), (THREAD,)),
    Scenario("rest-json-1x150528-c4", IMAGE, 4, json_exchange, (REST_KEPT, REST, JSON), (THREAD,)),
    Scenario("rest-binary-1x150528-c4", IMAGE, 4, binary_exchange, (REST_KEPT, REST), (THREAD,)),
    _grpc("predict-1x16-c64", 16, 64, predict_content_exchange),
    _grpc("predict-values-1x16-c64", 16, 64, predict_values_exchange),
    _grpc("predict-1MiB-c8", MIB, 8, predict_content_exchange),
    _grpc("predict-16MiB-c1", 16 * MIB, 1, predict_content_exchange),
    _grpc("predict-values-16MiB-c1", 16 * MIB, 1, predict_values_exchange),
    _grpc("grps-1x16-c64", 16, 64, grps_exchange),
    _grpc("grps-1MiB-c8", MIB, 8, grps_exchange),
    Scenario("grps-stream-1x16-c1", 16, 1, grps_stream_exchange, (GRPC,), TOKENS),
    Scenario("grps-stream-1x16-c8", 16, 8, grps_stream_exchange, (GRPC,), TOKENS),
    Scenario("rest-predict-1x16-c64", 16, 64, predict_json_exchange, (REST, JSON), (THREAD,)),
    Scenario("rest-predict-1000x16-c4", 16, 4, predict_json_exchange, (REST, JSON), (THREAD,), rows=1000),
    Scenario("rest-predict-1x150528-c4", IMAGE, 4, predict_json_exchange, (REST_KEPT, REST, JSON), (THREAD,)),
)
