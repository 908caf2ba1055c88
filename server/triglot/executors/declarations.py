"""Checks what a model's class declares about its execution."""

from __future__ import annotations

import logging

from triglot.executors.hosted import HostedModel
from triglot.executors.work import takes_call
from triglot.model.model import AUTO, Model, signature_of
from triglot.model.scheduling import DynamicBatching
from triglot.model.scheduling_rules import check_scheduling

log = logging.getLogger(__name__)

MAX_BATCH_SIZE = 2**31 - 1
"""Largest `max_batch_size` that a configuration can hold and every client can read."""


def check_declarations(model: Model) -> None:
    """Check the attributes of a model's class, and warn of missing or ineffective ones.

    Raise `ValueError` for invalid ones.
    """
    for kind in () if model.signatures or model.any_tensors else ("inputs", "outputs"):
        if not getattr(model, kind):
            log.warning("class %s declares no %s", type(model).__name__, kind)
    for name, least in (("max_batch_size", 0), ("instances", 1), ("max_queue_size", 1)):
        value = getattr(model, name)
        if name == "max_queue_size" and value is None:
            continue
        if name == "instances" and value == AUTO:
            raise ValueError(f"instances: expected an integer without execution 'ray', got {value!r}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}: expected an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
        if name == "max_batch_size" and value > MAX_BATCH_SIZE:
            raise ValueError(f"{name}: expected at most {MAX_BATCH_SIZE}, got {value}")
    if model.infer_batch is not None:
        _check_infer_batch(model.infer_batch)
    check_scheduling(model)
    if _joins_nothing(model):
        log.warning(
            "class %s: dynamic_batching: ignored without max_batch_size; requests run one by one",
            type(model).__name__,
        )


def _joins_nothing(model: Model) -> bool:
    """Return whether its `dynamic_batching` has no effect, neither on batches nor on how requests are queued."""
    batching = model.dynamic_batching
    if batching is None or model.max_batch_size or batching.max_batch_size or model.infer_batch is not None:
        return False
    return batching == DynamicBatching(max_queue_delay=batching.max_queue_delay)


def _check_infer_batch(infer_batch: object) -> None:
    what = "infer_batch: expected infer_batch(self, inputs, calls), got"
    if not callable(infer_batch):
        raise ValueError(f"{what} {infer_batch!r}")
    signature = signature_of(infer_batch)
    try:
        signature.bind((), ())
    except TypeError:
        raise ValueError(f"{what} infer_batch{signature}") from None


def looks_at_call(model: Model) -> bool:
    """Return whether the model's own code gets the call. Raise as `takes_call`."""
    return model.looks_at_call if isinstance(model, HostedModel) else takes_call(model)
