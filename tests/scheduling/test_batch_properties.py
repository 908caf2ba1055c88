"""Whatever comes, leaves, expires and fails, in whatever order: each member gets its own rows, and one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.direct_work import FutureWork
from tests.scheduling.batched_models import FOREVER, Batched, Inputs, Joining, rows
from tests.scheduling.held_executor import HeldExecutor
from triglot import Call, Cancelled, InvalidArgument, Model
from triglot.core.errors import DeadlineExceeded, ServingError
from triglot.core.request_scheduling import Scheduling
from triglot.executors.loop import LoopExecutor
from triglot.executors.work import Work
from triglot.model.scheduling import DynamicBatching
from triglot.scheduling.batcher import Batcher

BAD = -1.0
"""A value that fails its whole batch."""


@dataclass(frozen=True)
class Put:
    rows: int
    width: int
    bad: bool
    priority: int


@dataclass(frozen=True)
class Do:
    """Something that happens to the request, or the batch, at this place among those that there are."""

    what: str
    place: int


PUTS = st.builds(
    Put, st.integers(1, 5), st.integers(1, 2), st.integers(0, 9).map(lambda n: n == 0), st.integers(0, 2)
)
DOINGS = st.builds(Do, st.sampled_from(["leave", "cancel", "expire", "run", "run", "deliver"]), st.integers(0, 50))
STEPS = st.lists(PUTS | DOINGS, max_size=40)
BATCHINGS = st.builds(
    DynamicBatching,
    preferred_sizes=st.sampled_from([(), (2, 4), (3,)]),
    allowed_sizes=st.sampled_from([(), (4, 6)]),
    max_execution_size=st.sampled_from([0, 0, 2]),
    pad_variable_lengths=st.booleans(),
)
SCHEDULES = st.one_of(
    BATCHINGS,
    st.just(DynamicBatching(priority_levels=2, default_priority_level=2)),
    st.just(DynamicBatching(preserve_ordering=True)),
)


class Run:
    """A batcher whose executor is this test, so that everything happens in the order of the steps."""

    def __init__(self, batching: DynamicBatching, loop: asyncio.AbstractEventLoop) -> None:
        self.in_order = batching.preserve_ordering
        self.loop = loop
        self.model = self.new_model(batching)
        self.executor = HeldExecutor(capacity=2)
        self.deferred: list[Callable[[], None]] = []
        self.schedule = self.new_schedule()
        self.requests: list[FutureWork] = []
        self.values: list[list[float]] = []
        self.given_up: set[int] = set()
        self.executed: list[Work] = []
        self.seen: list[float] = []
        self.failed: set[float] = set()

    def new_model(self, batching: DynamicBatching) -> Model:
        return Batched(batching, max_batch_size=6, answer=self.answer)

    def new_schedule(self) -> Batcher:
        infer_batch, defer, later = self.model.infer_batch, self.deferred.append, self.loop.call_later
        return Batcher(self.model, 10_000, self.executor, infer_batch, defer, later)

    def answer(self, inputs: Inputs) -> Any:
        values = inputs["x"][:, 0].tolist()
        self.seen += dict.fromkeys(values)  # A row that pads the batch is there twice.
        if BAD in inputs["x"][:, -1]:
            self.failed.update(values)
            raise InvalidArgument("bad")
        return {"y": inputs["x"] * 2}

    def put(self, put: Put) -> None:
        first = float(sum(map(len, self.values)) + 1)
        values = [first + at for at in range(put.rows)]
        inputs = rows(*values, width=2 * put.width)
        if put.bad:
            inputs["x"][:, -1] = BAD
        call = Call()
        call.scheduling = Scheduling(priority=put.priority)
        execution = FutureWork(inputs, call, self.loop)
        self.requests.append(execution)
        self.values.append(values)
        self.schedule.put(execution)

    def do(self, do: Do) -> None:
        if do.what == "run":
            self.run()
        elif do.what == "deliver":
            if self.executed:
                self.executed.pop(do.place % len(self.executed)).deliver()
        elif self.requests:
            number = do.place % len(self.requests)
            request = self.requests[number]
            if do.what == "cancel":
                request.call.cancel()
            elif not request.future.done():
                self.given_up.add(number)
                if do.what == "leave":
                    request.future.cancel()
                self.schedule.discard(request)
                if do.what == "expire":
                    request.future.set_exception(DeadlineExceeded("late"))
        if self.in_order:
            done = [request.future.done() for at, request in enumerate(self.requests) if at not in self.given_up]
            assert done == sorted(done, reverse=True)

    def run(self) -> None:
        self.turn()
        if self.executor.started:
            work = self.executor.started.pop(0)
            work.run(self.model.infer, self.explain)
            self.executed.append(work)

    def turn(self) -> None:
        """What the loop does in its next turn."""
        while self.deferred:
            self.deferred.pop(0)()

    @staticmethod
    def explain(error: BaseException) -> ServingError:
        assert isinstance(error, ServingError), error
        return error

    def end(self) -> None:
        self.schedule.close()
        self.turn()
        while self.executor.started or self.executed:
            while self.executor.started:
                self.run()
            self.executed.pop().deliver()
            self.turn()
        assert not len(self.schedule)
        assert self.executor.closed

    def check(self) -> None:
        assert len(set(self.seen)) == len(self.seen), "a row was executed twice"
        errors = []
        for number, (request, values) in enumerate(zip(self.requests, self.values, strict=True)):
            future = request.future
            assert future.done()
            if number in self.given_up:
                assert future.cancelled() or isinstance(future.exception(), DeadlineExceeded)
            elif isinstance(error := future.exception(), Cancelled):
                assert request.call.cancelled
            elif error is not None:
                assert isinstance(error, InvalidArgument)
                assert not self.failed.isdisjoint(values)
                errors.append(error)
            else:
                answer = future.result()["y"]
                width = request.inputs["x"].shape[1]
                np.testing.assert_array_equal(answer[:, :width], request.inputs["x"] * 2)
                assert not answer[:, width:].any()
        assert len({id(error) for error in errors}) == len(errors)


class OfLists(Run):
    """The model gets its batches as lists."""

    def new_model(self, batching: DynamicBatching) -> Model:
        model = super().new_model(batching)
        model.infer_batch = self.answer_each
        return model

    def answer_each(self, inputs: list[Inputs], calls: list[Call]) -> list[Any]:
        assert len(inputs) == len(calls)
        return [self.answer_or_error(tensor) for tensor in inputs]

    def answer_or_error(self, inputs: Inputs) -> Any:
        try:
            return self.answer(inputs)
        except InvalidArgument as error:
            return error


class OnLoop(Run):
    """The batches run on the loop, several at the same time, each until a step lets it continue."""

    def __init__(self, batching: DynamicBatching, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(batching, loop)
        self.running: list[asyncio.Future[None]] = []

    def new_model(self, batching: DynamicBatching) -> Model:
        model = Joining(batching, max_batch_size=6, instances=2)
        model.infer = self.infer
        return model

    def new_schedule(self) -> Batcher:
        executor = LoopExecutor(self.loop, self.infer, self.explain, capacity=2)
        return Batcher(self.model, 10_000, executor, None, self.loop.call_soon, self.loop.call_later)

    async def infer(self, inputs: Inputs, call: Call) -> Any:
        go = self.loop.create_future()
        self.running.append(go)
        try:
            await go
        finally:
            self.running.remove(go)
        return self.answer(inputs)

    def put(self, put: Put) -> None:
        super().put(put)
        self.settle()

    def do(self, do: Do) -> None:
        if do.what == "deliver":
            if self.running:
                self.running[do.place % len(self.running)].set_result(None)
        elif do.what != "run":
            super().do(do)
        self.settle()

    def settle(self) -> None:
        """Let the loop do what there is to do."""
        self.loop.run_until_complete(self._load_lock())

    @staticmethod
    async def _load_lock() -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    def end(self) -> None:
        self.schedule.close()
        self.settle()
        while self.running:
            self.running[-1].set_result(None)
            self.settle()
        assert not len(self.schedule)


@contextmanager
def new_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with new_loop() as loop:
        yield loop


def play(run: Run, steps: list[Put | Do]) -> None:
    for step in steps:
        if isinstance(step, Put):
            run.put(step)
        else:
            run.do(step)
    run.end()
    run.check()


@given(batching=SCHEDULES, steps=STEPS)
def test_each_member_gets_its_own_rows_and_one_outcome(
    loop: asyncio.AbstractEventLoop, batching: DynamicBatching, steps: list[Put | Do]
) -> None:
    play(Run(batching, loop), steps)


@given(batching=SCHEDULES, steps=STEPS)
def test_so_it_does_in_a_list(
    loop: asyncio.AbstractEventLoop, batching: DynamicBatching, steps: list[Put | Do]
) -> None:
    play(OfLists(batching, loop), steps)


@given(batching=SCHEDULES, delay=st.sampled_from([0.0, FOREVER]), steps=STEPS)
def test_so_it_does_on_the_loop(
    loop: asyncio.AbstractEventLoop, batching: DynamicBatching, delay: float, steps: list[Put | Do]
) -> None:
    """Also where batches grow for ever, and run at the same time."""
    play(OnLoop(replace(batching, max_queue_delay=delay), loop), steps)
