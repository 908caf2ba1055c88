"""A thread pool for the event loop that a test controls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from request_served import POOL

from process import SECONDS


class Pool(ThreadPoolExecutor):
    """The event loop's default executor; one of the submitted jobs can be held before it begins."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix=POOL)
        self.holds = False
        """Whether the job to hold was submitted."""
        self._jobs_before = -1
        self._go = threading.Event()

    def hold(self, number: int) -> None:
        """Hold the job of this number, counted from 1 with the next one submitted."""
        self._jobs_before, self.holds = number - 1, False
        self._go.clear()

    def release(self) -> None:
        """Let the held job begin, and hold no further one."""
        self._jobs_before, self.holds = -1, False
        self._go.set()

    def submit(self, job: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """See the base class."""
        self._jobs_before -= 1
        if self._jobs_before != -1:
            self._jobs_before = max(self._jobs_before, -2)
            return super().submit(job, *arguments, **named)
        self.holds = True
        return super().submit(self._held, partial(job, *arguments, **named))

    def _held(self, job: Callable[[], Any]) -> Any:
        assert self._go.wait(SECONDS)
        return job()
