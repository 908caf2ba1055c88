"""Batching strategies of sequences: which requests of an instance are executed together, and when (spec 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, Protocol

from triglot.model.model import Model
from triglot.model.scheduling import DirectStrategy, OldestStrategy
from triglot.scheduling.forming import Reason
from triglot.scheduling.sequences.request import SequenceRequest

Rows = Sequence[SequenceRequest | None]
"""The rows of a batch; None is a row without a request."""


class Chosen(NamedTuple):
    """A batch, and why it was closed."""

    rows: Rows
    reason: Reason


class Strategy(Protocol):
    """Chooses batches."""

    rows: int
    """Number of sequences for which each instance has slots."""

    def choose(self, heads: Sequence[SequenceRequest], now: float) -> Chosen | float:
        """Return a batch of the instance's `heads`, at least one, oldest first; or the seconds to wait for more.

        After these seconds, or with `now` at infinity because no more requests will arrive, it returns a batch.
        """


Key = Callable[[SequenceRequest], object]
"""Return a value that is equal for requests that can share a batch."""


def strategy_of(model: Model, key: Key, *, unbatched: bool) -> Strategy:
    """Return the model's strategy; `unbatched`: each request is executed by itself."""
    batching = model.sequence_batching
    if batching is None:
        raise ValueError("sequence_batching: expected a SequenceBatching, got None")
    rows = max(1, model.max_batch_size)
    if isinstance(batching.strategy, OldestStrategy):
        candidates = batching.strategy.max_candidate_sequences or rows
        return Unbatched(candidates) if unbatched else Oldest(batching.strategy, key, rows, candidates)
    return Unbatched(rows) if unbatched else Direct(batching.strategy, key, rows)


def _with_equal_keys(heads: Sequence[SequenceRequest], key: Key) -> list[SequenceRequest]:
    """Return the first request and those that can share a batch with it."""
    if len(heads) == 1:
        return list(heads)
    first = key(heads[0])
    return [head for head in heads if key(head) == first]


class Unbatched:
    """Executes one request at a time."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def choose(self, heads: Sequence[SequenceRequest], now: float) -> Chosen | float:
        """See `Strategy`."""
        return Chosen(heads[:1], "alone")


class Direct:
    """Gives each sequence the same row in every batch; a batch extends to the highest row that is ready.

    The delay applies to batches that use less than `minimum_slot_utilization` of the rows.
    """

    def __init__(self, strategy: DirectStrategy, key: Key, rows: int) -> None:
        self.rows = rows
        self._key = key
        self._min_rows = rows * strategy.minimum_slot_utilization
        self._delay = strategy.max_queue_delay if strategy.minimum_slot_utilization else 0.0

    def choose(self, heads: Sequence[SequenceRequest], now: float) -> Chosen | float:
        """See `Strategy`."""
        chosen = _with_equal_keys(heads, self._key)
        left = heads[0].arrived + self._delay - now
        if self._delay and len(chosen) < self._min_rows and left > 0:
            return left
        places = {head.run.slot.row: head for head in chosen if head.run.slot is not None}
        reason = _reason_to_run(now, self._delay)
        if len(chosen) == self.rows:
            reason = "full"
        elif self._delay and len(chosen) >= self._min_rows:
            reason = "preferred"
        return Chosen([places.get(row) for row in range(max(places) + 1)], reason)


class Oldest:
    """Batches the oldest requests, one per sequence, as dynamic batching does (spec 5.1)."""

    def __init__(self, strategy: OldestStrategy, key: Key, max_rows: int, rows: int) -> None:
        self.rows = rows
        self._key = key
        self._max_rows = max_rows
        self._preferred = [size for size in strategy.preferred_sizes if size <= max_rows]
        self._delay = strategy.max_queue_delay

    def choose(self, heads: Sequence[SequenceRequest], now: float) -> Chosen | float:
        """See `Strategy`."""
        chosen = _with_equal_keys(heads, self._key)[: self._max_rows]
        reached = max([size for size in self._preferred if size <= len(chosen)], default=0)
        # Full, or every slot has a request in it: no more can be added.
        full = len(chosen) == self._max_rows or len(heads) == self.rows
        left = heads[0].arrived + self._delay - now
        if reached:
            return Chosen(chosen[:reached], "full" if full and reached == len(chosen) else "preferred")
        if self._delay and left > 0 and not full:
            return left
        return Chosen(chosen, "full" if full else _reason_to_run(now, self._delay))


def _reason_to_run(now: float, delay: float) -> Reason:
    if now == inf:
        return "drained"
    return "delay" if delay else "no_delay"
