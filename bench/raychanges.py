"""Measures the effects on callers when nodes are lost under load, and when instances scale with a burst."""

import http.client
import itertools
import re
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from bench import report
from bench.payloads import grpc_exchange
from bench.raymodel import RECORDS, begun
from bench.raynodes import CPUS, Nodes, on_ray, serving, values
from bench.tally import BenchError

CALLERS, MAX_INFLIGHT, MOST_INSTANCES = 24, 2, 3
CALL_SECONDS = 30.0
"""Deadline of calls: one that takes longer hangs, or is lost."""
IN_ACTOR = 2
"""Calls in an actor: it runs one, and another one was sent ahead (`ray_max_inflight`)."""
PATIENCE = 180.0
PAUSE = 0.5
"""Seconds between the calls of the only client after a burst."""
LOOK = 0.02
LOSS_COLUMNS = ("", "median", "least", "most")
PROCESSES = re.compile(r'triglot_processes\{model="\w+",version="1"\} (\d+)')


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed call."""

    number: int
    code: str
    details: str
    at: float


class Callers:
    """Clients that call continuously, each call with a number of its own, and record the outcomes. Must be closed.

    They run on threads, because only the main thread can start a node, which takes seconds.
    """

    def __init__(self, port: int, model: str) -> None:
        self.answered = 0
        self.failed: list[Failed] = []
        self._model = model
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def start(self, count: int, pause: float = 0.0) -> None:
        """Start `count` clients, each of which pauses this many seconds between its calls."""
        self._over.clear()
        self._threads = [threading.Thread(target=self._call, args=(pause,), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _call(self, pause: float) -> None:
        while not self._over.is_set():
            number = next(self._numbers)
            exchange = grpc_exchange(self._model, values(RECORDS, number=number))
            failed: Failed | None = None
            try:
                call = self._channel.unary_unary(exchange.path)
                exchange.check({}, call(exchange.body, timeout=CALL_SECONDS, wait_for_ready=True))
            except grpc.RpcError as error:
                failed = Failed(number, error.code().name, error.details() or "", time.perf_counter())
            except BenchError as error:
                failed = Failed(number, "WRONG", str(error), time.perf_counter())
            with self._lock:
                if failed is None:
                    self.answered += 1
                else:
                    self.failed.append(failed)
            self._over.wait(pause)

    def end(self) -> None:
        """Stop the clients, after their last replies."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Stop the clients, and close their connection."""
        self._over.set()
        self._channel.close()


@dataclass(slots=True)
class Loss:
    """Outcomes of calls when a node was killed. `killed` is an instant of `time.perf_counter`."""

    in_flight: int
    failed: list[Failed]
    killed: float
    begun: list[int]
    """Numbers of the calls that the node's instance had begun."""
    on_other_nodes: list[int]
    """Numbers of the calls that other instances had begun."""
    meanwhile: int
    """Calls answered between the kill and the new node's start."""
    starting: float
    """Seconds that the start of a new node takes."""
    back: float
    """Seconds from then until its instance runs a call."""

    @property
    def hung(self) -> int:
        """Number of calls that ended only by their deadline."""
        return sum(call.code == "DEADLINE_EXCEEDED" for call in self.failed)

    @property
    def begun_on_node(self) -> int:
        return sum(call.number in self.begun for call in self.failed)

    @property
    def lost(self) -> int:
        """Number of calls that failed although they were not in the lost actor."""
        return max(0, len(self.failed) - IN_ACTOR)

    @property
    def twice(self) -> int:
        """Number of calls that were begun more than once."""
        return sum(count > 1 for count in Counter([*self.begun, *self.on_other_nodes]).values())

    @property
    def failed_after(self) -> float:
        """Seconds from the kill until the last failure of a call."""
        return max((call.at - self.killed for call in self.failed), default=0.0)


def lose(nodes: Nodes, port: int, model: str, records: Path, seconds: float) -> Loss:
    """Kill a node under load, and start a new one `seconds` later."""
    callers = Callers(port, model)
    before = begun(records)
    try:
        callers.start(CALLERS)
        count = len(nodes.nodes)
        _until(lambda: len(_busy(records, before)) == count, "every instance runs calls")
        time.sleep(seconds)  # Load for the chosen time.
        answered, killed = callers.answered, time.perf_counter()
        lost_pids = nodes.kill(nodes.nodes[-1])
        _until(lambda: bool(callers.failed), "a call fails", CALL_SECONDS)
        time.sleep(seconds)  # As above, on the remaining nodes.
        meanwhile = callers.answered - answered
        known, began = set(begun(records)), time.perf_counter()
        nodes.add()
        restarted = time.perf_counter()
        _until(lambda: bool(begun(records).keys() - known), "the new node's instance runs calls")
        back = time.perf_counter()
        time.sleep(seconds)  # As above.
        callers.end()
    finally:
        callers.close()
    on_lost_node: list[int] = []
    on_other_nodes: list[int] = []
    for pid, numbers in begun(records).items():
        (on_lost_node if pid in lost_pids else on_other_nodes).extend(numbers[len(before.get(pid, ())) :])
    return Loss(
        CALLERS,
        callers.failed,
        killed,
        on_lost_node,
        on_other_nodes,
        meanwhile,
        restarted - began,
        back - restarted,
    )


def _busy(records: Path, before: dict[int, Sequence[int]]) -> list[int]:
    """Return the ids of the processes that have begun a call since `before`."""
    return [pid for pid, numbers in begun(records).items() if len(numbers) > len(before.get(pid, ()))]


