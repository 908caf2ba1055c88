"""What Triton Python models have in common, decoupled or not."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triglot.backends.placement import Placement
from triglot.backends.reshaping import Reshaping
from triglot.backends.triton_python.home import Home
from triglot.backends.triton_python.instance import Instance
from triglot.backends.triton_python.names import TritonModules
from triglot.backends.triton_python.sender import Line
from triglot.core.call import Call
from triglot.core.tensor import Array
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.model.scheduling import SequenceBatching

Inputs = Mapping[str, Array]


class TritonModel(Model):
    """The instances of a `TritonPythonModel` class; closed with their modules."""

    platform = "python"
    takes_parameters = True
    any_output_shapes = True
    places_instances = True

    configured: Callable[[ModelConfig], Sequence[Instance]]
    """The instances that a configuration says."""

    def __init__(self, instances: Sequence[Instance], modules: TritonModules, home: Home) -> None:
        self.instances = len(instances)
        self._all = list(instances)
        self._home = home
        self.own_metrics = home.metrics
        self._modules = modules
        self._request_class = modules.names["InferenceRequest"]
        self._initializing = threading.Lock()
        self.reshaping: Reshaping | None = None
        self.iterative: SequenceBatching | None = None
        """Where requests may come again: the model's sequences. A process is not told of others."""

    @abstractmethod
    def start_instance(self, call: Call) -> None:
        """See `Model`."""

    def _differing(self, config: ModelConfig) -> tuple[list[Instance], list[Instance]]:
        """The instances that come and those that go, where a configuration says others than there are."""
        wanted = list(self.configured(config))
        self.instances = len(wanted)
        go: list[Instance] = []
        # One that could not be initialized is not kept in place of one that runs.
        for instance in sorted(self._all, key=lambda one: not one.initialized):
            same = next((one for one in wanted if one.device == instance.device), None)
            if same is None:
                go.append(instance)
            else:
                wanted.remove(same)
        names = {instance.name for instance in self._all}
        for instance in wanted:
            instance.rename(names)
            names.add(instance.name)
        return wanted, go

    def _initialize(self, instance: Instance) -> None:
        # Libraries load models in ways that two threads must not at the same time; in Triton each has a process.
        with self._initializing, self._modules.by_plain_names():
            instance.initialize()

    def _request(self, inputs: Inputs, call: Call, line: Line) -> Any:
        request = self._request_class()
        if self.reshaping is not None:
            inputs = self.reshaping.given(inputs)
        request.receive(inputs, call, line, [spec.name for spec in self.outputs], self.iterative)
        return request

    def close(self) -> None:
        """Calls `finalize` of every instance, and forgets the model's modules."""
        try:
            for instance in self._all:
                instance.finalize()
            self._home.close()
        finally:
            self._modules.close()


class PlacedModel(TritonModel):
    """Its instances are the engine's threads."""

    def __init__(self, instances: Sequence[Instance], modules: TritonModules, home: Home) -> None:
        super().__init__(instances, modules, home)
        self._placement = Placement(instances)

    def start_instance(self, call: Call) -> None:
        """See `Model`: calls `initialize`. Raises `ModelLoadError` for what that raises."""
        self._home.begin(call)
        self._mine()

    def change_instances(self, config: ModelConfig) -> tuple[int, int] | None:
        """See `Model`."""
        come, go = self._differing(config)
        there = self._placement.change(come, go)
        self._all = [one for one in self._all if one.initialized or one not in go] + come
        return len(come), there

    def end_instance(self) -> bool:
        """See `Model`: calls `finalize`."""
        instance = self._mine()
        if not self._placement.leave():
            return False
        self._all.remove(instance)
        instance.finalize()
        return True

    def _mine(self) -> Instance:
        instance = self._placement.mine()
        if not instance.initialized:
            try:
                self._initialize(instance)
            except BaseException:
                self._placement.leave(anyway=True)
                raise
        return instance
