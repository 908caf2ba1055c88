"""Ensembles: models that are made of others (spec 5.3).

Strategy: tensors have names, and a step runs as soon as all that it takes are there. What steps give is what the
next ones get: nothing is copied on the way. `check_steps` and `check_fit` say before the first call whether that
can come to its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from triglot.core.call import Call
from triglot.core.errors import ModelNotFound, ServingError, Unavailable
from triglot.core.tensor import Array
from triglot.core.types import Answer, TensorSpec
from triglot.model.model import Model
from triglot.model.scheduling import Step
from triglot.model.signature import Signature, shape_text

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
    platform: ClassVar[str] = "ensemble"

    async def infer(self, inputs: Inputs, call: Call) -> dict[str, Array]:
        """The outputs that are requested, when every step has run that they need.

        Those that a step has left out are not there.
        """
        try:
            return await _Run(self._graph(call.requested_outputs), inputs, call).answer()
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
            graph = _Graph(self.steps, needed, outputs or names, self._limits)
            if len(self._graphs) < MOST_GRAPHS:
                self._graphs[outputs] = graph
        return graph

    @cached_property
    def _graphs(self) -> dict[frozenset[str], _Graph]:
        return {}

    @cached_property
    def _limits(self) -> list[asyncio.Semaphore] | None:
        most = self.max_inflight_requests
        return [asyncio.Semaphore(most) for _ in self.steps] if most else None


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
    ) -> None:
        steps = self.steps = [steps[at] for at in needed]
        self.outputs = outputs
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
            return Answer(self._there, partial=True) if lacks else self._there
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


# --- checks before the first request; each raises `ValueError`, which names the step and the key ---


@dataclass(frozen=True, slots=True)
class Keys:
    """What messages call the fields of a step: as they are written in a configuration, or in Python."""

    step: str = "steps"
    model: str = "model"
    inputs: str = "inputs"
    outputs: str = "outputs"


IN_PYTHON = Keys()
IN_CONFIG = Keys("ensemble_scheduling.step", "model_name", "input_map", "output_map")


@dataclass(frozen=True, slots=True)
class Part:
    """What the model of a step says of itself."""

    signature: Signature
    decoupled: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor comes from, and what is known of it; None: nothing."""

    where: str
    spec: TensorSpec | None


def check_steps(steps: Sequence[Step], signature: Signature, keys: Keys) -> None:
    """Whether every tensor is produced once, and every step can run, and gives or takes what the ensemble says."""
    if not steps:
        raise ValueError(f"{keys.step}: expected at least one step, got none")
    given = {spec.name: f"input '{spec.name}' of the ensemble" for spec in signature.inputs}
    for kind, specs in (("input", signature.inputs), ("output", signature.outputs)):
        if not specs:
            raise ValueError(f"{kind}: expected at least one, got none")
    for at, step in enumerate(steps):
        for key, names in ((keys.inputs, step.inputs), (keys.outputs, step.outputs)):
            if not names:
                raise ValueError(f"{keys.step}[{at}].{key}: expected at least one tensor, got none")
        for name, tensor in step.outputs.items():
            where = f"{keys.step}[{at}].{keys.outputs}[{name}]"
            if tensor in given:
                raise ValueError(f"{where}: tensor '{tensor}' is {given[tensor]} already")
            given[tensor] = where
    _check_taken(steps, signature, given, keys)
    _check_order(steps, signature, keys)


def _check_taken(steps: Sequence[Step], signature: Signature, given: Mapping[str, str], keys: Keys) -> None:
    for at, step in enumerate(steps):
        for name, tensor in step.inputs.items():
            if tensor not in given:
                raise ValueError(
                    f"{keys.step}[{at}].{keys.inputs}[{name}]: tensor '{tensor}' is no input of the ensemble, and "
                    "no step gives it"
                )
    outputs = {tensor for step in steps for tensor in step.outputs.values()}
    for at, spec in enumerate(signature.outputs):
        if spec.name not in outputs:
            raise ValueError(f"output[{at}]: no step gives the ensemble's output '{spec.name}'")
    taken = {tensor for step in steps for tensor in step.inputs.values()}
    for at, spec in enumerate(signature.inputs):
        if spec.name not in taken:
            raise ValueError(f"input[{at}]: no step takes the ensemble's input '{spec.name}'")


