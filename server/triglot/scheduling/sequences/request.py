"""A request of a sequence, and the sequence itself: values shared by the table and the batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from triglot.core.errors import ServingError
from triglot.core.request_scheduling import Scheduling
from triglot.core.tensor import Array
from triglot.executors.work import Inputs, Work


class Slot(NamedTuple):
    """A place for a sequence: a row of an instance. Free slots with the lowest row are used first."""

    row: int
    instance: int


@dataclass(slots=True, eq=False)
class SequenceRequest:
    """A request of a sequence.

    `arrived` is an instant of the schedule's clock, in seconds. `shapes` is equal for requests that can share a
    batch. `executed`: the model has received it. `lost`: the sequence ended while it ran, because its instance
    was lost.
    """

    work: Work
    run: SequenceRun
    scheduling: Scheduling
    arrived: float
    inputs: Inputs
    shapes: object
    executed: bool = False
    lost: bool = False

    @property
    def start(self) -> bool:
        """Whether it starts its sequence."""
        return self.scheduling.sequence_start

    @property
    def end(self) -> bool:
        """Whether it ends its sequence."""
        return self.scheduling.sequence_end

    def respond(self, answer: Any) -> None:
        """Set or send the model's response to it. On the instance's thread."""
        if self.work.buffer is not None:
            if answer is not None:
                self.work.call.respond(answer)
            self.work.call.finish()
        else:
            self.work.result = answer

    def set_error(self, error: ServingError) -> None:
        """End it with an error. On any thread."""
        self.work.refuse(error)

    def fail(self, error: ServingError) -> None:
        """End it with an error and deliver it: it will not be executed. On the event loop."""
        self.set_error(error)
        self.work.deliver()


@dataclass(slots=True, eq=False)
class SequenceRun:
    """A sequence, or several with the same id one after the other, never at the same time.

    `pending` requests are queued, and one more may be `running`. `slot` is None in the backlog. `open`: accepts
    requests without START, since the last one had no END. `begun`: an instance has received its START.
    `states`: the model's implicit state by input name, empty at the beginning. `expires`: the end of its time
    in the backlog.
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
        """Whether no request of it is queued or running."""
        return not self.pending and self.running is None
