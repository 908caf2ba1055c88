"""Base of Triton Python models, decoupled or not."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triglot.backends.placement import Placement
from triglot.backends.triton_python.context import ModelContext
from triglot.backends.triton_python.instance import Instance
from triglot.backends.triton_python.names import TritonModules
from triglot.backends.triton_python.sender import ResponseChannel
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

    instances_for: Callable[[ModelConfig], Sequence[Instance]]
    """Return the instances for a configuration."""

    def __init__(self, instances: Sequence[Instance], modules: TritonModules, context: ModelContext) -> None:
        self.instances = len(instances)
        self._instances = list(instances)
        self._context = context
        self.own_metrics = context.metrics
        self._modules = modules
        self._request_class = modules.names["InferenceRequest"]
        self._initialize_lock = threading.Lock()
        self._change_lock = threading.Lock()
        self._ending = Counter[tuple[str, str]]()
        """Number of instances to end, by device."""
        self.reshaping: Reshaping | None = None
        self.iterative: SequenceBatching | None = None
        """The model's sequences, if requests may be rescheduled. A process has no other information on
        sequences."""
        if instances[0].has_check:
            self.check_ready = self._all_ready

    def _all_ready(self) -> bool:
        """Whether every instance's `is_ready` returns True."""
        return all(instance.is_ready() for instance in self._instances)

    @abstractmethod
    def start_instance(self, call: Call) -> None:
        """See `Model`."""

    def _add_instances(self, config: ModelConfig) -> list[Instance]:
        """Add and return the instances that a changed configuration requires; `_ending` counts those to end."""
        wanted = list(self.instances_for(config))
        current = Counter(instance.device for instance in self._instances)
        self._ending = current - Counter(instance.device for instance in wanted)
        self.instances = len(wanted)
        names = {instance.name for instance in self._instances}
        added: list[Instance] = []
        for instance in wanted:
            if current[instance.device]:
                current[instance.device] -= 1
            else:
                instance.rename(names)
                names.add(instance.name)
                added.append(instance)
        self._instances += added
        return added

    def _end_if_due(self, instance: Instance) -> bool:
        """Whether this instance has to end, and if so removes it."""
        with self._change_lock:
            if not self._ending[instance.device]:
                return False
            self._ending[instance.device] -= 1
            self._instances.remove(instance)
            return True

    def _initialize(self, instance: Instance) -> None:
        # Some libraries must not load models on two threads concurrently; in Triton each instance has a process.
        with self._initialize_lock, self._modules.by_plain_names():
            instance.initialize()

    def _request(self, inputs: Inputs, call: Call, channel: ResponseChannel) -> Any:
        request = self._request_class()
        if self.reshaping is not None:
            inputs = self.reshaping.given(inputs)
        request.receive(inputs, call, channel, [spec.name for spec in self.outputs], self.iterative)
        return request

    def close(self) -> None:
        """Call `finalize` of every instance, and remove the model's modules."""
        try:
            for instance in self._instances:
                instance.finalize()
            self._context.close()
        finally:
            self._modules.close()


class PlacedModel(TritonModel):
    """A model whose instances run on the executor's threads."""

    def __init__(self, instances: Sequence[Instance], modules: TritonModules, context: ModelContext) -> None:
        super().__init__(instances, modules, context)
        self._placement = Placement(instances)

    def start_instance(self, call: Call) -> None:
        """See `Model`: calls `initialize`. Raise `ModelLoadError` for its exceptions."""
        self._context.start_serving(call)
        self._current_instance()

    def change_instances(self, config: ModelConfig) -> tuple[int, int] | None:
        """See `Model`."""
        added = self._add_instances(config)
        self._placement.add(added)
        return len(added), self._ending.total()

    def end_instance(self) -> bool:
        """See `Model`: calls `finalize`."""
        instance = self._current_instance()
        if not self._end_if_due(instance):
            return False
        self._placement.release()
        instance.finalize()
        return True

    def _current_instance(self) -> Instance:
        instance = self._placement.current()
        if not instance.initialized:
            try:
                self._initialize(instance)
            except BaseException:
                self._placement.release()
                with self._change_lock:
                    self._instances.remove(instance)
                raise
        return instance
