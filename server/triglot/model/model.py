"""`Model`: what a user or a backend writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from triglot.core.batch_counts import BatchCounts
from triglot.core.tensor import Array
from triglot.core.types import TensorSpec
from triglot.model.config import NO_CONFIG, ModelConfig
from triglot.model.metrics import ModelMetrics
from triglot.model.scheduling import DynamicBatching, SequenceBatching
from triglot.model.signature import Signature

if TYPE_CHECKING:
    from triglot.core.call import Call


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is `async def`, and so runs on the event loop."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def kind_in_lists(equal_shapes: Sequence[str], inputs: Mapping[str, Array]) -> Hashable:
    """What requests of a list have in common: the inputs that there are, and the shapes of some."""
    return frozenset((name, array.shape[1:] if name in equal_shapes else ()) for name, array in inputs.items())


def is_decoupled(infer: Callable[..., Any]) -> bool:
    """Whether it yields its answers."""
    return inspect.isgeneratorfunction(infer) or inspect.isasyncgenfunction(infer)


class Model:
    """A model: named tensors in, named tensors out. Usable without a server.

    Write `infer(self, inputs)` or `infer(self, inputs, call)`. `inputs` maps each input's name to a read-only
    array that lies over the request's own bytes; the answer maps each output's name to an array.

    - A plain function runs on the model's own threads, one per instance, and on the event loop only where
      `execution` says so.
    - An `async def` function runs on the event loop and must not block it.
    - A generator (plain or async) yields any number of answers: the model is *decoupled*.

    A `ServingError` that `infer` raises reaches the client as it is; any other exception becomes INTERNAL with
    a fixed text, and its trace goes to the log.
    """

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    signatures: Mapping[str, Signature] = {}
    """Further signatures by name; `inputs` and `outputs` are the one named "serving_default".
    `call.signature_name` says which one is called."""
    signature_defs: Mapping[str, bytes] = {}
    """Serialized `tensorflow.SignatureDef`s of the model's file; TensorFlow Serving's metadata repeats them."""
    speaks_json: bool = False
    """Whether it takes and gives JSON: inputs `instances`, a text each, and `parameters`, one text of an object;
    output `predictions`, one text. All are BYTES."""
    any_tensors: bool = False
    """Whether it takes inputs of any names, datatypes and shapes, and gives such outputs; what it declares is for
    clients to read."""
    any_output_shapes: bool = False
    """Whether its outputs may have other shapes than it declares, as those of Triton's Python models."""
    takes_messages: bool = False
    """Whether it takes and gives whole messages in a grps call: see `Call.exchange`."""
    description: Mapping[str, Any] | None = None
    """What its own configuration says of it, for grps' metadata; None: what it declares is said instead."""
    takes_parameters: bool = False
    """Whether it looks at `call.parameters`."""
    max_batch_size: int = 0
    """Largest first dim of the inputs, for every signature; 0: there is no batch dimension to check."""
    equal_shapes: Sequence[str] = ()
    """With `infer_batch`: inputs that have the same shape, but for the first dim, in all requests of a list."""
    instances: int = 1
    """How many threads call `infer` at the same time (plain functions and generators); with `execution` "process",
    how many processes there are."""
    max_queue_size: int | None = None
    """Requests that may wait; None: the server's `max_queue_size`."""
    dynamic_batching: DynamicBatching | None = None
    """How requests are joined into batches of up to `max_batch_size` rows; None: each is executed alone."""
    sequence_batching: SequenceBatching | None = None
    """How requests of a sequence find the same instance and its state; None: there are no sequences."""
    response_cache: bool = False
    """Whether equal requests may get an earlier one's answer, where the server has a cache: `infer` gives the same
    for the same inputs and parameters."""
    inputs_in_place: bool = False
    """Whether large inputs of floats that a client has in shared memory may be the client's own memory, without a
    copy. A client may change that at any time: `infer` keeps no input and no view of one when it answers, and does
    not sort by inputs, or find indices in them, without a copy; no thread holds the interpreter's lock while it
    waits for another one that reads them."""
    execution: str = "thread"
    """"thread"; "process": each instance is a process, for code that holds the interpreter's lock. An `async def`
    `infer` runs on the event loop, of the server or of the process."""
    cpus: Sequence[int] = ()
    """With `execution` "process": the CPUs that the instances run on, each on one of them in turn; none: any."""
    hang_seconds: float = 0.5
    """With `execution` "process": after so long without a sign of life a process is ended and replaced; 0: never.
    Only code that holds the interpreter's lock and neither computes nor waits for a disk gives none."""
    longest_run: float = 0.0
    """With `execution` "process": a call that runs longer, in seconds, counts as hung: its process is ended and
    replaced; 0: no limit. Of a stream it is the time to its next answer, without what its reader takes."""
    places_instances: bool = False
    """Whether it has put its instances on the devices of its configuration, and says how many `instances` these
    are."""
    holds_instances: bool = False
    """Whether a call of its `async def` code waits for one of its `instances`, and keeps others from it."""
    example: Mapping[str, Any] | Sequence[Mapping[str, Any]] = ()
    """Inputs by name, of one call or of several, which run on every instance before the model takes calls."""
    own_metrics: ModelMetrics | None = None
    """Metrics that its own code keeps, for the server's page."""
    own_batches: Mapping[str, BatchCounts] = MappingProxyType({})
    """The batches that each of several models in it forms by itself, by their names, for the same page."""
    model_config: ModelConfig = NO_CONFIG
    """What is configured: `model_config.parameters` are free settings, texts by name. Set before `load`."""
    platform: ClassVar[str] = "python"
    """What metadata calls the model's platform."""
    infer: Callable[..., Any]
    """`infer(self, inputs)` or `infer(self, inputs, call)`, see above."""
    infer_batch: Callable[..., Any] | None = None
    """`infer_batch(self, inputs, calls)`, for a model with `dynamic_batching` that takes a batch as a list: the
    inputs and the call of each request; shapes may differ, but for `equal_shapes`. It answers with a list, an item
    for each request, in their order: its outputs, or an exception that is this request's alone."""

    check_ready: Callable[[], bool] | None = None
    """Whether it is ready by what its own code knows; who asks for the model's readiness asks this, too. Called on
    a thread of its own, once at a time; what it raises means that it is not."""

    def load(self, folder: Path) -> None:
        """Called once, before the first `infer`, with the folder that holds the model's files."""

    def start_instance(self, call: Call) -> None:
        """Called once on each thread that is going to call `infer`, before the version takes calls; once, on any
        thread, for what runs on the event loop. `call` leads to other models. What it raises keeps the version
        from serving."""

    def change_instances(self, config: ModelConfig) -> tuple[int, int] | None:
        """Have the instances that a configuration says which differs in nothing else, without loading anew: how
        many threads are to come, and how many to go. None where the model has to be loaded for that. Blocks."""
        return None

    def end_instance(self) -> bool:
        """On a thread that calls `infer`, where some are to go: whether it is one of these, and then it is the end
        of its instance."""
        return True

    def close(self) -> None:
        """Called once, after the last `infer`."""
