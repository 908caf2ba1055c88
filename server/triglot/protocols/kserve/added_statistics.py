"""Sums the ModelStatistics of several workers (spec 3.12)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from triglot.pb.kserve import inference_pb2 as pb

LATEST = "last_inference"


def merged(replies: Iterable[pb.ModelStatisticsResponse]) -> pb.ModelStatisticsResponse:
    """Returns one entry per version, in the order of the first reply that has it."""
    found: dict[tuple[str, str], pb.ModelStatistics] = {}
    for reply in replies:
        for stats in reply.model_stats:
            total = found.get((stats.name, stats.version))
            if total is None:
                found[stats.name, stats.version] = stats
            else:
                _add(total, stats)
    return pb.ModelStatisticsResponse(model_stats=found.values())


def _add(total: pb.ModelStatistics, other: pb.ModelStatistics) -> None:
    total.last_inference = max(total.last_inference, other.last_inference)
    total.inference_count += other.inference_count
    total.execution_count += other.execution_count
    _add_numbers(total.inference_stats, other.inference_stats)
    batches: dict[int, pb.InferBatchStatistics] = {}
    for batch in (*total.batch_stats, *other.batch_stats):
        size = batch.batch_size
        _add_numbers(batches.setdefault(size, pb.InferBatchStatistics(batch_size=size)), batch)
    del total.batch_stats[:]
    total.batch_stats.extend(batches[size] for size in sorted(batches))
    for index, responses in other.response_stats.items():
        _add_numbers(total.response_stats[index], responses)


def _add_numbers(total: Any, other: Any) -> None:
    """Add all numbers of a message and of its submessages, except `batch_size`, which is a key."""
    for field in total.DESCRIPTOR.fields:
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if other.HasField(field.name):
                _add_numbers(getattr(total, field.name), getattr(other, field.name))
        elif field.name != "batch_size":
            setattr(total, field.name, getattr(total, field.name) + getattr(other, field.name))
