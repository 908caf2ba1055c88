"""TensorFlow Serving's batching parameters as `DynamicBatching` (tfs 6.5). Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from triglot.core.errors import InvalidArgument
from triglot.model.model import Model, is_decoupled, signatures_of
from triglot.model.scheduling import MAX_SECONDS, DynamicBatching
from triglot.model.signature import Signature, shape_text
from triglot.pb.tfserving.option_files_pb2 import BatchingParameters

PER_MODEL_FILE = "batching_params.pbtxt"
"""File with the parameters of one version, in its folder."""
MAX_BATCH_SIZE = 1000
MAX_ENQUEUED_BATCHES = 10
"""TensorFlow Serving's defaults."""
MAX_THREADS = 1000


@dataclass(frozen=True, slots=True)
class Parameters:
    """Batching of models, and their number of threads; 0: not given."""

    batching: DynamicBatching
    threads: int = 0


def parameters_of(message: BatchingParameters, source: str) -> Parameters:
    """Return a message's parameters. Raise `InvalidArgument`, which names the `source` and the field."""
    try:
        return Parameters(_batching(message), _number(message, "num_batch_threads", 0, 1, MAX_THREADS))
    except ValueError as error:
        raise InvalidArgument(f"{source}: {error}") from None


def _number(message: BatchingParameters, name: str, default: int, least: int, most: int = 2**31 - 1) -> int:
    number: int = getattr(message, name).value if message.HasField(name) else default
    if message.HasField(name) and not least <= number <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {number}")
    return number


def _batching(message: BatchingParameters) -> DynamicBatching:
    largest = _number(message, "max_batch_size", MAX_BATCH_SIZE, 1)
    timeout = _number(message, "batch_timeout_micros", 0, 0, 2**63 - 1)
    execution = _number(message, "max_execution_batch_size", largest, 1)
    splits = message.enable_large_batch_splitting.value
    if splits and execution > largest:
        raise ValueError(
            f"max_execution_batch_size: expected at most the max_batch_size {largest} with "
            f"enable_large_batch_splitting, got {execution}"
        )
    allowed = list(message.allowed_batch_sizes)
    if allowed:
        _check_allowed(allowed, largest, execution if splits else 0)
    return DynamicBatching(
        max_batch_size=largest,
        max_queue_delay=min(timeout / 1e6, MAX_SECONDS),
        max_waiting_batches=_number(message, "max_enqueued_batches", MAX_ENQUEUED_BATCHES, 1),
        allowed_sizes=allowed,
        max_execution_size=execution if splits else 0,
        pad_variable_lengths=message.pad_variable_length_inputs,
    )


def _check_allowed(allowed: list[int], largest: int, execution: int) -> None:
    if allowed[0] < 1 or any(size >= after for size, after in pairwise(allowed)):
        raise ValueError(f"allowed_batch_sizes: expected numbers from 1, each larger than the last, got {allowed}")
    if execution and allowed[-1] != execution:
        raise ValueError(
            "allowed_batch_sizes: Last entry in allowed_batch_sizes must be equal to max_execution_batch_size; "
            f"last entry was {allowed[-1]}; expected {execution}"
        )
    if not execution and allowed[-1] != largest:
        raise ValueError(
            "allowed_batch_sizes: Last entry in allowed_batch_sizes must match max_batch_size; last entry was "
            f"{allowed[-1]}; expected {largest}"
        )


# --- a model ---


def batch(model: Model, parameters: Parameters) -> list[str]:
    """Enable batching for a model, unless it configures its own. Return the reasons why requests are not batched.

    Signatures whose tensors do not all begin with a dim of any size run unbatched, as do models that return
    streams, or do not declare their tensors.
    """
    if model.dynamic_batching is not None or model.sequence_batching is not None:
        return []
    if reason := _model_reason(model):
        return [reason]
    signatures = signatures_of(model)
    notes = {name: note for name, signature in signatures.items() if (note := _signature_reason(signature))}
    joined = [name for name in signatures if name not in notes]
    if joined:
        own = _within(parameters.batching, model.max_batch_size)
        model.dynamic_batching = replace(own, signatures=joined if notes else ())
        # The author of Python code decides how many threads it supports.
        if parameters.threads and not model.places_instances and model.platform != "python":
            model.instances = parameters.threads
    return [f"signature {name!r}: {note}" for name, note in notes.items()]


def _model_reason(model: Model) -> str:
    """Return why none of this model's requests can be batched, or ""."""
    if is_decoupled(model.infer):
        return "the model returns streams"
    if model.any_tensors or model.takes_messages or model.speaks_json:
        return "the model does not declare its tensors"
    return ""


def _signature_reason(signature: Signature) -> str:
    """Return which of its tensors cannot be batched, or ""."""
    no_inputs = "" if signature.inputs else "the signature has no inputs"
    return next(_fixed("input", signature), "") or next(_fixed("output", signature), "") or no_inputs


def _fixed(kind: str, signature: Signature) -> Iterator[str]:
    for spec in signature.inputs if kind == "input" else signature.outputs:
        if spec.shape is not None and tuple(spec.shape[:1]) != (-1,):
            yield f"{kind} {spec.name!r} is {shape_text(spec.shape)}, expected -1 as its first dim"


def _within(batching: DynamicBatching, largest: int) -> DynamicBatching:
    """Return the batching for a model of at most `largest` rows; 0: any number."""
    if not largest or largest >= batching.max_batch_size:
        return batching
    execution = min(batching.max_execution_size, largest)
    last = execution or largest
    allowed = [*(size for size in batching.allowed_sizes if size < last), last] if batching.allowed_sizes else []
    return replace(batching, max_batch_size=largest, max_execution_size=execution, allowed_sizes=allowed)
