"""What a grps project's models do with one request (grps 6.4)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triglot.backends.grps.batching import DynamicBatcher, reason_to_skip
from triglot.backends.grps.context import GrpsContext
from triglot.backends.grps.settings import Batching
from triglot.core.errors import DeadlineExceeded, Internal, ServingError
from triglot.core.monitor import Monitor
from triglot.core.types import Call

log = logging.getLogger(__name__)

OOM_COUNT = "*gpu_oom_count"
OOM_TEXTS = ("CUDA out of memory", "OOM")


class Pool:
    """Lets `size` requests run at a time, over all models of a project (grps 5.1, `max_concurrency`)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots = threading.BoundedSemaphore(size)

    @contextmanager
    def slot(self, call: Call) -> Iterator[None]:
        """Wait for a turn and keep it. Raises `DeadlineExceeded` or `Cancelled` when nobody waits any more."""
        call.batch_size = 0
        since = time.perf_counter()
        if not self._slots.acquire(timeout=call.remaining):
            raise DeadlineExceeded("the deadline passed while the request waited for its turn")
        try:
            if call.cancelled:
                raise reason_to_skip(call, "its turn")
            call.waited(since)
            call.batch_size = 1
            yield
        finally:
            self._slots.release()


class Failures:
    """Says what callers are told of exceptions, and counts those of a GPU without memory (grps 7)."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def explain(self, error: BaseException) -> ServingError:
        """INTERNAL with the exception's type and text, its trace goes to the log; a `ServingError` as it is."""
        if isinstance(error, ServingError):
            return error
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if any(sign in text for sign in OOM_TEXTS):
            self._monitor.add(OOM_COUNT, "inc", 1)
        log.error("the project's code failed", exc_info=error)
        return Internal(text)


class ModelRunner:
    """One entry of inference.yml: its inferer, and its converter if it has one, both loaded."""

    def __init__(self, inferer: Any, converter: Any, batching: Batching | None, failures: Failures) -> None:
        self._inferer = inferer
        self._converter = converter
        self._batcher = (
            DynamicBatcher(batching.max_batch_size, batching.timeout_us, self._run_batch, failures.explain)
            if batching is not None
            else None
        )

    def run(self, message: Any, context: GrpsContext) -> Any:
        """What the model makes of a GrpsMessage; None once the context has an error."""
        context.enter(self._inferer, self._converter)
        if self._batcher is not None:
            return self._batcher.infer(message, context)
        if self._converter is None:
            return self._inferer.infer(message, context)
        inp = self._converter.preprocess(message, context)
        if context.has_err():
            return None
        out = self._inferer.infer(inp, context)
        return None if context.has_err() else self._converter.postprocess(out, context)

    def _run_batch(self, messages: list[Any], contexts: list[GrpsContext]) -> Any:
        """The outputs for some messages; an error of some contexts keeps none of the others from running."""
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
    """What each model makes of what the one before made; None after an error or the final answer."""
    for runner in runners:
        message = runner.run(message, context)
        if context.has_err() or context.finished:
            return None
    return message
