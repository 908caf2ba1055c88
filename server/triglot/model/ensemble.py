"""Ensembles: models that are composed of other models of the same server (spec 5.3).

Tensors have names, and a step runs as soon as all of its input tensors are available. A step's output arrays are
passed to the next steps without a copy. Each response of a decoupled step runs separately through the steps that
depend on it; these steps take no other tensors, so they form a graph of their own. `ensemble_checks` verifies
before the first call that the steps can complete.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from triglot.core.call import Call
from triglot.core.errors import ModelNotFound, ServingError, Unavailable, without_frames
from triglot.core.tensor import Array
from triglot.core.types import Answer, ParameterValue
from triglot.model.ensemble_checks import Keys, Part, check_fit, streams_of
from triglot.model.model import Model
from triglot.model.reshaping import Rebatch, Reshape, Reshaping, apply_changes
from triglot.model.scheduling import Step
from triglot.model.signature import Signature, TensorRule

T = TypeVar("T")
Parameters = Mapping[str, ParameterValue]
Inputs = Mapping[str, Array]
MAX_GRAPHS = 64
"""Limit on cached graphs, one per set of requested outputs; clients choose the set."""
MAX_RUNS = 32
"""Limit on responses of a decoupled step in flight through the steps after it, per request, unless
`max_inflight_requests` is set."""
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
"""Sequence parameters of a request and of a response."""


class Ensemble(Model):
    """A model composed of other models of the same server; it declares `inputs`, `outputs` and `steps`.

    Steps whose inputs are available run concurrently. The first error of a step fails the request and cancels the
    other steps. `max_inflight_requests` limits the concurrent calls of each step; 0 means no limit. An ensemble
    with a decoupled step is decoupled itself; such a step is paused while too many of its responses are in flight.
    """

    steps: Sequence[Step] = ()
    max_inflight_requests: int = 0
    reshaping: Reshaping | None = None
    """Set by a configuration's `reshape`: the steps see other shapes than clients."""
    platform: ClassVar[str] = "ensemble"
    any_output_shapes = True

    def connect(self, signature: Signature, parts: Sequence[Part], keys: Keys) -> None:
        """Plan the steps. Called once the models of the steps are loaded, and again when one is replaced.

        Raise `ValueError` as `check_fit` does; the previous plan then stays in place.
        """
        inside = signature if self.reshaping is None else self.reshaping.inside(signature)
        check_fit(self.steps, inside, parts, keys)
        self._plan = _Plan(self.steps, inside, parts, self.reshaping, self.max_inflight_requests, self._limits)
        self._graphs = {}

    async def infer(self, inputs: Inputs, call: Call) -> dict[str, Array]:
        """Return the requested outputs once every step that they need has run.

        Outputs that a step omitted are missing.
        """
        with _add_ensemble_name(call):
            return await self._run(inputs, call).response()

    async def infer_stream(self, inputs: Inputs, call: Call) -> AsyncGenerator[dict[str, Array], None]:
        """As `infer`, with decoupled steps: yields a response for each of their responses, in order."""
        run = self._run(inputs, call)
        try:
            with _add_ensemble_name(call):
                async with aclosing(run.responses()) as responses:
                    async for response in responses:
                        yield response
        finally:
            for task in run.tasks:
                task.cancel()

    def _run(self, inputs: Inputs, call: Call) -> _Run:
        given = inputs if self.reshaping is None else self.reshaping.given(inputs)
        return _Run(self._graph(call.requested_outputs), given, call, set(), call.parameters)

    def _graph(self, requested: Sequence[str]) -> _Graph:
        """Return the steps that the requested outputs need: all steps if all outputs or none are named."""
        outputs = frozenset(requested)
        graph = self._graphs.get(outputs)
        if graph is None:
            names = frozenset(spec.name for spec in self.outputs)
            needs_all_steps = outputs in (frozenset(), names)
            needed = range(len(self.steps)) if needs_all_steps else _needed(self.steps, outputs)
            graph = _Graph(self._plan, needed, outputs or names)
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs[outputs] = graph
        return graph

    @cached_property
    def _graphs(self) -> dict[frozenset[str], _Graph]:
        return {}

    @cached_property
    def _limits(self) -> list[asyncio.Semaphore]:
        most = self.max_inflight_requests
        return [asyncio.Semaphore(most) for _ in self.steps] if most else []


