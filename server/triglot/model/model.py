"""`Model`: the class that users and backends derive from."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from triglot.core.statistics import BatchCounts
from triglot.core.tensor import Array
from triglot.core.types import TensorSpec
from triglot.model.config import NO_CONFIG, ModelConfig
from triglot.model.metrics import ModelMetrics
from triglot.model.ray_options import RAY_DEFAULTS, RayOptions
from triglot.model.scheduling import DynamicBatching, SequenceBatching
from triglot.model.signature import DEFAULT_SIGNATURE, Signature

if TYPE_CHECKING:
    from triglot.core.call import Call


AUTO = "auto"
"""Value of `Model.instances` for as many as the queue needs."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether `function` is `async def`, and so runs on the event loop."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or class of the user's, without evaluating its annotations.

    Their names may exist for type checkers only, which Python allows without quotes since 3.14 (PEP 649). Raises
    as `inspect.signature`.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format  # noqa: PLC0415 - Older Pythons lack it.

        return inspect.signature(function, annotation_format=Format.STRING)  # noqa: TID251
    return inspect.signature(function)  # noqa: TID251


def kind_in_lists(equal_shapes: Sequence[str], inputs: Mapping[str, Array]) -> Hashable:
    """Return a key that is equal for requests that may share a list: the input names, and the shapes of some."""
    return frozenset((name, array.shape[1:] if name in equal_shapes else ()) for name, array in inputs.items())


def is_decoupled(infer: Callable[..., Any]) -> bool:
    """Whether `infer` is a generator that yields responses."""
    return inspect.isgeneratorfunction(infer) or inspect.isasyncgenfunction(infer)


