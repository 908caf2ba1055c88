"""`RemoteModel`, the server's side of a model whose instances are processes or actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from triglot.core.call import BatchCall, Call
from triglot.core.statistics import Reading
from triglot.executors.hosted import HostedModel, ignore_loss, no_warm_up
from triglot.executors.remote.channel import BEAT_SECONDS, iterate, run_blocking
from triglot.executors.remote.pool import Checkout, Pool
from triglot.executors.remote.process import Process
from triglot.executors.work import Function, Inputs
from triglot.model.config import Device, ModelConfig
from triglot.model.configure import configured_instances
from triglot.model.model import AUTO, Model, is_decoupled


class RemoteModel(HostedModel):
    """A model whose instances run in the processes of a `Pool`.

    `declared` is what the first process reported about the model: its class's attributes, which this object takes
    over, and its methods. To be configured, and then started, before its first call.
    """

    def __init__(self, pool: Pool, declared: Mapping[str, Any]) -> None:
        super().__init__()
        vars(self).update(declared["attributes"])
        self.looks_at_call = declared["takes_call"]
        self._on_loop: bool = declared["on_loop"]
        self.execution = pool.program.execution
        self.model_config = pool.program.config
        self.inputs_in_place = True  # The process gets a copy.
        self._pool = pool
        self.ray = pool.program.ray
        if self.instances == AUTO:
            self.instances = self.ray.min_instances
        if self.execution == "ray" and not declared["streams"] and self.sequence_batching is None:
            self.calls_per_instance = self.ray.max_inflight
        self._start_call: Call | None = None
        if declared["checks_ready"]:
            self.check_ready = pool.check_ready
        if declared["metrics"]:
            self.own_metrics = pool.metrics

    def start(self) -> None:
        """See `HostedModel`."""
        pool = self._pool
        pool.hang_seconds, pool.longest_run = self.hang_seconds, self.longest_run
        pool.idempotent = self.idempotent and self.sequence_batching is None
        if self.sequence_batching is not None:
            pool.sticky = not self._on_loop  # `async def` code is called by no threads.
            pool.on_lost = self._lost
        pool.changed = self._changed
        pool.loop = lambda: self.loop
        pool.warm = self._warm
        pool.grow(self.instances)

    def change_instances(self, config: ModelConfig) -> tuple[int, int] | None:
        """See `Model`. Adds or removes the last instances. Raise as `start`; then their number is unchanged."""
        pool, before = self._pool, self.instances
        if self.places_instances and self.execution == "ray":  # Ray assigns the devices of each instance.
            after = sum(group.count for group in config.instance_groups)
        elif not self.places_instances:
            after = configured_instances(self, config)
        elif (devices := self._devices(config)) and (former := self._devices(pool.program.config)):
            after = len(devices)
            if devices[:before] != former[:after]:
                return None
        else:
            return None
        former_program, pool.program = pool.program, replace(pool.program, config=config)
        try:
            pool.grow(after)
        except BaseException:
            pool.program = former_program
            pool.shrink(before)
            raise
        pool.shrink(after)
        self.instances = after
        return max(0, after - before), max(0, before - after)

    def _devices(self, config: ModelConfig) -> list[Device]:
        """Return the device of each instance, or an empty list if that depends on which GPUs there are."""
        anywhere = {"CPU", "MODEL"} | ({"AUTO"} if self.platform == "python" else set())
        return config.devices(int) if all(group.kind in anywhere for group in config.instance_groups) else []

    def _changed(self) -> None:
        self.on_change()

    def _lost(self, number: int, losses: int) -> None:
        self.on_lost(number, losses, f"{self._pool.program.name}: {self._pool.program.kind} {number}")

    def runs_on(self, instance: int, losses: int) -> None:
        """See `HostedModel`."""
        self._pool.bind(instance, losses)

    def start_instance(self, call: Call) -> None:
        """See `Model`. Starts the instances that no other thread has started; `_warm` does so for replacements."""
        if self._start_call is None:
            self._start_call = call.detached()
        while (process := self._pool.unstarted()) is not None:
            self._start_on(process, self._start_call)

    def _warm(self, process: Process) -> None:
        if self._start_call is not None:
            process.started = True
            self._start_on(process, self._start_call)
        self.warm_up(self._run_on(process))

    def _start_on(self, process: Process, call: Call) -> None:
        self._wait(process.calls.start(call))

    def _run_on(self, process: Process) -> Function:
        """Return a function that runs the model in this process, on a thread that blocks."""
        calls = process.calls
        if is_decoupled(self.infer):
            return lambda inputs, call: iterate(calls.stream(inputs, call), self._wait)
        return lambda inputs, call: self._wait(calls.run(inputs, call))

    @property
    def pids(self) -> Sequence[int]:
        """See `HostedModel`."""
        return [process.body.pid for process in self._pool.ready() if not process.body.remote]

    def functions(self) -> Sequence[Function]:
        """See `HostedModel`."""
        return [self._run_on(process) for process in self._pool.ready()]

    @property
    def orphaned(self) -> int:
        """See `HostedModel`."""
        return sum(process.calls.orphaned for process in self._pool.processes())

    @property
    def alive(self) -> bool:
        """Whether a process is ready."""
        return self._pool.live > 0

    @property
    def nodes(self) -> Sequence[str]:
        """See `HostedModel`."""
        return [node for process in self._pool.ready() if (node := process.body.labels.get("node"))]

    def abandon(self) -> None:
        """Kill the processes that still run a call."""
        self._pool.abandon()

    def close(self) -> None:
        """Have each process close the model and end. Blocks until they have ended."""
        self._pool.close()
        self._start_call = None
        self.warm_up, self.on_lost = no_warm_up, ignore_loss  # They would keep their owners alive.

    def readings(self) -> Iterator[Reading]:
        """See `Pool.readings`."""
        return self._pool.readings()

    # --- calls ---

    async def run_async(self, inputs: Inputs, call: Call) -> Any:
        """Return what the model returns. Raise what that raises, and `Unavailable` if its process is lost."""
        while True:
            with self._pool.checkout(call) or await self._waited(call) as calls:
                return await calls.run(inputs, call)

    async def run_list_async(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Any]:
        """Return the outputs, or the error, of each request. Raise as `run_async`."""
        call = BatchCall(calls)
        while True:
            with self._pool.checkout(call) or await self._waited(call) as of_process:
                return await of_process.run_list(inputs, call)

    async def stream_async(self, inputs: Inputs, call: Call) -> AsyncGenerator[Any, None]:
        """Yield the responses as the model yields them. Raise as `run_async`."""
        while True:
            with self._pool.checkout(call) or await self._waited(call) as calls:
                async with aclosing(calls.stream(inputs, call)) as answers:
                    async for answer in answers:
                        yield answer
                        del answer
                return

    async def _waited(self, call: Call) -> Checkout:
        """Wait for a process for this call; the time counts as queue time. Raise as `Pool.checkout`."""
        since = time.perf_counter()
        while (checkout := self._pool.checkout(call)) is None:
            await self._pause()
        for member in call.members:
            member.execution_waited(since)
        return checkout

    async def _pause(self) -> None:
        """Wait until a process may be available."""
        if self._on_loop:
            await asyncio.sleep(BEAT_SECONDS)
        else:
            self._pool.wait()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of the coroutine `work`. Blocks; on a thread."""
        if not self._on_loop:
            return run_blocking(work)
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    # --- calls of plain code, whose caller blocks ---

    def run(self, inputs: Inputs, call: Call) -> Any:
        """See `run_async`."""
        return run_blocking(self.run_async(inputs, call))

    def run_list(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Any]:
        """See `run_list_async`."""
        return run_blocking(self.run_list_async(inputs, calls))

    def stream(self, inputs: Inputs, call: Call) -> Generator[Any, None, None]:
        """See `stream_async`."""
        answers = self.stream_async(inputs, call)
        del inputs
        yield from iterate(answers)


def remote_model(pool: Pool, declared: Mapping[str, Any]) -> RemoteModel:
    """Return the model as its first process declared it; its class has the name of the model's own."""
    kind, on_loop = RemoteModel, declared["on_loop"]
    methods: dict[str, Any] = {}
    if declared["streams"]:
        methods["infer"] = kind.stream_async if on_loop else kind.stream
    else:
        methods["infer"] = kind.run_async if on_loop else kind.run
        if declared["lists"]:
            methods["infer_batch"] = kind.run_list_async if on_loop else kind.run_list
    if not declared["starts"]:
        methods["start_instance"] = Model.start_instance
    named: type[RemoteModel] = type(declared["class"], (kind,), methods)
    return named(pool, declared)