def _until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not condition():
        if time.monotonic() > until:
            raise BenchError(f"expected within {patience:.0f} s: {what}")
        time.sleep(LOOK)  # No event signals progress in another process.


def losses(nodes: Nodes, times: int, seconds: float) -> list[Loss]:
    """Kill nodes in turn, under load."""
    model = "lost"
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        # A node has room for one instance, so a lost one has to wait for another node.
        parameters = on_ray(ray_num_cpus=CPUS, ray_max_inflight=MAX_INFLIGHT)
        with serving(nodes, model, parameters, len(nodes.nodes), Path(name)) as (_, port, _):
            return [lose(nodes, port, model, Path(name) / model, seconds) for _ in range(times)]


def loss_lines(found: Sequence[Loss]) -> Iterator[str]:
    """Yield the tables, and their conclusion."""

    def count_line(title: str, values: Iterable[float]) -> tuple[str, ...]:
        kept = list(values)
        return title, *(f"{value:,.4g}" for value in (statistics.median(kept), min(kept), max(kept)))

    rows = [
        count_line("calls in flight at the kill", [loss.in_flight for loss in found]),
        count_line("answered by the other nodes meanwhile", [loss.meanwhile for loss in found]),
        count_line("failed: began on the node", [loss.begun_on_node for loss in found]),
        count_line("failed otherwise: queued in the server", [loss.lost for loss in found]),
        count_line("hung", [loss.hung for loss in found]),
        count_line("begun twice", [loss.twice for loss in found]),
        count_line("last of them failed after ms", [loss.failed_after * 1e3 for loss in found]),
        count_line("start of a new node, s", [loss.starting for loss in found]),
        count_line("its instance runs calls after s", [loss.back for loss in found]),
    ]
    yield report.plain(LOSS_COLUMNS, rows)
    codes = Counter(failed.code for loss in found for failed in loss.failed)
    yield "they failed with: " + ", ".join(f"{count} {code}" for code, count in sorted(codes.items()))
    yield f"  {found[-1].failed[-1].details}"
    yield f"calls fail after {max(loss.failed_after for loss in found):.2f} s at the latest, goal 1"
    yield f"capacity is back {max(loss.back for loss in found):.1f} s after a node is there, goal 20"
    lost, hung = sum(loss.lost for loss in found), sum(loss.hung for loss in found)
    yield f"{lost} calls lost that were not in the actor, goal 0; {hung} hung, goal 0"


# --- a burst ---


@dataclass(slots=True)
class Burst:
    """Results of scaling from one instance to the maximum, and back."""

    answered: int
    failed: list[Failed] = field(default_factory=list)
    up: float = 0.0
    """Seconds from the burst's first call until every instance has run calls."""
    down: float | None = None
    """Seconds from the burst's end until there is one instance; None: not measured."""
    trickled: int = 0
    """Calls answered during the latter time."""


def scale(port: int, rest_port: int, model: str, records: Path, *, back: bool) -> Burst:
    """Call until the maximum number of instances runs; then, with `back`, call rarely until one is left."""
    callers = Callers(port, model)
    try:
        began = time.perf_counter()
        callers.start(CALLERS)
        _until(lambda: len(begun(records)) == MOST_INSTANCES, "all instances run calls")
        found = Burst(0, up=time.perf_counter() - began)
        callers.end()
        found.answered = callers.answered
        if back:
            finished_at = time.perf_counter()
            callers.start(1, PAUSE)
            _until(lambda: _instances(rest_port) == 1, "one instance is left")
            found.down = time.perf_counter() - finished_at
            callers.end()
            found.trickled = callers.answered - found.answered
        found.failed = callers.failed
    finally:
        callers.close()
    return found


def _instances(rest_port: int) -> int:
    """Return the number of instances, from the server."""
    connection = http.client.HTTPConnection("127.0.0.1", rest_port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        found = PROCESSES.search(connection.getresponse().read().decode())
    finally:
        connection.close()
    if found is None:
        raise BenchError("the server does not say how many instances there are")
    return int(found[1])


def burst(nodes: Nodes, *, back: bool = True) -> Burst:
    """Measure a burst, on a server of its own."""
    model = "scaled"
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        parameters = on_ray(ray_max_instances=MOST_INSTANCES, ray_max_wait_ms=20)
        with serving(nodes, model, parameters, 1, Path(name)) as (_, port, rest_port):
            return scale(port, rest_port, model, Path(name) / model, back=back)


def burst_lines(found: Burst) -> Iterator[str]:
    """Yield the lines to print."""
    yield f"1 to {MOST_INSTANCES} instances: {found.up:.1f} s from the first call on, {found.answered:,} answered"
    if found.down is not None:
        yield f"back to 1: {found.down:.1f} s from the last one on, {found.trickled:,} answered meanwhile"
    yield f"{len(found.failed)} failed calls, goal 0" + "".join(
        f"\n  {call.code}: {call.details}" for call in found.failed[:3]
    )


def measured(nodes: Nodes, times: int, seconds: float) -> Iterator[str]:
    """Measure lost nodes and a burst; yields the lines to print."""
    yield f"\na node that is killed under load, {times} times: {CALLERS} callers of a model that sleeps 20 ms, 1"
    yield f"instance on each node, {MAX_INFLIGHT} calls each; all processes of the node are killed at once"
    yield from loss_lines(losses(nodes, times, seconds))
    yield f"\na burst of {CALLERS} callers of the same model, then a call each {PAUSE:g} s"
    yield from burst_lines(burst(nodes))