class Model:
    """A model: named tensors in, named tensors out. Usable without a server.

    Write `infer(self, inputs)` or `infer(self, inputs, call)`. `inputs` maps each input's name to a read-only
    array, a view of the request's own bytes; the response maps each output's name to an array. Or declare inputs
    and outputs by tensor types: `infer(self, x: Float32[-1, 16]) -> Float32[-1]`, with `call`, too, if wanted.

    - A plain function runs on the model's own threads, one per instance, or in processes with `execution`
      "process".
    - An `async def` function runs on the event loop and must not block it.
    - A generator (plain or async) yields any number of responses: the model is *decoupled*.

    A `ServingError` that `infer` raises reaches the client unchanged; any other exception becomes INTERNAL with
    a fixed text, and its traceback is logged.
    """

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    signatures: Mapping[str, Signature] = {}
    """Further signatures by name; `inputs` and `outputs` form the one named "serving_default".
    `call.signature_name` is the requested one."""
    columns: Sequence[TensorSpec] = ()
    """The columns of the table that it takes, where it knows their names: they are inputs, too, whatever else is
    declared."""
    unnamed: TensorSpec | None = None
    """What a tensor without a name is, where the inputs are columns: the matrix of all."""
    signature_defs: Mapping[str, bytes] = {}
    """Serialized `tensorflow.SignatureDef`s of the model file, returned in TensorFlow Serving's metadata."""
    speaks_json: bool = False
    """Whether it takes and returns JSON: inputs `instances`, one text each, and `parameters`, one text that is an
    object; output `predictions`, one text. All are BYTES."""
    speaks_http: bool = False
    """Whether it takes and returns whole HTTP messages by its signature `http`: inputs `body` and `headers`,
    outputs `body`, `headers` and `status`, of one element each. `headers` is a JSON object, with names in lower
    case, `status` an INT32; all others are BYTES."""
    any_tensors: bool = False
    """Whether it accepts inputs of any names, datatypes and shapes, and returns such outputs; what it declares is
    only for clients to read."""
    any_inputs: bool = False
    """Whether it also accepts inputs of other names, datatypes and shapes than declared, and checks them itself.
    Among them is `instances`, the JSON of each row."""
    any_output_shapes: bool = False
    """Whether its outputs may have other shapes than declared, as in Triton and TensorFlow Serving, where those of
    the results count."""
    unservable_outputs: Mapping[str, str] = MappingProxyType({})
    """Why other outputs of its file cannot be returned, by name."""
    labels: Mapping[str, Sequence[bytes]] = MappingProxyType({})
    """Class labels by output, for classification; label files of the configuration replace them."""
    takes_messages: bool = False
    """Whether it takes and returns whole messages in a grps call, see `Call.exchange`."""
    description: Mapping[str, Any] | None = None
    """Its own description for grps' metadata; None: the declared inputs and outputs are returned instead."""
    takes_arguments: bool = False
    """Whether `infer` takes each input as an argument of its name, as its tensor types say."""
    takes_parameters: bool = False
    """Whether it reads `call.parameters`."""
    max_batch_size: int = 0
    """Largest first dim of the inputs, for every signature; 0: no batch dim is checked."""
    equal_shapes: Sequence[str] = ()
    """With `infer_batch`: inputs whose shapes must be equal, except for the first dim, in all requests of a
    list."""
    instances: Any = 1
    """Number of threads that call `infer` concurrently (plain functions and generators); with `execution`
    "process" or "ray", number of processes or actors. "auto", with "ray" only: as many as the queue needs, from
    `ray.min_instances` to `ray.max_instances`."""
    max_queue_size: int | None = None
    """Limit on queued requests; None: the server's `max_queue_size`."""
    dynamic_batching: DynamicBatching | None = None
    """How requests are combined into batches of up to `max_batch_size` rows; None: each is executed alone."""
    sequence_batching: SequenceBatching | None = None
    """How the requests of a sequence reach the same instance and its state; None: no sequences."""
    response_cache: bool = False
    """Whether equal requests may be answered from the server's response cache: `infer` must return the same for
    the same inputs and parameters."""
    inputs_in_place: bool = False
    """Whether large float inputs in a client's shared memory are passed as views of that memory, without a copy. A
    client may change it at any time: `infer` must not keep an input or a view of one after it returns, and must
    not sort by inputs, or search indices in them, without a copy; no thread may hold the interpreter's lock while
    it waits for another thread that reads them."""
    execution: str = "thread"
    """"thread"; "process": each instance is a process, for code that holds the interpreter's lock; "ray": each is
    an actor of a Ray cluster. An `async def` `infer` runs on the event loop of the server, the process or the
    actor."""
    ray: RayOptions = RAY_DEFAULTS
    """Options for `execution` "ray"."""
    cpus: Sequence[int] = ()
    """With `execution` "process": CPUs that the instances are pinned to, one each in round-robin order; empty:
    any."""
    hang_seconds: float = 0.5
    """With `execution` "process": seconds without a heartbeat after which a process is killed and replaced; 0:
    never. Only code that holds the interpreter's lock and neither computes nor waits for a disk stops the
    heartbeat."""
    longest_run: float = 0.0
    """With `execution` "process": seconds after which a running call counts as hung, and its process is killed and
    replaced; 0: no limit. For a stream this is the time to its next response, without the time its reader
    takes."""
    idempotent: bool = False
    """With `execution` "process" or "ray": whether a call may run again on another instance if the one that ran it
    is lost before it has responded, three times in total; not in a sequence."""
    places_instances: bool = False
    """Whether it has placed its instances on the configured devices, and set `instances` to their number."""
    holds_instances: bool = False
    """Whether a call of its `async def` code waits for one of its `instances` and occupies it."""
    example: Mapping[str, Any] | Sequence[Mapping[str, Any]] = ()
    """Inputs by name, of one call or several, that every instance runs before the model takes calls. Clients that
    may see the model are shown the first one as a sample."""
    warnings: Sequence[str] = ()
    """What is wrong with the loaded model although it serves: logged, and the reason of its state in
    RepositoryIndex and GetModelStatus."""
    unservable_signatures: Mapping[str, str] = {}
    """Signatures of its file that cannot be called, and why; a call of one is answered with the reason."""
    own_metrics: ModelMetrics | None = None
    """Custom metrics of its own code, for the server's metrics page."""
    own_batches: Mapping[str, BatchCounts] = MappingProxyType({})
    """Statistics of the batches that models inside it form themselves, by the names of these, for the same
    page."""
    model_config: ModelConfig = NO_CONFIG
    """The configuration; `model_config.parameters` are free settings, texts by name. Set before `load`."""
    platform: ClassVar[str] = "python"
    """The model's platform in metadata."""
    infer: Callable[..., Any]
    """`infer(self, inputs)` or `infer(self, inputs, call)`, see the class docstring."""
    infer_batch: Callable[..., Any] | None = None
    """`infer_batch(self, inputs, calls)`, for a model with `dynamic_batching` that takes a batch as a list: the
    inputs and the call of each request; shapes may differ, except for `equal_shapes`. It returns a list with an
    item per request, in the same order: its outputs, or an exception for this request alone."""

    check_ready: Callable[[], bool] | None = None
    """Optional readiness check of its own code; the readiness of the model depends on it, too. Called on a
    separate thread, one call at a time; an exception means not ready."""

    def load(self, folder: Path) -> None:
        """Load the model; called once, before the first `infer`. `folder` holds the model's files."""

    def start_instance(self, call: Call) -> None:
        """Prepare a thread that will call `infer`; called once on each, before the version takes calls.

        For code on the event loop, once on any thread. `call` can call other models. An exception makes the
        version fail to load.
        """

    def change_instances(self, config: ModelConfig) -> tuple[int, int] | None:
        """Apply a configuration that differs only in its instances, without a reload. Blocks.

        Return how many threads to add and how many to remove; None if the model has to be reloaded for that.
        """
        return None

    def queued_requests(self) -> int:
        """Return how many requests wait in a queue of the model's own, beside the server's."""
        return 0

    def end_instance(self) -> bool:
        """Leave a thread that calls `infer`, while instances are removed.

        Return whether this thread is to end, and if so ends its instance.
        """
        return True

    def close(self) -> None:
        """Release what the model holds; called once, after the last `infer`."""


