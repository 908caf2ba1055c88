"""Runs the models of a grps project for one request (grps 6.4)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triglot.backends.grps.batching import DynamicBatcher, reason_to_skip
from triglot.backends.grps.context import GrpsContext
from triglot.backends.grps.settings import Batching
from triglot.backends.grps.tensor_converter import TensorConverter
from triglot.backends.grps.tensor_inferer import Declared, TensorInferer
from triglot.core.call import Call
from triglot.core.errors import Internal, ServingError
from triglot.core.statistics import BatchCounts
from triglot.telemetry.monitor import Monitor

log = logging.getLogger(__name__)

OOM_COUNT = "*gpu_oom_count"
OOM_TEXTS = ("CUDA out of memory", "OOM")


class Pool:
    """Limits the running requests of a project to `size`, over all its models, in FIFO order (grps 5.1,
    `max_concurrency`). Thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._turns: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def slots(self, calls: Sequence[Call]) -> Iterator[list[ServingError | None]]:
        """Wait until all of these requests, at most `size`, may run, and hold their slots in the block.

        Yield, per request, the error if it must not run since it was cancelled or timed out, else None.
        """
        for call in calls:
            call.batch_size = 0
        since = time.perf_counter()
        held = self._take(calls)
        try:
            skipped = [reason_to_skip(call, "a free instance") if call.cancelled else None for call in calls]
            running = [call for call, reason in zip(calls, skipped, strict=True) if reason is None]
            for call in running:
                call.execution_waited(since)
                call.batch_size = len(running)
            yield skipped
        finally:
            with self._changed:
                self._free += held
                self._changed.notify_all()

    def _take(self, calls: Sequence[Call]) -> int:
        """Wait for a slot per call and return their number; 0 once all of these calls are cancelled."""
        turn = object()
        with self._changed:
            self._turns.append(turn)
            try:
                while self._turns[0] is not turn or self._free < len(calls):
                    if all(call.cancelled for call in calls):
                        return 0
                    self._changed.wait(_longest(calls))
                self._free -= len(calls)
                return len(calls)
            finally:
                self._turns.remove(turn)
                self._changed.notify_all()


def _longest(calls: Sequence[Call]) -> float | None:
    """Return the seconds until the last deadline; None if a call has none."""
    remaining = [seconds for call in calls if (seconds := call.remaining) is not None]
    return max(remaining) if len(remaining) == len(calls) else None


class Failures:
    """Converts exceptions to errors for the callers, and counts those of a GPU without memory (grps 7)."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def explain(self, error: BaseException) -> ServingError:
        """Return INTERNAL with the exception's type and text, and log it; a `ServingError` unchanged."""
        if isinstance(error, ServingError):
            return error
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if any(sign in text for sign in OOM_TEXTS):
            self._monitor.add(OOM_COUNT, "inc", 1)
        log.error("the project's code failed", exc_info=error)
        return Internal(text)


class ModelRunner:
    """One entry of inference.yml: its inferer, and its converter if it has one, both loaded. Thread-safe."""

    def __init__(self, inferer: Any, converter: Any, batching: Batching | None, failures: Failures) -> None:
        self._inferer = inferer
        self._converter = converter
        self.batching = batching
        self._batcher = (
            DynamicBatcher(batching.max_batch_size, batching.timeout_us, self.run_batch, failures.explain)
            if batching is not None
            else None
        )

    @property
    def batches(self) -> BatchCounts | None:
        """Statistics of the batches formed here; None without a batcher."""
        return None if self._batcher is None else self._batcher.counts

    @property
    def declared(self) -> Declared:
        """Its declared inputs and outputs; empty if customized components determine them."""
        if not isinstance(self._inferer, TensorInferer) or type(self._inferer).infer is not TensorInferer.infer:
            return (), ()
        if self._converter is not None and not isinstance(self._converter, TensorConverter):
            return (), ()
        return self._inferer.declared() or ((), ())

    def run(self, message: Any, context: GrpsContext) -> Any:
        """Return the model's output for a GrpsMessage; None once the context has an error."""
        if self._batcher is not None:
            return self._batcher.infer(message, context)
        context.enter(self._inferer, self._converter)
        if self._converter is None:
            return self._inferer.infer(message, context)
        inp = self._converter.preprocess(message, context)
        if context.has_err():
            return None
        out = self._inferer.infer(inp, context)
        return None if context.has_err() else self._converter.postprocess(out, context)

    def run_batch(self, messages: list[Any], contexts: list[GrpsContext]) -> list[Any]:
        """Return an output per message, None where the model returned none.

        Requests without an error in their context still run if others have one. Raise the exceptions of the
        project's code, and `ValueError` for more outputs than messages.
        """
        for context in contexts:
            context.enter(self._inferer, self._converter)
        outputs = self._outputs(messages, contexts)
        outputs = [] if outputs is None else list(outputs)
        if len(outputs) > len(messages):
            raise ValueError(f"the batch has {len(outputs)} outputs, expected {len(messages)}, one per request")
        return [*outputs, *[None] * (len(messages) - len(outputs))]

    def _outputs(self, messages: list[Any], contexts: list[GrpsContext]) -> Any:
        if self._converter is None:
            return self._inferer.batch_infer(messages, contexts)
        inp = self._converter.batch_preprocess(messages, contexts)
        if all(context.has_err() for context in contexts):
            return None
        out = self._inferer.batch_infer(inp, contexts)
        if all(context.has_err() for context in contexts):
            return None
        return self._converter.batch_postprocess(out, contexts)


def run_in_sequence(runners: Sequence[ModelRunner], message: Any, context: GrpsContext) -> Any:
    """Run the models in sequence, each on its predecessor's output; None after an error or final response."""
    for runner in runners:
        message = runner.run(message, context)
        if context.has_err() or context.finished:
            return None
    return message
