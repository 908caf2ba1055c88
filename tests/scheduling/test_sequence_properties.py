"""Any interleaving of sequences: each sees exactly its own requests, in order, with its controls and its state."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.direct_work import FutureWork
from tests.scheduling.scripted_models import Inputs
from tests.scheduling.sequence_models import CONTROLS, SUM, Driver, Summing, error_of, sequence_call
from triglot import Call
from triglot.core.errors import Cancelled, InvalidArgument, Unavailable
from triglot.model.scheduling import DirectStrategy, OldestStrategy, SequenceBatching
from triglot.scheduling.sequences.batch import SequenceBatch
from triglot.scheduling.sequences.request import Slot

IDS = (1, 2, 3, 2**64 - 1)
MAX_IDLE = 1.0

Step = tuple[str, int, bool, bool]


@dataclass(slots=True)
class Sent:
    """A request as it was sent; `number` is its value, `generation` counts the STARTs of its id."""

    number: int
    id: int
    start: bool
    end: bool
    generation: int
    execution: FutureWork
    left: bool = False
    executed: bool = False
    failed: bool = False


class World:
    """Does what the steps say, and checks everything that the model is given."""

    def __init__(self, model: Summing) -> None:
        self.driver = Driver(model)
        self.batched = model.max_batch_size > 0
        self.fails = False
        self.sent: list[Sent] = []
        self.running: dict[int, SequenceBatch] = {}
        self.generations: defaultdict[int, int] = defaultdict(int)
        self.sums: dict[tuple[int, int], float] = {}
        self.met: defaultdict[tuple[int, int], list[Sent]] = defaultdict(list)
        self.slots: dict[tuple[int, int], Slot] = {}
        self.instance = 0

    def step(self, what: str, number: int, first: bool, second: bool) -> None:
        """One step of the interleaving."""
        if what == "send":
            self.send(IDS[number % len(IDS)], first, second)
        elif what == "take":
            self.take(number % len(self.driver.executors))
        elif what == "finish":
            self.finish(number % len(self.driver.executors), fails=first)
        elif what == "leave":
            self.leave(number, discards=first)
        else:
            self.driver.wait(MAX_IDLE * (number % 5) / 3)
        self.check_slots()

    def send(self, sequence_id: int, start: bool, end: bool) -> None:
        continues = self.driver.schedule.holds(sequence_id)
        number = len(self.sent) + 1
        timeout = MAX_IDLE if number % 7 == 0 else 0.0
        try:
            execution = self.driver.put(number, sequence_call(sequence_id, start=start, end=end, timeout=timeout))
        except InvalidArgument:
            assert not start
            assert not continues
            return
        assert start or continues
        self.generations[sequence_id] += start
        generation = self.generations[sequence_id]
        self.sent.append(Sent(number, sequence_id, start, end, generation, execution))

    def take(self, instance: int) -> None:
        """An instance runs one batch at a time."""
        if instance not in self.running and (batch := self.driver.take(instance)) is not None:
            self.running[instance] = batch

    def finish(self, instance: int, *, fails: bool) -> None:
        batch = self.running.pop(instance, None)
        if batch is not None:
            self.fails, self.instance = fails, instance
            self.driver.finish(batch, self.infer)

    def leave(self, number: int, *, discards: bool) -> None:
        """Cancel a request: the schedule is notified, or finds out when it is to be executed."""
        if not self.sent:
            return
        request = self.sent[number % len(self.sent)]
        if request.execution.future.done():
            return
        request.left = True
        request.execution.call.cancel()
        if discards:
            self.driver.schedule.discard(request.execution)
            request.execution.future.cancel()

    def check_slots(self) -> None:
        runs = [run for run in self.driver.schedule._table.live.values() if run.slot is not None]
        assert len({run.slot for run in runs}) == len(runs)
        assert len(runs) == self.driver.reading("sequence_slots_used")
        live, held = len(self.driver.schedule._table.live), self.driver.lease.held
        assert live == held
        waiting = [
            request for request in self.sent if not request.execution.future.done() and not request.executed
        ]
        running = sum(len(batch.members) for batch in self.running.values())
        running += sum(len(batch.members) for executor in self.driver.executors for batch in executor.started)
        assert len(self.driver.schedule) == len(self.driver.schedule._requests)
        assert len(waiting) - running <= len(self.driver.schedule) <= len(waiting)

    def infer(self, inputs: Inputs, call: Call) -> dict[str, NDArray[Any]]:
        """Is what it was given right? Then the sum so far."""
        rows = {name: array.reshape(-1) for name, array in inputs.items()}
        shape = (len(rows["x"]), 1) if self.batched else (1,)
        assert {name: array.shape for name, array in inputs.items()} == dict.fromkeys(inputs, shape)
        assert rows["ready"].sum() == len(call.members)
        ids = [number for number, ready in zip(rows["id"], rows["ready"], strict=True) if ready]
        assert len(set(ids)) == len(ids)
        assert any(rows["ready"][-1:])
        for at in range(len(rows["x"])):
            self.check_row(at, {name: row[at].item() for name, row in rows.items()})
        if self.fails:
            raise RuntimeError("so it was to be")
        return {"y": inputs["x"] + inputs["before"], "after": inputs["x"] + inputs["before"]}

    def check_row(self, at: int, row: dict[str, Any]) -> None:
        if not row["ready"]:
            assert row == {"x": 0, "start": 0, "ready": False, "end": 0, "id": 0, "before": 0}
            return
        request = self.sent[int(row["x"]) - 1]
        key = (request.id, request.generation)
        assert (row["id"], row["start"], row["end"]) == (request.id, request.start, request.end)
        assert not request.executed
        request.executed, request.failed = True, self.fails
        met = self.met[key]
        # In the order in which they were sent, and none before the START.
        assert request.start == (not met)
        assert not met or met[-1].number < request.number
        assert row["before"] == self.sums.get(key, 0)
        if not self.fails:
            self.sums[key] = row["before"] + row["x"]
        met.append(request)
        self.check_place(key, at)

    def check_place(self, key: tuple[int, int], at: int) -> None:
        """The same instance for all requests of a sequence, and with direct batching the same row."""
        slot = Slot(at if self.batched and self.direct else 0, self.instance)
        assert self.slots.setdefault(key, slot) == slot

    @property
    def direct(self) -> bool:
        """Whether rows are the sequences' own."""
        return isinstance(self.driver._model.sequence_batching.strategy, DirectStrategy)  # type: ignore[union-attr]

    def end(self) -> None:
        """Let everything come to its end."""
        for instance in list(self.running):
            self.finish(instance, fails=False)
        self.driver.schedule.close()
        busy = True
        while busy:
            busy = False
            for instance in range(len(self.driver.executors)):
                self.take(instance)
                busy = busy or instance in self.running
                self.finish(instance, fails=False)
        self.check_end()

    def check_end(self) -> None:
        driver, table = self.driver, self.driver.schedule._table
        assert (table.live, table.backlog, table.waiting, driver.lease.held) == ({}, {}, 0, 0)
        assert len(driver.schedule) == len(driver.schedule._requests) == driver.timers == 0
        assert sorted(table._free) == sorted(set(table._free))
        assert table.used_slots == 0
        made = [count for at, count in enumerate(table._made) if at not in table._retiring]
        assert len(table._free) == sum(made) <= table.slots
        assert table.started == sum(table.end_counts.values())
        for request in self.sent:
            self.check_outcome(request)

    def check_outcome(self, sent: Sent) -> None:
        future = sent.execution.future
        assert future.done()
        if future.cancelled():
            assert sent.left
        elif sent.executed:
            assert (future.exception() is not None) == sent.failed
        else:
            error = error_of(sent.execution)
            if isinstance(error, Cancelled):
                same = [other for other in self.sent if (other.id, other.generation) == (sent.id, sent.generation)]
                assert any(other.left for other in same)
            else:
                assert isinstance(error, Unavailable)
                assert "timeout of the corresponding sequence has been expired" in error.message


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "take", "finish", "finish", "leave", "wait"]),
        st.integers(0, 30),
        st.booleans(),
        st.booleans(),
    ),
    max_size=80,
)
STRATEGIES = st.sampled_from(
    [
        DirectStrategy(),
        DirectStrategy(max_queue_delay=0.5, minimum_slot_utilization=0.6),
        OldestStrategy(),
        OldestStrategy(max_candidate_sequences=2),
        OldestStrategy(preferred_sizes=[1, 3], max_queue_delay=0.5, max_candidate_sequences=6),
    ]
)


@given(steps=STEPS, strategy=STRATEGIES, rows=st.sampled_from([0, 1, 3]), instances=st.integers(1, 2))
def test_every_interleaving_gives_each_sequence_its_own(
    steps: list[Step], strategy: DirectStrategy | OldestStrategy, rows: int, instances: int
) -> None:
    if isinstance(strategy, OldestStrategy) and rows < 3:
        strategy = OldestStrategy(max_candidate_sequences=strategy.max_candidate_sequences)
    batching = SequenceBatching(max_idle=MAX_IDLE, controls=CONTROLS, states=[SUM], strategy=strategy)

    async def run() -> None:
        world = World(Summing(batching, rows=rows, instances=instances))
        for step in steps:
            world.step(*step)
        world.end()

    asyncio.run(run())