def _check_order(steps: Sequence[Step], signature: Signature, keys: Keys) -> None:
    there = {spec.name for spec in signature.inputs}
    left = dict(enumerate(steps))
    while ready := [at for at, step in left.items() if there.issuperset(step.inputs.values())]:
        for at in ready:
            there.update(left.pop(at).outputs.values())
    if left:
        names = ", ".join(f"{keys.step}[{at}] ('{step.model}')" for at, step in left.items())
        raise ValueError(f"{keys.step}: these wait for each other's tensors, so none of them can run: {names}")


def check_fit(steps: Sequence[Step], signature: Signature, parts: Sequence[Part], keys: Keys) -> None:
    """Whether the models of the steps, `parts`, take and give what is handed to and fro."""
    sources = {spec.name: _Source(f"input '{spec.name}' of the ensemble", spec) for spec in signature.inputs}
    for at, (step, part) in enumerate(zip(steps, parts, strict=True)):
        where = f"{keys.step}[{at}]"
        if part.decoupled:
            raise ValueError(
                f"{where}.{keys.model}: '{step.model}' answers with a stream (it is decoupled); expected a model "
                "with one answer"
            )
        limit = part.signature.max_batch_size
        if 0 < limit < signature.max_batch_size:
            raise ValueError(
                f"{where}.{keys.model}: expected a model with a max_batch_size of at least the ensemble's "
                f"{signature.max_batch_size}, '{step.model}' has {limit}"
            )
        _check_names(where, step, part.signature, keys)
        _check_needs(where, step, part.signature, signature, keys)
        for name, tensor in step.outputs.items():
            rule = part.signature.output_rules.get(name)
            sources[tensor] = _Source(f"output '{name}' of '{step.model}'", None if rule is None else rule.spec)
    for where, tensor, taken in _taken(steps, signature, parts, keys):
        _check_tensor(where, sources[tensor], taken)


def _check_names(where: str, step: Step, signature: Signature, keys: Keys) -> None:
    if signature.any_tensors:
        return
    for key, kind, names, rules in (
        (keys.inputs, "inputs", step.inputs, signature.input_rules),
        (keys.outputs, "outputs", step.outputs, signature.output_rules),
    ):
        for name in names:
            if name not in rules:
                has = ", ".join(f"'{one}'" for one in rules) or "none"
                raise ValueError(f"{where}.{key}[{name}]: the {kind} of '{step.model}' are {has}")
    for name in signature.input_rules:
        if name not in step.inputs and name not in signature.may_lack:
            raise ValueError(f"{where}.{keys.inputs}: '{step.model}' needs input '{name}', too")


def _check_needs(where: str, step: Step, taking: Signature, ensemble: Signature, keys: Keys) -> None:
    """What a request may leave out, the step must be able to run without."""
    for name, tensor in step.inputs.items():
        rule = ensemble.input_rules.get(tensor)
        if rule is not None and rule.spec.optional and name not in taking.may_lack and not taking.any_tensors:
            raise ValueError(
                f"{where}.{keys.inputs}[{name}]: '{step.model}' needs it, and input '{tensor}' of the ensemble is "
                "optional"
            )


def _taken(
    steps: Sequence[Step], signature: Signature, parts: Sequence[Part], keys: Keys
) -> Iterator[tuple[str, str, TensorSpec]]:
    """Where each tensor is taken, its name, and what it is expected to be there."""
    for at, (step, part) in enumerate(zip(steps, parts, strict=True)):
        for name, tensor in step.inputs.items():
            if (rule := part.signature.input_rules.get(name)) is not None:
                yield f"{keys.step}[{at}].{keys.inputs}[{name}]: '{step.model}'", tensor, rule.spec
    for at, spec in enumerate(signature.outputs):
        yield f"output[{at}]: the ensemble's output '{spec.name}'", spec.name, spec


def _check_tensor(where: str, source: _Source, taken: TensorSpec) -> None:
    given = source.spec
    if given is None:
        return
    if given.datatype != taken.datatype:
        raise ValueError(f"{where} is {taken.datatype}, {source.where} is {given.datatype}")
    if given.shape is None or taken.shape is None:
        return
    fits = len(given.shape) == len(taken.shape) and all(
        -1 in (one, other) or one == other for one, other in zip(given.shape, taken.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{where} has shape {shape_text(taken.shape)}, {source.where} has {shape_text(given.shape)}"
        )