@contextmanager
def _add_ensemble_name(call: Call) -> Iterator[None]:
    """Add the name of the ensemble to the text of a `ServingError`."""
    try:
        yield
    except ServingError as error:
        text = f"in ensemble '{call.model_name}', {error.message}"
        if isinstance(error, ModelNotFound):  # The client requested the ensemble, not this model.
            raise Unavailable(text) from None
        error.message = text
        raise


# --- the steps and their models ---


class _Plan:
    """The steps of a connected ensemble with what follows from the signatures of their models.

    Attributes:
        changes: Per step, the shape changes of its inputs, by input name.
        last_changes: Shape changes of the ensemble's outputs, applied one after the other.
        streams: See `streams_of`.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        signature: Signature,
        parts: Sequence[Part],
        reshaping: Reshaping | None,
        max_inflight_requests: int,
        limits: Sequence[asyncio.Semaphore],
    ) -> None:
        self.steps = steps
        self.limits = limits
        self.max_inflight_requests = max_inflight_requests
        self.decoupled = [part.decoupled for part in parts]
        self.streams = streams_of(steps, parts)
        batched = {spec.name: signature.batched for spec in signature.inputs}
        for step, part in zip(steps, parts, strict=True):
            batched |= dict.fromkeys(step.outputs.values(), part.signature.batched)
        self.changes = [
            _rebatches(step.inputs, batched, part.signature, part.signature.input_rules)
            for step, part in zip(steps, parts, strict=True)
        ]
        own = signature.output_rules
        last: list[Mapping[str, Rebatch | Reshape]] = [
            _rebatches({name: name for name in own}, batched, signature, own),
            {} if reshaping is None else reshaping.outputs,
        ]
        self.last_changes = [changes for changes in last if changes]


def _rebatches(
    taken: Mapping[str, str], batched: Mapping[str, bool], taking: Signature, rules: Mapping[str, TensorRule]
) -> dict[str, Rebatch]:
    """Return the batch dim changes of the `taken` tensors, by the input names of the model that takes them."""
    return {
        name: Rebatch(dims, taking.batched)
        for name, tensor in taken.items()
        if name in rules
        and batched[tensor] is not taking.batched
        and (dims := taking.dims(rules[name].spec)) is not None
    }


class _Graph:
    """The steps that a set of outputs needs, with their dependencies; immutable and shared by all requests.

    `stream` is the decoupled step whose responses these steps take, None for those that take the request's inputs.

    Attributes:
        subgraphs: Per decoupled step of this graph, the graph that runs for each of its responses.
        output_stream: The decoupled step whose subgraph produces the outputs; None if this graph does.
        uses: How often each tensor is used; the response counts as one use.
        given: Tensors that come from outside; the optional ones may be absent.
        max_runs: Limit on concurrent runs of this graph within one request.
        models: Models of the steps of this graph and its subgraphs.
        unbounded: Decoupled steps whose responses are read without backpressure.
    """

    def __init__(
        self, plan: _Plan, needed: Sequence[int], outputs: frozenset[str], stream: int | None = None
    ) -> None:
        here = [
            at for at in needed if all(plan.streams[name] == stream for name in plan.steps[at].inputs.values())
        ]
        steps = self.steps = [plan.steps[at] for at in here]
        self.outputs = frozenset(name for name in outputs if plan.streams[name] == stream)
        self.subgraphs = {
            place: _Graph(plan, needed, outputs, at) for place, at in enumerate(here) if plan.decoupled[at]
        }
        after = (graph.models for graph in self.subgraphs.values())
        self.models: set[str] = {step.model for step in steps}.union(*after)
        # The subgraph calls the same model, whose instance must become free for it.
        self.unbounded = {place for place, graph in self.subgraphs.items() if steps[place].model in graph.models}
        self.output_stream = next((place for place, graph in self.subgraphs.items() if graph.has_outputs), None)
        self.has_outputs: bool = bool(self.outputs) or self.output_stream is not None
        self.changes = [plan.changes[at] for at in here]
        self.last_changes = plan.last_changes
        self.limits = [plan.limits[at] for at in here] if plan.limits else None
        several = plan.max_inflight_requests * max(1, len(here)) or MAX_RUNS
        # A stream that is read later may hold the instance that the stream being read is waiting for.
        self.max_runs = several if self.output_stream is None else 1
        self.step_inputs = [frozenset(step.inputs.values()) for step in steps]
        self.step_outputs = [tuple(step.outputs) for step in steps]
        self.versions = [str(step.version) if step.version else "" for step in steps]
        self.uses = Counter(name for names in (*self.step_inputs, self.outputs) for name in names)
        made = frozenset[str]().union(*(step.outputs.values() for step in steps))
        self.given = self.outputs.union(*self.step_inputs) - made
        self.consumers: dict[str, list[int]] = {}
        for at, names in enumerate(self.step_inputs):
            for name in names:
                self.consumers.setdefault(name, []).append(at)


def _needed(steps: Sequence[Step], outputs: Iterable[str]) -> list[int]:
    """Return the steps that the `outputs` depend on, in declaration order."""
    producers = {tensor: at for at, step in enumerate(steps) for tensor in step.outputs.values()}
    needed: set[int] = set()
    wanted = list(outputs)
    while wanted:
        at = producers.get(wanted.pop())
        if at is not None and at not in needed:
            needed.add(at)
            wanted += steps[at].inputs.values()
    return sorted(needed)


# --- one request ---


class _Run:
    """One request, or one response of a decoupled step, that passes the steps of a graph.

    Runs on the event loop. A tensor is released once no remaining step uses it. `tasks` holds the tasks of the
    request's `_Prefetch` objects. `parameters` are those of the request, with the sequence parameters of the
    decoupled step's response.
    """

    def __init__(
        self,
        graph: _Graph,
        inputs: Inputs,
        call: Call,
        tasks: set[asyncio.Task[None]],
        parameters: Parameters,
    ) -> None:
        self.tasks = tasks
        self._parameters = parameters
        self._graph = graph
        self._call = call
        self._inputs = inputs
        self._available: dict[str, Array] = {}
        self._uses = graph.uses.copy()
        self._missing = [len(names) for names in graph.step_inputs]
        self._running: dict[asyncio.Future[Any], int] = {}
        self._absent = set(graph.given - inputs.keys())
        self._output_stream: _Prefetch[_Prefetch[dict[str, Array]]] | None = None

    async def responses(self) -> AsyncGenerator[dict[str, Array], None]:
        """Yield the response, or with an output stream all responses of its subgraph, in their order."""
        response = await self.response()
        if self._output_stream is None:
            yield response
            return
        async for run in self._output_stream:
            async for response in run:
                yield response

    async def response(self) -> dict[str, Array]:
        """Return the available outputs once every step that is not decoupled has run."""
        running = self._running
        try:
            self._start_first_steps()
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                while done:
                    self._finish(done.pop())
            lacks = not self._absent.isdisjoint(self._graph.outputs)
            outputs = self._available
            for changes in self._graph.last_changes:
                outputs = apply_changes(changes, outputs)
            sequence = _sequence_parameters(self._parameters)
            return Answer(outputs, sequence, partial=lacks) if lacks or sequence else outputs
        finally:
            for task in running:
                task.add_done_callback(_retrieve_exception)
                task.cancel()
            running.clear()  # The errors of the tasks refer to frames that refer to this dict.

    def _start_first_steps(self) -> None:
        inputs, self._inputs = self._inputs, {}
        self._add(inputs)
        self._resolve(tuple(self._absent))

    def _finish(self, task: asyncio.Future[Any]) -> None:
        outputs = self._graph.steps[self._running.pop(task)].outputs
        try:
            response = task.result()
        finally:
            del task  # It holds the error, whose traceback refers to this frame.
        self._add({tensor: response[name] for name, tensor in outputs.items() if name in response})
        if absent := [tensor for name, tensor in outputs.items() if name not in response]:
            # The model omitted them; a step that requires one of them reports that.
            self._absent.update(absent)
            self._resolve(absent)

    def _add(self, tensors: Inputs) -> None:
        """Store tensors that are still needed and start the steps that were waiting for them."""
        self._available |= {name: tensor for name, tensor in tensors.items() if self._uses[name]}
        self._resolve(tensors)

    def _resolve(self, names: Iterable[str]) -> None:
        """Mark these tensors, now available or absent, as resolved and start the steps that become ready."""
        graph = self._graph
        for name in names:
            for at in graph.consumers.get(name, ()):
                self._missing[at] -= 1
                if not self._missing[at]:
                    self._start(at)

    def _start(self, at: int) -> None:
        graph = self._graph
        absent = self._absent
        taken = graph.steps[at].inputs.items()
        inputs = {name: self._available[tensor] for name, tensor in taken if tensor not in absent}
        for tensor in graph.step_inputs[at] - absent:
            self._uses[tensor] -= 1
            if not self._uses[tensor]:
                del self._available[tensor]
        if graph.changes[at]:
            inputs = apply_changes(graph.changes[at], inputs)
        if at in graph.subgraphs:
            responses = _Prefetch(self._stream(at, inputs), graph.subgraphs[at].max_runs, self.tasks)
            if at == graph.output_stream:
                self._output_stream = responses
                return
            response: Any = _drain(responses)
        elif graph.limits is None:
            response = self._infer(at, inputs)
        else:
            response = self._infer_limited(graph.limits[at], at, inputs)
        self._running[asyncio.ensure_future(response)] = at

    def _infer(self, at: int, inputs: Inputs) -> Any:
        graph = self._graph
        return self._call.infer(
            graph.steps[at].model,
            inputs,
            version=graph.versions[at],
            outputs=graph.step_outputs[at],
            parameters=self._parameters,
        )

    async def _infer_limited(self, limit: asyncio.Semaphore, at: int, inputs: Inputs) -> Any:
        async with limit:
            return await self._infer(at, inputs)

    async def _stream(self, at: int, inputs: Inputs) -> AsyncGenerator[_Prefetch[dict[str, Array]], None]:
        """Yield, per response of a decoupled step, the responses of the subgraph run for it."""
        graph = self._graph
        step, limit = graph.steps[at], graph.limits[at] if graph.limits else nullcontext()
        stream = self._call.infer_stream(
            step.model,
            inputs,
            version=graph.versions[at],
            outputs=graph.step_outputs[at],
            parameters=self._parameters,
        )
        async with limit:
            async for response in _Prefetch(stream, sys.maxsize if at in graph.unbounded else 1, self.tasks):
                given = {tensor: response[name] for name, tensor in step.outputs.items() if name in response}
                parameters = _stream_parameters(self._parameters, response)
                run = _Run(graph.subgraphs[at], given, self._call, self.tasks, parameters)
                yield _Prefetch(run.responses(), 1, self.tasks)


class _Prefetch(Generic[T]):
    """Reads a generator ahead of its consumer, in a task of the set `tasks` that ends when it is cancelled.

    The task pauses while `most` items are buffered; the item that the consumer is using counts as one.
    """

    def __init__(self, items: AsyncGenerator[T, None], most: int, tasks: set[asyncio.Task[None]]) -> None:
        self._most = most
        self._items: deque[T] = deque()
        self._reading = self._has_ended = False
        self._failure: BaseException | None = None
        self._changed, self._has_room = asyncio.Event(), asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._run(items))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _run(self, items: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    self._items.append(item)
                    self._changed.set()
                    while len(self._items) >= self._most:
                        self._has_room.clear()
                        await self._has_room.wait()
        except asyncio.CancelledError:
            self._failure = asyncio.CancelledError()  # A new one: the traceback of the other gets this frame.
            raise
        except Exception as error:
            self._failure = without_frames(error)
        finally:
            self._has_ended = True
            self._changed.set()

    def __aiter__(self) -> _Prefetch[T]:
        return self

    async def __anext__(self) -> T:
        if self._reading:
            self._reading = False
            self._items.popleft()
            self._has_room.set()
        while not self._items:
            if self._has_ended:
                failure, self._failure = self._failure, None
                try:
                    raise failure or StopAsyncIteration
                finally:
                    del failure  # Its traceback refers to this frame.
            self._changed.clear()
            await self._changed.wait()
        self._reading = True
        return self._items[0]


def _sequence_parameters(parameters: Parameters) -> dict[str, ParameterValue]:
    """Return the sequence parameters of the response to a request of a sequence, as in Triton."""
    found = parameters.get("sequence_id")
    if not found:
        return {}
    if isinstance(found, int) and found >= 1 << 63:
        found -= 1 << 64  # A parameter is an int64.
    flags = {name: parameters.get(name, False) for name in SEQUENCE[1:]}
    return {"sequence_id": found, **flags}


def _stream_parameters(parameters: Parameters, response: Mapping[str, Any]) -> Parameters:
    """Return the parameters for the steps after a decoupled one: the sequence of its response, if it has one."""
    own = response.parameters if isinstance(response, Answer) else {}
    if not any(name in own for name in SEQUENCE):
        return parameters
    flags = {name: own.get(name, False) for name in SEQUENCE[1:]}
    return {**parameters, "sequence_id": own.get("sequence_id", parameters.get("sequence_id", 0)), **flags}


async def _drain(responses: _Prefetch[_Prefetch[dict[str, Array]]]) -> dict[str, Array]:
    """Consume a decoupled step that no output depends on; return no tensors."""
    async for run in responses:
        async for _ in run:
            pass
    return {}


def _retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a cancelled task, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()
