"""ModelStatistics, by gRPC and by REST (spec 1.3, 3.12, 5.9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import EVERYTHING, Operation, Permission
from triglot.core.statistics import Duration, Responses, Statistics
from triglot.dataplane.control import STATISTICS, Arguments
from triglot.dataplane.dataplane import DataPlane
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve import openapi as api
from triglot.protocols.kserve.extension import MODEL_PATHS
from triglot.protocols.rows import Kind, Method, Route
from triglot.protocols.wire import parse_control, serialize
from triglot.repository.config.as_json import json_object
from triglot.repository.manager.plan import State
from triglot.scheduling.servable import Servable
from triglot.telemetry.merging import merged, values_by_key

Counters = dict[str, Any]
"""The fields of a `ModelStatistics`, without its name and version; batches by their size as a key."""
Report = Mapping[str, Mapping[str, Counters]]
"""Counters by model and version."""
PATHS = ("/v2/models/stats", *(f"{path}/stats" for path in MODEL_PATHS))


class ModelStatistics:
    """The statistics of every ready version since it was loaded."""

    names: Sequence[str] = ("statistics",)

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        dataplane.control.register_report(STATISTICS, self._report)

    async def statistics(self, request: pb.ModelStatisticsRequest, call: Call) -> pb.ModelStatisticsResponse:
        """Return the statistics of one version, of a model's versions, or of all models that the client may use.

        Raise `ModelNotFound`, `InvalidArgument` for a version that is not an integer and for a model without a
        ready version, and `Unavailable` for a version that is not ready while others are.
        """
        self._servables(call.permission, request.name, request.version)
        arguments = {"name": request.name, "version": request.version}
        reports = await self._dataplane.control.reports(STATISTICS, arguments)
        return statistics_message(reports.each, call.permission)

    async def _report(self, arguments: Arguments) -> Report:
        """Return this process's statistics; empty for a model that it does not have."""
        try:
            servables = self._servables(EVERYTHING, arguments["name"], arguments["version"])
        except ServingError:
            servables = []
        report: dict[str, dict[str, Counters]] = {}
        for servable in servables:
            report.setdefault(servable.name, {})[str(servable.version)] = _counters(servable.statistics)
        return report

    def _servables(self, permission: Permission, name: str, version: str) -> Sequence[Servable]:
        known = [version for version in self._dataplane.versions(permission) if name in ("", version.files.name)]
        serving = [
            version.servable for version in known if version.state is State.READY and version.servable is not None
        ]
        if name:
            if known and not serving:
                raise InvalidArgument(f"requested model '{name}' is not available")  # The text in spec 1.5.
            servable = self._dataplane.servable(permission, name, version)
            if version:
                return [servable]
        elif version and not version.isdecimal():
            raise InvalidArgument(f"'version': expected an integer, got '{version}'")
        return serving

    def methods(self) -> Sequence[Method]:
        decode = partial(parse_control, pb.ModelStatisticsRequest)
        return [Method("ModelStatistics", Kind.UNARY, Operation.STATISTICS, decode, self.statistics, serialize)]

    def routes(self) -> Sequence[Route]:
        return [
            Route(
                "GET", path, Operation.STATISTICS, _decode, self.statistics, _encode, documented=(api.STATISTICS,)
            )
            for path in PATHS
        ]


def _decode(http: HttpRequest) -> pb.ModelStatisticsRequest:
    return pb.ModelStatisticsRequest(name=http.path.get("model", ""), version=http.path.get("version", ""))


def _encode(reply: pb.ModelStatisticsResponse, _: Any) -> HttpResponse:
    """Encode the reply as JSON with every key, and integers as numbers: clients rely on both."""
    return HttpResponse(dumps(json_object(reply)))


def statistics_message(reports: Sequence[Report], permission: Permission) -> pb.ModelStatisticsResponse:
    """Return the sum of several processes' statistics of the models that a client may use."""
    response = pb.ModelStatisticsResponse()
    for name, versions in values_by_key(reports).items():
        for version, found in values_by_key(versions).items() if permission.covers(name) else ():
            counters = merged(found, {"last_inference": max})
            batches = sorted((int(size), batch) for size, batch in counters["batch_stats"].items())
            counters["batch_stats"] = [{"batch_size": size, **batch} for size, batch in batches]
            responses = counters.pop("response_stats")
            message = response.model_stats.add(name=name, version=version, **counters)
            for index, stats in responses.items():  # protobuf 4 takes no dict for these.
                message.response_stats[index].CopyFrom(pb.InferResponseStatistics(**stats))
    return response


def _counters(stats: Statistics) -> Counters:
    return {
        "last_inference": round(stats.last_inference * 1e3),
        "inference_count": stats.inference_count,
        "execution_count": stats.execution_count,
        "inference_stats": _inference_stats(stats),
        "batch_stats": {
            str(size): {
                "compute_input": _duration(executions.count, executions.input_seconds),
                "compute_infer": _duration(executions.count, executions.infer_seconds),
                "compute_output": _duration(executions.count, executions.output_seconds),
            }
            for size, executions in stats.batches.items()
        },
        "response_stats": {
            str(index): _response_stats(responses) for index, responses in sorted(stats.responses.items())
        },
    }


def _inference_stats(stats: Statistics) -> Counters:
    return {
        "success": _total(stats.success),
        "fail": _total(stats.fail),
        "queue": _duration(stats.success.count, stats.queue_seconds),
        "compute_input": _duration(stats.computed, stats.input_seconds),
        "compute_infer": _duration(stats.computed, stats.infer_seconds),
        "compute_output": _duration(stats.computed, stats.output_seconds),
        "cache_hit": _total(stats.hit),
        "cache_miss": _total(stats.miss),
    }


def _response_stats(responses: Responses) -> Counters:
    return {
        "compute_infer": _total(responses.infer),
        "compute_output": _total(responses.output),
        "success": _total(responses.success),
        "fail": _total(responses.fail),
        "empty_response": _total(responses.empty_response),
        "cancel": _total(responses.cancel),
    }


def _total(duration: Duration) -> Counters:
    return _duration(duration.count, duration.seconds)


def _duration(count: int, seconds: float) -> Counters:
    # From differences of clock readings, whose rounding may give less than 0.
    return {"count": count, "ns": max(0, round(seconds * 1e9))}
