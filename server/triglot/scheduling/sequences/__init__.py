"""Sequences of requests: each finds the same instance, its place in the batch and its state (spec 5.2).

As in Triton, the clients of a model share one namespace of sequence ids: a request with the id of another client's
sequence goes on with that, starts it anew or ends it.
"""

from __future__ import annotations

from triglot.scheduling.sequences.schedule import SequenceSchedule

__all__ = ["SequenceSchedule"]
