"""ModelConfig, by gRPC and by REST (spec 1.3, 1.4, 3.7)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.dataplane.dataplane import DataPlane
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.extension import MODEL_PATHS
from triglot.protocols.kserve.openapi import CONFIG
from triglot.protocols.rows import Kind, Method, Route
from triglot.protocols.wire import parse_control, serialize
from triglot.repository.config.as_json import json_object
from triglot.repository.config.completed import completed


class ModelConfigs:
    """The complete configurations of ready models, including defaults."""

    names: Sequence[str] = ("model_configuration",)

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    async def model_config(self, request: pb.ModelConfigRequest, call: Call) -> pb.ModelConfigResponse:
        """Return a model's configuration.

        Raise `ModelNotFound`, `InvalidArgument` for a bad version, `Unavailable`.
        """
        loaded = self._dataplane.loaded_from(call.permission, request.name, request.version)
        config = await self._dataplane.off_loop(partial(completed, loaded))
        return pb.ModelConfigResponse(config=config)

    async def model_config_json(self, request: pb.ModelConfigRequest, call: Call) -> bytes:
        """As `model_config`, as JSON."""
        loaded = self._dataplane.loaded_from(call.permission, request.name, request.version)
        return await self._dataplane.off_loop(lambda: dumps(json_object(completed(loaded))))

    def methods(self) -> Sequence[Method]:
        decode = partial(parse_control, pb.ModelConfigRequest)
        return [Method("ModelConfig", Kind.UNARY, Operation.MODEL_CONFIG, decode, self.model_config, serialize)]

    def routes(self) -> Sequence[Route]:
        return [
            Route(
                "GET",
                path + "/config",
                Operation.MODEL_CONFIG,
                _decode,
                self.model_config_json,
                _encode,
                documented=(CONFIG,),
            )
            for path in MODEL_PATHS
        ]


def _decode(http: HttpRequest) -> pb.ModelConfigRequest:
    return pb.ModelConfigRequest(name=http.path["model"], version=http.path.get("version", ""))


def _encode(reply: bytes, _: Any) -> HttpResponse:
    return HttpResponse(reply)
