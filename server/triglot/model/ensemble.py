"""Ensembles: models that are made of others (spec 5.3).

Strategy: tensors have names, and a step runs as soon as all that it takes are there. What steps give is what the
next ones get: nothing is copied on the way. Each answer of a decoupled step goes by itself through the steps after
it, which take nothing else: these are a graph of their own. `ensemble_checks` say before the first call whether
that can come to its end.
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
from triglot.model.reshaping import Rebatch, Reshape, Reshaping, all_of
from triglot.model.scheduling import Step
from triglot.model.signature import Signature, TensorRule

T = TypeVar("T")
Parameters = Mapping[str, ParameterValue]
Inputs = Mapping[str, Array]
MOST_GRAPHS = 64
"""That an ensemble keeps, each for some of its outputs; clients may ask for others."""
MOST_ANSWERS = 32
"""Of a decoupled step that are on their way through the steps after it, for one request, unless
`max_inflight_requests` says otherwise."""
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
"""Parameters of a request, and of an answer."""


class Ensemble(Model):
    """A model made of other models of the same server: what it says of itself are `inputs`, `outputs` and `steps`.

    Steps whose tensors are there run side by side. The first error of a step is the error of the request, and ends
    the others. `max_inflight_requests`: how many calls of each step run at the same time; 0: as many as come.
    With a decoupled step it is decoupled, too; such a step is held up while many of its answers are on their way.
    """

    steps: Sequence[Step] = ()
    max_inflight_requests: int = 0
    reshaping: Reshaping | None = None
    """Of a configuration's `reshape`: steps have other shapes than clients."""
    platform: ClassVar[str] = "ensemble"

    def connect(self, signature: Signature, parts: Sequence[Part], keys: Keys) -> None:
        """The models of the steps are there, and later others in their places.

        Raises `ValueError` as `check_fit`, and changes nothing then.
        """
        inside = signature if self.reshaping is None else self.reshaping.inside(signature)
        check_fit(self.steps, inside, parts, keys)
        self._plan = _Plan(self.steps, inside, parts, self.reshaping, self.max_inflight_requests, self._limits)
        self._graphs = {}

    async def infer(self, inputs: Inputs, call: Call) -> dict[str, Array]:
        """The outputs that are requested, when every step has run that they need.

        Those that a step has left out are not there.
        """
        with _naming(call):
            return await self._run(inputs, call).answer()

    async def infer_stream(self, inputs: Inputs, call: Call) -> AsyncGenerator[dict[str, Array], None]:
        """As `infer`, where steps are decoupled: an answer for each of theirs, in their order."""
        run = self._run(inputs, call)
        try:
            with _naming(call):
                async with aclosing(run.answers()) as answers:
                    async for answer in answers:
                        yield answer
        finally:
            for task in run.tasks:
                task.cancel()

    def _run(self, inputs: Inputs, call: Call) -> _Run:
        given = inputs if self.reshaping is None else self.reshaping.given(inputs)
        return _Run(self._graph(call.requested_outputs), given, call, set(), call.parameters)

    def _graph(self, requested: Sequence[str]) -> _Graph:
        """The steps that these outputs need; all steps where all outputs are requested, or none is named."""
        outputs = frozenset(requested)
        graph = self._graphs.get(outputs)
        if graph is None:
            names = frozenset(spec.name for spec in self.outputs)
            is_whole = outputs in (frozenset(), names)
            needed = range(len(self.steps)) if is_whole else _needed(self.steps, outputs)
            graph = _Graph(self._plan, needed, outputs or names)
            if len(self._graphs) < MOST_GRAPHS:
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
def _naming(call: Call) -> Iterator[None]:
    """Errors say which ensemble it was."""
    try:
        yield
    except ServingError as error:
        text = f"in ensemble '{call.model_name}', {error.message}"
        if isinstance(error, ModelNotFound):  # Not what the client asked for.
            raise Unavailable(text) from None
        error.message = text
        raise


# --- the steps and their models ---


