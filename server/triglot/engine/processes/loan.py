"""A process of a pool's, while it runs one call."""

from __future__ import annotations

from typing import Protocol

from triglot.core.call import Call
from triglot.engine.processes.owner import NotBegun
from triglot.engine.processes.process import Process


class Lender(Protocol):
    """A pool."""

    def lend(self, call: Call) -> Process:
        """A process for this call."""

    def take_back(self, process: Process) -> None:
        """The call has ended."""


class Loan:
    """A `with` block has the process. One that was lost before it got the call leaves the block, for another one
    to run it."""

    # What `contextlib` makes of a generator takes as long as to hand over small tensors.
    __slots__ = ("_call", "_lender", "_process")

    def __init__(self, lender: Lender, call: Call) -> None:
        self._lender = lender
        self._call = call

    def __enter__(self) -> Process:
        process = self._process = self._lender.lend(self._call)
        return process

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._lender.take_back(self._process)
        return kind is NotBegun
