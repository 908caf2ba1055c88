"""Ensembles: models that are made of others (spec 5.3).

Strategy: tensors have names, and a step runs as soon as all that it takes are there. What steps give is what the
next ones get: nothing is copied on the way. `ensemble_checks` say before the first call whether that can come to
its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from triglot.core.call import Call
from triglot.core.errors import ModelNotFound, ServingError, Unavailable
from triglot.core.tensor import Array
from triglot.core.types import Answer
from triglot.model.ensemble_checks import Keys, Part, check_fit
from triglot.model.model import Model
from triglot.model.reshaping import Rebatch, Reshape, Reshaping, all_of
from triglot.model.scheduling import Step
from triglot.model.signature import Signature, TensorRule

Inputs = Mapping[str, Array]
MOST_GRAPHS = 64
"""That an ensemble keeps, each for some of its outputs; clients may ask for others."""


class Ensemble(Model):
    """A model made of other models of the same server: what it says of itself are `inputs`, `outputs` and `steps`.

    Steps whose tensors are there run side by side. The first error of a step is the error of the request, and ends
    the others. `max_inflight_requests`: how many calls of each step run at the same time; 0: as many as come.
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
        self._links = _links(self.steps, inside, parts, self.reshaping)
        self._graphs = {}

    async def infer(self, inputs: Inputs, call: Call) -> dict[str, Array]:
        """The outputs that are requested, when every step has run that they need.

        Those that a step has left out are not there.
        """
        try:
            given = inputs if self.reshaping is None else self.reshaping.given(inputs)
            return await _Run(self._graph(call.requested_outputs), given, call).answer()
        except ServingError as error:
            text = f"in ensemble '{call.model_name}', {error.message}"
            if isinstance(error, ModelNotFound):  # Not what the client asked for.
                raise Unavailable(text) from None
            error.message = text
            raise

    def _graph(self, requested: Sequence[str]) -> _Graph:
        """The steps that these outputs need; all steps where all outputs are requested, or none is named."""
        outputs = frozenset(requested)
        graph = self._graphs.get(outputs)
        if graph is None:
            names = frozenset(spec.name for spec in self.outputs)
            is_whole = outputs in (frozenset(), names)
            needed = range(len(self.steps)) if is_whole else _needed(self.steps, outputs)
            graph = _Graph(self.steps, needed, outputs or names, self._limits, self._links)
            if len(self._graphs) < MOST_GRAPHS:
                self._graphs[outputs] = graph
        return graph

    @cached_property
    def _graphs(self) -> dict[frozenset[str], _Graph]:
        return {}

    @cached_property
    def _links(self) -> _Links:
        return _Links([{} for _ in self.steps], [])

    @cached_property
    def _limits(self) -> list[asyncio.Semaphore] | None:
        most = self.max_inflight_requests
        return [asyncio.Semaphore(most) for _ in self.steps] if most else None


# --- what the models of the steps are ---


@dataclass(frozen=True, slots=True)
class _Links:
    """How the shapes of tensors change: of the inputs of each step, and of the ensemble's outputs one after the
    other, by name."""

    inputs: Sequence[Mapping[str, Rebatch]]
    outputs: Sequence[Mapping[str, Rebatch | Reshape]]


def _links(
    steps: Sequence[Step], signature: Signature, parts: Sequence[Part], reshaping: Reshaping | None
) -> _Links:
    batched = {spec.name: signature.batched for spec in signature.inputs}
    for step, part in zip(steps, parts, strict=True):
        batched |= dict.fromkeys(step.outputs.values(), part.signature.batched)

    def found(taken: Mapping[str, str], taking: Signature, rules: Mapping[str, TensorRule]) -> dict[str, Rebatch]:
        return {
            name: Rebatch(dims, taking.batched)
            for name, tensor in taken.items()
            if name in rules
            and batched[tensor] is not taking.batched
            and (dims := taking.dims(rules[name].spec)) is not None
        }

    taken = zip(steps, parts, strict=True)
    own = signature.output_rules
    return _Links(
        [found(step.inputs, part.signature, part.signature.input_rules) for step, part in taken],
        [found({name: name for name in own}, signature, own), {} if reshaping is None else reshaping.outputs],
    )


# --- one request ---


class _Graph:
    """The steps that some outputs need, by what they wait for.

    `uses`: how often each tensor is taken, the answer counted as one. `given`: the tensors that come with a
    request, which may lack those that are optional. `limits`: of all steps.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        needed: Sequence[int],
        outputs: frozenset[str],
        limits: Sequence[asyncio.Semaphore] | None,
        links: _Links,
    ) -> None:
        steps = self.steps = [steps[at] for at in needed]
        self.outputs = outputs
        self.changes = [links.inputs[at] for at in needed]
        self.last_changes = [changes for changes in links.outputs if changes]
        self.limits = None if limits is None else [limits[at] for at in needed]
        self.takes = [frozenset(step.inputs.values()) for step in steps]
        self.names = [tuple(step.outputs) for step in steps]
        self.versions = [str(step.version) if step.version else "" for step in steps]
        self.uses = Counter(name for names in (*self.takes, outputs) for name in names)
        self.given = frozenset[str]().union(*self.takes).difference(*(step.outputs.values() for step in steps))
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


class _Run:
    """One request on its way through the steps. A tensor is let go of when nobody will take it any more."""

    def __init__(self, graph: _Graph, inputs: Inputs, call: Call) -> None:
        self._graph = graph
        self._call = call
        self._there: dict[str, Array] = {}
        self._uses = graph.uses.copy()
        self._missing = [len(names) for names in graph.takes]
        self._running: dict[asyncio.Future[Any], int] = {}
        self._absent = set(graph.given - inputs.keys())
        self._add(inputs)
        self._need_no_more(tuple(self._absent))

    async def answer(self) -> dict[str, Array]:
        """What is there when every step has run."""
        running = self._running
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                while done:
                    self._ended(done.pop())
            lacks = not self._absent.isdisjoint(self._graph.outputs)
            there = self._there
            for changes in self._graph.last_changes:
                there = all_of(changes, there)
            return Answer(there, partial=True) if lacks else there
        finally:
            for task in running:
                task.add_done_callback(_look_at)
                task.cancel()
            running.clear()  # Their errors have frames that have this.

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
                    self._running[self._start(at)] = at

    def _start(self, at: int) -> asyncio.Future[Any]:
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
        answer = self._infer(at, inputs) if graph.limits is None else self._in_turn(graph.limits[at], at, inputs)
        started: asyncio.Future[Any] = asyncio.ensure_future(answer)
        return started

    def _infer(self, at: int, inputs: Inputs) -> Any:
        graph = self._graph
        return self._call.infer(graph.steps[at].model, inputs, version=graph.versions[at], outputs=graph.names[at])

    async def _in_turn(self, limit: asyncio.Semaphore, at: int, inputs: Inputs) -> Any:
        async with limit:
            return await self._infer(at, inputs)


def _look_at(task: asyncio.Future[Any]) -> None:
    """Of what nobody waits for any more, nobody needs to hear how it ended."""
    if not task.cancelled():
        task.exception()
