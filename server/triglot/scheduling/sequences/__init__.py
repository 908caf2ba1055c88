"""Sequence batching: all requests of a sequence reach the same instance, batch slot and state (spec 5.2).

As in Triton, the clients of a model share one namespace of sequence ids: a request with the id of another client's
sequence continues, restarts or ends it.
"""

from __future__ import annotations

from triglot.scheduling.sequences.schedule import SequenceSchedule

__all__ = ["SequenceSchedule"]
