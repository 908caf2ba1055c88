"""Sums the ModelStatistics of several workers (spec 3.12)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from triglot.pb.kserve import inference_pb2 as pb

LATEST = "last_inference"


def merged(replies: Iterable[pb.ModelStatisticsResponse]) -> pb.ModelStatisticsResponse:
    """Return one entry per version, in the order of the first reply that has it."""
    found: dict[tuple[str, str], pb.ModelStatistics] = {}
    for reply in replies:
        for stats in reply.model_stats:
            there = found.get((stats.name, stats.version))
            if there is None:
                found[stats.name, stats.version] = stats
            else:
                _add(there, stats)
    return pb.ModelStatisticsResponse(model_stats=found.values())


def _add(there: pb.ModelStatistics, more: pb.ModelStatistics) -> None:
    there.last_inference = max(there.last_inference, more.last_inference)
    there.inference_count += more.inference_count
    there.execution_count += more.execution_count
    _add_numbers(there.inference_stats, more.inference_stats)
    batches: dict[int, pb.InferBatchStatistics] = {}
    for batch in (*there.batch_stats, *more.batch_stats):
        size = batch.batch_size
        _add_numbers(batches.setdefault(size, pb.InferBatchStatistics(batch_size=size)), batch)
    del there.batch_stats[:]
    there.batch_stats.extend(batches[size] for size in sorted(batches))
    for index, responses in more.response_stats.items():
        _add_numbers(there.response_stats[index], responses)


def _add_numbers(there: Any, more: Any) -> None:
    """Add all numbers of a message and of its submessages, except `batch_size`, which is a key."""
    for field in there.DESCRIPTOR.fields:
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if more.HasField(field.name):
                _add_numbers(getattr(there, field.name), getattr(more, field.name))
        elif field.name != "batch_size":
            setattr(there, field.name, getattr(there, field.name) + getattr(more, field.name))