def signatures_of(model: Model) -> dict[str, Signature]:
    """Return a model's signatures by name; `inputs` and `outputs` are included as `DEFAULT_SIGNATURE`.

    Sequence controls and implicit states are excluded: no client sends or receives them.
    Raise `ValueError` as `Signature` does, and when the default signature is declared twice.
    """
    declared = dict(model.signatures)
    for name, signature in declared.items():
        if not isinstance(signature, Signature):
            raise ValueError(f"signatures: {name!r}: expected a Signature, got {signature!r}")
    if model.any_tensors:
        own = Signature(tuple(model.inputs), tuple(model.outputs), any_tensors=True, any_inputs=model.any_inputs)
        return {DEFAULT_SIGNATURE: own}
    if model.inputs or model.outputs or not declared:
        if DEFAULT_SIGNATURE in declared:
            raise ValueError(f"signatures: {DEFAULT_SIGNATURE!r} is already declared by inputs and outputs")
        own = Signature(
            tuple(model.inputs), tuple(model.outputs), unservable_outputs=dict(model.unservable_outputs)
        )
        declared = {DEFAULT_SIGNATURE: own, **declared}
    return {
        name: _without_own(
            replace(
                signature,
                max_batch_size=model.max_batch_size,
                any_inputs=model.any_inputs,
                unnamed=model.unnamed,
            ),
            model.sequence_batching,
        )
        for name, signature in declared.items()
    }


def _without_own(signature: Signature, sequences: object) -> Signature:
    """Return the signature without sequence controls and implicit states (spec 5.2)."""
    if not isinstance(sequences, SequenceBatching):
        return signature
    inputs = {control.name for control in sequences.controls} | {state.input_name for state in sequences.states}
    outputs = {state.output_name for state in sequences.states if not state.returned}
    return replace(
        signature,
        inputs=[spec for spec in signature.inputs if spec.name not in inputs],
        outputs=[spec for spec in signature.outputs if spec.name not in outputs],
        defaults={name: value for name, value in signature.defaults.items() if name not in inputs},
    )
