"""A model whose instances are processes: what the server has of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from triglot.core.call import BatchCall, Call
from triglot.core.readings import Reading
from triglot.engine.hosted import HostedModel, nobody_to_tell, not_at_all
from triglot.engine.processes.pool import Pool
from triglot.engine.processes.process import Process
from triglot.engine.processes.sequential import SequentialCalls
from triglot.engine.work import Function, Inputs


class RemoteModel(HostedModel):
    """Declares what the model does in its process. To be configured and then started before its first call."""

    def __init__(self, pool: Pool, declared: Mapping[str, Any]) -> None:
        super().__init__()
        vars(self).update(declared["attributes"])
        self.looks_at_call = declared["takes_call"]
        self.execution = "process"
        self.inputs_in_place = True  # Its process gets a copy.
        self._pool = pool
        self._start_call: Call | None = None
        if declared["metrics"]:
            self.own_metrics = pool.metrics

    def start(self) -> None:
        """Have a process for each instance. Raises `ModelLoadError`."""
        pool = self._pool
        pool.sticky = self.sequence_batching is not None
        pool.hang_seconds, pool.longest_run = self.hang_seconds, self.longest_run
        if pool.sticky:
            pool.on_lost = self._lost
        pool.changed = self._changed
        pool.warm = self._warm
        pool.grow(self.instances)

    def _changed(self) -> None:
        self.on_change()

    def _lost(self, number: int) -> None:
        self.on_lost(number, f"{self._pool.program.name}: process {number}")

    def runs_on(self, instance: int) -> None:
        """See `HostedModel`."""
        self._pool.seats.take(instance)

    def start_instance(self, call: Call) -> None:
        """See `Model`: on the processes that no other thread does it on, now and whenever one is replaced."""
        if self._start_call is None:
            self._start_call = call.apart()
        while (process := self._pool.unstarted()) is not None:
            self._start_on(process, self._start_call)

    def _warm(self, process: Process) -> None:
        if self._start_call is not None:
            process.started = True
            self._start_on(process, self._start_call)
        self.warm_up(self._run_on(process))

    @abstractmethod
    def _start_on(self, process: Process, call: Call) -> None:
        """Has the model start its instance there, on a thread."""

    @abstractmethod
    def _run_on(self, process: Process) -> Function:
        """Runs the model there, on a thread."""

    @property
    def alive(self) -> bool:
        """Whether there is a process."""
        return self._pool.live > 0

    def abandon(self) -> None:
        """End the processes that still run a call."""
        self._pool.abandon()

    def close(self) -> None:
        """Have each process close the model and end; blocks for as long."""
        self._pool.close()
        self._start_call = None
        self.warm_up, self.on_lost = not_at_all, nobody_to_tell  # Of whom they are would be kept.

    def readings(self) -> Iterator[Reading]:
        """As `Pool.readings`."""
        return self._pool.readings()


class BlockingModel(RemoteModel):
    """One whose code is no `async def`. What its processes lose is `Unavailable`."""

    def infer(self, inputs: Inputs, call: Call) -> Any:
        """What the model answers. Raises `Unavailable` when its process is lost, and what the model raises."""
        while True:
            with self._pool.borrowed(call) as process:
                return _in_turn(process).run(inputs, call)

    def _run_on(self, process: Process) -> Function:
        return _in_turn(process).run

    def _start_on(self, process: Process, call: Call) -> None:
        _in_turn(process).start(call)


class ListsModel(BlockingModel):
    """One that takes a batch as a list."""

    def infer_batch(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Any]:
        """What the model answers to each of the requests; raises as `infer`."""
        call = BatchCall(calls)
        while True:
            with self._pool.borrowed(call) as process:
                return _in_turn(process).run_list(inputs, call)


class DecoupledModel(BlockingModel):
    """One that yields its answers."""

    def infer(self, inputs: Inputs, call: Call) -> Generator[Any, None, None]:
        """The answers as the model yields them; raises as `BlockingModel.infer`."""
        while True:
            with self._pool.borrowed(call) as process:
                yield from _in_turn(process).stream(inputs, call)
                return

    def _run_on(self, process: Process) -> Function:
        return _in_turn(process).stream


def _in_turn(process: Process) -> SequentialCalls:
    assert isinstance(process.calls, SequentialCalls)
    return process.calls