class _Plan:
    """All steps, and what their models make of them.

    `changes`: how the shapes of each step's inputs change, by name, and `last_changes` those of the ensemble's
    outputs, one after the other. `streams`: see `streams_of`.
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
    """What is done with tensors, by the names that who takes them has for them."""
    return {
        name: Rebatch(dims, taking.batched)
        for name, tensor in taken.items()
        if name in rules
        and batched[tensor] is not taking.batched
        and (dims := taking.dims(rules[name].spec)) is not None
    }


class _Graph:
    """The steps that some outputs need, by what they wait for.

    `stream`: of which decoupled step they take each answer, None where they take the request's inputs. `streams`:
    the graphs of the answers of its own decoupled steps; the outputs are those of one of them, the `outlet`, if
    they are not its own. `uses`: how often each tensor is taken, the answer counted as one. `given`: the tensors
    that come from outside, which may lack those that are optional. `most`: runs of it at the same time, for one
    request. `models`: of its steps and those after them. `read_out`: decoupled steps that are not held up.
    """

    def __init__(
        self, plan: _Plan, needed: Sequence[int], outputs: frozenset[str], stream: int | None = None
    ) -> None:
        here = [
            at for at in needed if all(plan.streams[name] == stream for name in plan.steps[at].inputs.values())
        ]
        steps = self.steps = [plan.steps[at] for at in here]
        self.outputs = frozenset(name for name in outputs if plan.streams[name] == stream)
        self.streams = {
            place: _Graph(plan, needed, outputs, at) for place, at in enumerate(here) if plan.decoupled[at]
        }
        after = (graph.models for graph in self.streams.values())
        self.models: set[str] = {step.model for step in steps}.union(*after)
        # Their models have to be free for the steps after them.
        self.read_out = {place for place, graph in self.streams.items() if steps[place].model in graph.models}
        self.outlet = next((place for place, graph in self.streams.items() if graph.leads_out), None)
        self.leads_out: bool = bool(self.outputs) or self.outlet is not None
        self.changes = [plan.changes[at] for at in here]
        self.last_changes = plan.last_changes
        self.limits = [plan.limits[at] for at in here] if plan.limits else None
        several = plan.max_inflight_requests * max(1, len(here)) or MOST_ANSWERS
        # A stream that is read later may hold the instance that the one which is read now waits for.
        self.most = several if self.outlet is None else 1
        self.takes = [frozenset(step.inputs.values()) for step in steps]
        self.names = [tuple(step.outputs) for step in steps]
        self.versions = [str(step.version) if step.version else "" for step in steps]
        self.uses = Counter(name for names in (*self.takes, self.outputs) for name in names)
        made = frozenset[str]().union(*(step.outputs.values() for step in steps))
        self.given = self.outputs.union(*self.takes) - made
        self.takers: dict[str, list[int]] = {}
        for at, names in enumerate(self.takes):
            for name in names:
                self.takers.setdefault(name, []).append(at)


def _needed(steps: Sequence[Step], outputs: Iterable[str]) -> list[int]:
    """The steps that lead to these tensors, in their order."""
    givers = {tensor: at for at, step in enumerate(steps) for tensor in step.outputs.values()}
    needed: set[int] = set()
    wanted = list(outputs)
    while wanted:
        at = givers.get(wanted.pop())
        if at is not None and at not in needed:
            needed.add(at)
            wanted += steps[at].inputs.values()
    return sorted(needed)


# --- one request ---


class _Run:
    """One request, or one answer of a decoupled step, on its way through the steps of a graph.

    A tensor is let go of when nobody will take it any more. `tasks`: see `_Ahead`. `parameters`: the request's, in
    the sequence that the decoupled step's answer says.
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
        self._there: dict[str, Array] = {}
        self._uses = graph.uses.copy()
        self._missing = [len(names) for names in graph.takes]
        self._running: dict[asyncio.Future[Any], int] = {}
        self._absent = set(graph.given - inputs.keys())
        self._outlet: _Ahead[_Ahead[dict[str, Array]]] | None = None

    async def answers(self) -> AsyncGenerator[dict[str, Array], None]:
        """One answer, or all those that come of the outlet's, in their order."""
        answer = await self.answer()
        if self._outlet is None:
            yield answer
            return
        async for ahead in self._outlet:
            async for answer in ahead:
                yield answer

    async def answer(self) -> dict[str, Array]:
        """What is there when every step has run that is not decoupled."""
        running = self._running
        try:
            self._begin()
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                while done:
                    self._ended(done.pop())
            lacks = not self._absent.isdisjoint(self._graph.outputs)
            there = self._there
            for changes in self._graph.last_changes:
                there = all_of(changes, there)
            sequence = _sequence_of(self._parameters)
            return Answer(there, sequence, partial=lacks) if lacks or sequence else there
        finally:
            for task in running:
                task.add_done_callback(_look_at)
                task.cancel()
            running.clear()  # Their errors have frames that have this.

    def _begin(self) -> None:
        inputs, self._inputs = self._inputs, {}
        self._add(inputs)
        self._need_no_more(tuple(self._absent))

    def _ended(self, task: asyncio.Future[Any]) -> None:
        outputs = self._graph.steps[self._running.pop(task)].outputs
        try:
            answer = task.result()
        finally:
            del task  # It has the error, whose traceback has this frame.
        self._add({tensor: answer[name] for name, tensor in outputs.items() if name in answer})
        if absent := [tensor for name, tensor in outputs.items() if name not in answer]:
            # Its model has left them out. Who needs them says so.
            self._absent.update(absent)
            self._need_no_more(absent)

    def _add(self, tensors: Inputs) -> None:
        """These are there now: start what has waited for them."""
        self._there |= {name: tensor for name, tensor in tensors.items() if self._uses[name]}
        self._need_no_more(tensors)

    def _need_no_more(self, names: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        graph = self._graph
        for name in names:
            for at in graph.takers.get(name, ()):
                self._missing[at] -= 1
                if not self._missing[at]:
                    self._start(at)

    def _start(self, at: int) -> None:
        graph = self._graph
        absent = self._absent
        taken = graph.steps[at].inputs.items()
        inputs = {name: self._there[tensor] for name, tensor in taken if tensor not in absent}
        for tensor in graph.takes[at] - absent:
            self._uses[tensor] -= 1
            if not self._uses[tensor]:
                del self._there[tensor]
        if graph.changes[at]:
            inputs = all_of(graph.changes[at], inputs)
        if at in graph.streams:
            ahead = _Ahead(self._follow(at, inputs), graph.streams[at].most, self.tasks)
            if at == graph.outlet:
                self._outlet = ahead
                return
            answer: Any = _drained(ahead)
        elif graph.limits is None:
            answer = self._infer(at, inputs)
        else:
            answer = self._in_turn(graph.limits[at], at, inputs)
        self._running[asyncio.ensure_future(answer)] = at

    def _infer(self, at: int, inputs: Inputs) -> Any:
        graph = self._graph
        return self._call.infer(
            graph.steps[at].model,
            inputs,
            version=graph.versions[at],
            outputs=graph.names[at],
            parameters=self._parameters,
        )

    async def _in_turn(self, limit: asyncio.Semaphore, at: int, inputs: Inputs) -> Any:
        async with limit:
            return await self._infer(at, inputs)

    async def _follow(self, at: int, inputs: Inputs) -> AsyncGenerator[_Ahead[dict[str, Array]], None]:
        """What becomes of each answer of a decoupled step."""
        graph = self._graph
        step, limit = graph.steps[at], graph.limits[at] if graph.limits else nullcontext()
        stream = self._call.infer_stream(
            step.model,
            inputs,
            version=graph.versions[at],
            outputs=graph.names[at],
            parameters=self._parameters,
        )
        async with limit:
            async for answer in _Ahead(stream, sys.maxsize if at in graph.read_out else 1, self.tasks):
                given = {tensor: answer[name] for name, tensor in step.outputs.items() if name in answer}
                parameters = _in_sequence(self._parameters, answer)
                run = _Run(graph.streams[at], given, self._call, self.tasks, parameters)
                yield _Ahead(run.answers(), 1, self.tasks)


class _Ahead(Generic[T]):
    """What a generator gives, which runs in one of the `tasks` until these are cancelled, ahead of its reader.

    It waits while there are `most` items, the one that is being read among them.
    """

    def __init__(self, items: AsyncGenerator[T, None], most: int, tasks: set[asyncio.Task[None]]) -> None:
        self._most = most
        self._items: deque[T] = deque()
        self._reads = self._over = False
        self._failure: BaseException | None = None
        self._news, self._room = asyncio.Event(), asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._run(items))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _run(self, items: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    self._items.append(item)
                    self._news.set()
                    while len(self._items) >= self._most:
                        self._room.clear()
                        await self._room.wait()
        except asyncio.CancelledError:
            self._failure = asyncio.CancelledError()  # Not the one whose traceback gets this frame.
            raise
        except Exception as error:
            self._failure = without_frames(error)
        finally:
            self._over = True
            self._news.set()

    def __aiter__(self) -> _Ahead[T]:
        return self

    async def __anext__(self) -> T:
        if self._reads:
            self._reads = False
            self._items.popleft()
            self._room.set()
        while not self._items:
            if self._over:
                failure, self._failure = self._failure, None
                try:
                    raise failure or StopAsyncIteration
                finally:
                    del failure  # Its traceback has this frame.
            self._news.clear()
            await self._news.wait()
        self._reads = True
        return self._items[0]


def _sequence_of(parameters: Parameters) -> dict[str, ParameterValue]:
    """What the answer to a request of a sequence says of it, as in Triton."""
    found = parameters.get("sequence_id")
    if not found:
        return {}
    if isinstance(found, int) and found >= 1 << 63:
        found -= 1 << 64  # An int64 is what a parameter can be.
    flags = {name: parameters.get(name, False) for name in SEQUENCE[1:]}
    return {"sequence_id": found, **flags}


def _in_sequence(parameters: Parameters, answer: Mapping[str, Any]) -> Parameters:
    """The parameters for the steps after a decoupled one: of a sequence, if its answer says one."""
    said = answer.parameters if isinstance(answer, Answer) else {}
    if not any(name in said for name in SEQUENCE):
        return parameters
    flags = {name: said.get(name, False) for name in SEQUENCE[1:]}
    return {**parameters, "sequence_id": said.get("sequence_id", parameters.get("sequence_id", 0)), **flags}


async def _drained(ahead: _Ahead[_Ahead[dict[str, Array]]]) -> dict[str, Array]:
    """Of a decoupled step that nothing leads out of: no tensors, when it has ended."""
    async for answers in ahead:
        async for _ in answers:
            pass
    return {}


def _look_at(task: asyncio.Future[Any]) -> None:
    """Of what nobody waits for any more, nobody needs to hear how it ended."""
    if not task.cancelled():
        task.exception()
