"""A request of a sequence, and the sequence itself: plain values that the table and the batches share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from triglot.core.errors import ServingError
from triglot.core.request_scheduling import Scheduling
from triglot.core.tensor import Array
from triglot.executors.stream import Stream
from triglot.executors.work import Execution, Inputs

SequenceWork = Execution | Stream
"""What can be a request of a sequence."""


class Slot(NamedTuple):
    """A place for a sequence: those with the lowest row, over all instances, are given away first."""

    row: int
    instance: int


@dataclass(slots=True, eq=False)
class SequenceRequest:
    """What waits for its turn in its sequence.

    `arrived` is an instant of the schedule's clock, `shapes` what two requests of one batch have in common.
    `executed`: the model has met it. `lost`: its sequence ended while it ran, with what the instance knew of it.
    """

    work: SequenceWork
    run: SequenceRun
    scheduling: Scheduling
    arrived: float
    inputs: Inputs
    shapes: object
    executed: bool = False
    lost: bool = False

    @property
    def start(self) -> bool:
        """Whether its sequence begins with it."""
        return self.scheduling.sequence_start

    @property
    def end(self) -> bool:
        """Whether its sequence ends with it."""
        return self.scheduling.sequence_end

    def give(self, answer: Any) -> None:
        """On the instance's thread: what the model answered to it."""
        if isinstance(self.work, Stream):
            if answer is not None:
                self.work.call.respond(answer)
            self.work.call.finish()
        else:
            self.work.result = answer

    def give_error(self, error: ServingError) -> None:
        """On any thread: it ends with this error."""
        if isinstance(self.work, Stream):
            self.work.refuse(error)
        else:
            self.work.failure = error

    def fail(self, error: ServingError) -> None:
        """On the loop: it will not be executed."""
        self.give_error(error)
        self.work.deliver()


@dataclass(slots=True, eq=False)
class SequenceRun:
    """One sequence, or several with the same id one after the other; never two at a time.

    `pending` requests wait, and one more may be `running`. `slot` is None in the backlog. `open`: takes requests
    without START, since its last one had no END. `begun`: an instance has had its START. `states` are the model's
    by input name, empty at the beginning. `expires`: the end of its time in the backlog.
    """

    id: int | str
    pending: deque[SequenceRequest] = field(default_factory=deque)
    running: SequenceRequest | None = None
    slot: Slot | None = None
    open: bool = True
    begun: bool = False
    states: dict[str, Array] = field(default_factory=dict)
    expires: float = float("inf")

    @property
    def idle(self) -> bool:
        """Whether nothing of it waits or runs."""
        return not self.pending and self.running is None
