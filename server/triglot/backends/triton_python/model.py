"""Base of Triton Python models, decoupled or not."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triglot.backends.placement import Placement
from triglot.backends.triton_python.home import Home
from triglot.backends.triton_python.instance import Instance
from triglot.backends.triton_python.names import TritonModules
from triglot.backends.triton_python.sender import Line
from triglot.core.call import Call
from triglot.core.tensor import Array
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.model.reshaping import Reshaping
from triglot.model.scheduling import SequenceBatching

Inputs = Mapping[str, Array]


class TritonModel(Model):
    """The instances of a `TritonPythonModel` class; closed together with their modules."""

    platform = "python"
    takes_parameters = True
    any_output_shapes = True
    places_instances = True

    configured: Callable[[ModelConfig], Sequence[Instance]]
    """Returns the instances for a configuration."""

    def __init__(self, instances: Sequence[Instance], modules: TritonModules, home: Home) -> None:
        self.instances = len(instances)
        self._all = list(instances)
        self._home = home
        self.own_metrics = home.metrics
        self._modules = modules
        self._request_class = modules.names["InferenceRequest"]
        self._initializing = threading.Lock()
        self._changing = threading.Lock()
        self._going = Counter[tuple[str, str]]()
        """Number of instances to end, by device."""
        self.reshaping: Reshaping | None = None
        self.iterative: SequenceBatching | None = None
        """The model's sequences, if requests may be rescheduled. A process has no other information on
        sequences."""
        if instances[0].has_check:
            self.check_ready = self._all_ready

    def _all_ready(self) -> bool:
        """Whether every instance's `is_ready` returns True."""
        return all(instance.is_ready() for instance in self._all)

    @abstractmethod
    def start_instance(self, call: Call) -> None:
        """See `Model`."""

    def _coming(self, config: ModelConfig) -> list[Instance]:
        """Adds and returns the instances that a changed configuration requires; `_going` counts those to end."""
        wanted = list(self.configured(config))
        there = Counter(instance.device for instance in self._all)
        self._going = there - Counter(instance.device for instance in wanted)
        self.instances = len(wanted)
        names = {instance.name for instance in self._all}
        come: list[Instance] = []
        for instance in wanted:
            if there[instance.device]:
                there[instance.device] -= 1
            else:
                instance.rename(names)
                names.add(instance.name)
                come.append(instance)
        self._all += come
        return come

    def _goes(self, instance: Instance) -> bool:
        """Whether this instance has to end, and if so removes it."""
        with self._changing:
            if not self._going[instance.device]:
                return False
            self._going[instance.device] -= 1
            self._all.remove(instance)
            return True

    def _initialize(self, instance: Instance) -> None:
        # Some libraries must not load models on two threads concurrently; in Triton each instance has a process.
        with self._initializing, self._modules.by_plain_names():
            instance.initialize()

    def _request(self, inputs: Inputs, call: Call, line: Line) -> Any:
        request = self._request_class()
        if self.reshaping is not None:
            inputs = self.reshaping.given(inputs)
        request.receive(inputs, call, line, [spec.name for spec in self.outputs], self.iterative)
        return request

    def close(self) -> None:
        """Calls `finalize` of every instance, and removes the model's modules."""
        try:
            for instance in self._all:
                instance.finalize()
            self._home.close()
        finally:
            self._modules.close()


class PlacedModel(TritonModel):
    """A model whose instances run on the executor's threads."""

    def __init__(self, instances: Sequence[Instance], modules: TritonModules, home: Home) -> None:
        super().__init__(instances, modules, home)
        self._placement = Placement(instances)

    def start_instance(self, call: Call) -> None:
        """See `Model`: calls `initialize`. Raises `ModelLoadError` for its exceptions."""
        self._home.begin(call)
        self._mine()

    def change_instances(self, config: ModelConfig) -> tuple[int, int] | None:
        """See `Model`."""
        come = self._coming(config)
        self._placement.add(come)
        return len(come), self._going.total()

    def end_instance(self) -> bool:
        """See `Model`: calls `finalize`."""
        instance = self._mine()
        if not self._goes(instance):
            return False
        self._placement.leave()
        instance.finalize()
        return True

    def _mine(self) -> Instance:
        instance = self._placement.mine()
        if not instance.initialized:
            try:
                self._initialize(instance)
            except BaseException:
                self._placement.leave()
                with self._changing:
                    self._all.remove(instance)
                raise
        return instance
