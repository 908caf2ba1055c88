"""Sequences of requests: each finds the same instance, its place in the batch and its state (spec 5.2)."""

from __future__ import annotations

from triglot.engine.sequences.schedule import SequenceSchedule

__all__ = ["SequenceSchedule"]
