"""Every call that there is, taken from the rows, for a model of any name: what it asks, and what is answered."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import grpc.aio
from google.protobuf import json_format, message_factory

from tests.state_changes import BODIES, Change, change_of
from triglot.pb import service as service_descriptor
from triglot.protocols.rows import Kind, Method, Route, Service

NAME = "half"
"""In a request, where the model's name is to be."""
X = {"name": "x", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1.0]}}
SPEC = {"name": NAME}
GRPS_TENSOR = {"name": "x", "dtype": "DT_FLOAT32", "shape": [1], "flat_float32": [1.0]}
GRPS = {"model": f"{NAME}-1", "gtensors": {"tensors": [GRPS_TENSOR]}}
TASKS = [{"model_spec": SPEC, "method_name": "tensorflow/serving/classify"}]
EXAMPLES: dict[str, Any] = {"example_list": {"examples": [{}]}}
RAW = {
    "endpoint": f"projects/p/locations/l/endpoints/{NAME}",
    "http_body": {"data": base64.b64encode(b'{"instances": [1.0]}').decode()},
}
NOTHING: list[dict[str, Any]] = [{}]
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "ServerLive": NOTHING,
    "ServerReady": NOTHING,
    "ServerMetadata": NOTHING,
    "ModelReady": [{"name": NAME}, {"name": NAME, "version": "1"}],
    "ModelMetadata": [{"name": NAME}, {"name": NAME, "version": "1"}],
    "ModelConfig": [{"name": NAME}],
    "ModelStatistics": [{}, {"name": NAME}, {"name": NAME, "version": "1"}],
    "ModelInfer": [{"model_name": NAME, "inputs": [X]}],
    "ModelStreamInfer": [{"model_name": NAME, "inputs": [X]}],
    "RepositoryIndex": [{}, {"ready": True}],
    "RepositoryModelLoad": [{"model_name": NAME}, {"repository_name": NAME}],
    "RepositoryModelUnload": [{"model_name": NAME}],
    "GetTraffic": [{"model_name": NAME}],
    "SetTraffic": [{"model_name": NAME, "reset": True}],
    "TraceSetting": [
        {},
        {"model_name": NAME},
        {"model_name": NAME, "settings": {"trace_rate": {"value": ["9"]}}},
        {"settings": {"trace_rate": {"value": ["9"]}}},
    ],
    "LogSettings": [{}, {"settings": {"log_info": {"bool_param": False}}}],
    "SystemSharedMemoryStatus": NOTHING,
    "SystemSharedMemoryRegister": [{"name": "r", "key": "/none", "byte_size": 8}],
    "SystemSharedMemoryUnregister": NOTHING,
    "CudaSharedMemoryStatus": NOTHING,
    "CudaSharedMemoryRegister": [{"name": "r"}],
    "CudaSharedMemoryUnregister": NOTHING,
    "Classify": [{"model_spec": SPEC, "input": EXAMPLES}],
    "Regress": [{"model_spec": SPEC, "input": EXAMPLES}],
    "MultiInference": [{"tasks": TASKS, "input": EXAMPLES}],
    "GetModelMetadata": [{"model_spec": SPEC, "metadata_field": ["signature_def"]}],
    "GetModelStatus": [{"model_spec": SPEC}, {"model_spec": SPEC | {"version": 1}}],
    "HandleReloadConfigRequest": [{"config": {"model_config_list": {}}}],
    "PredictStreaming": [GRPS],
    "RawPredict": [RAW],
    "StreamRawPredict": [RAW],
    "Online": NOTHING,
    "Offline": NOTHING,
    "CheckLiveness": NOTHING,
    "CheckReadiness": NOTHING,
    "Check": [{}, {"service": NAME}],
    "List": NOTHING,
    "Watch": [{"service": NAME}],
    "ServerReflectionInfo": [{"list_services": ""}],
}
"""By the method's name; of those that several services have, by the whole name."""
OF_SERVICES: dict[str, list[dict[str, Any]]] = {
    "tensorflow.serving.PredictionService/Predict": [
        {
            "model_spec": spec,
            "inputs": {"x": {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": 1}]}, "float_val": [1.0]}},
        }
        for spec in (SPEC, SPEC | {"version": 1}, SPEC | {"version_label": "stable"}, SPEC | {"version_label": ""})
    ],
    "google.cloud.aiplatform.v1.PredictionService/Predict": [
        {"endpoint": f"projects/p/locations/l/endpoints/{NAME}", "instances": [1.0]}
    ],
    "grps.protos.v1.GrpsService/Predict": [GRPS, GRPS | {"model": NAME}, GRPS | {"model": f"{NAME}-stable"}],
    "grps.protos.v1.GrpsService/ServerMetadata": NOTHING,
    "grps.protos.v1.GrpsService/ModelMetadata": [{"str_data": NAME}, {"str_data": f"{NAME}-1"}],
}
PATHS = (
    *("GET /v1/models", "GET /v1/models/half/metadata", "GET /v1/models/half/versions/1"),
    *("GET /v1/models/half/labels/stable", "GET /grps/v1/monitor/model?name=half"),
    "GET /grps/v1/monitor/model?name=half&version=1",
)
"""More than the rows' own paths tell."""
BODIES_OF: list[tuple[str, Any]] = [
    ("POST /grps/v1/metadata/model", {"str_data": NAME}),
    ("POST /grps/v1/metadata/model", {"str_data": f"{NAME}-1"}),
    ("POST /grps/v1/infer/predict", {"model": NAME, "ndarray": [1.0]}),
    ("POST /grps/v1/infer/predict?model=half-1", {"ndarray": [1.0]}),
    ("POST /grps/v1/infer/predict?streaming=true", {"model": f"{NAME}-1", "ndarray": [1.0]}),
]
"""The same with a body."""
OF_ALL_MODELS = {
    *("/metrics", "/tf/metrics", "/grps/v1/monitor/series", "/grps/v1/monitor/overview"),
    *("/grps/v1/health/online", "/grps/v1/health/offline"),
}
"""Paths of what is for those only whom all models are for, whatever the verb."""
CHANGES_ALL = {"POST /v2/logging", "POST /v2/trace/setting"}
GRPC_OF_ALL = {"Online", "Offline", "HandleReloadConfigRequest"}


@dataclass(frozen=True)
class Answer:
    """What a client sees: a status or a code, and everything that was sent, as text."""

    status: Any
    text: str

    def about(self, model: str) -> Answer:
        """With the model's name taken out of it, which the client knows."""
        return Answer(self.status, self.text.replace(model, "NAME"))


@dataclass(frozen=True)
class RestAsk:
    """One request over REST. `operation`: of its row, if that is known."""

    verb: str
    target: str
    body: bytes
    operation: str = ""

    @property
    def public(self) -> bool:
        """Whether it is for everybody."""
        return self.operation == "public"

    @property
    def names(self) -> bool:
        """Whether it names a model."""
        return NAME in self.target or NAME.encode() in self.body

    @property
    def of_all(self) -> bool:
        """Whether it is about all models."""
        return self.target in OF_ALL_MODELS or f"{self.verb} {self.target}" in CHANGES_ALL

    async def of(self, session: aiohttp.ClientSession, url: str, model: str, token: str) -> Answer:
        """What it is answered when it asks for this model."""
        headers = {"content-type": "application/json", "x-api-key": token}
        body = self.body.replace(NAME.encode(), model.encode())
        target = url + self.target.replace(NAME, model)
        async with session.request(self.verb, target, data=body, headers=headers) as answer:
            text = await answer.read()
            sent = [f"{name}: {value}" for name, value in answer.headers.items() if name.lower() not in VARYING]
            return Answer(answer.status, "\n".join([*sent, text.decode()]))


VARYING = ("date", "content-length")
"""Headers that say nothing."""


def rest_asks(routes: Iterable[Route]) -> list[RestAsk]:
    """Of every row, and of what else its path may be; those last that unload something."""
    bodies = {**BODIES, "/register": {"key": "/none", "byte_size": 8}}
    found = [_ask(change_of(route, bodies), route) for route in routes]
    for path, fields in [*[(path, None) for path in PATHS], *BODIES_OF]:
        verb, target = path.split(" ")
        found.append(RestAsk(verb, target, b"" if fields is None else json.dumps(fields).encode()))
    return sorted(found, key=lambda ask: ask.target.endswith("/unload"))


def _ask(change: Change, route: Route) -> RestAsk:
    return RestAsk(change.verb.replace("*", "PUT"), change.path, change.body, route.operation.value)


@dataclass(frozen=True)
class GrpcAsk:
    """One call over gRPC."""

    service: str
    method: Method
    fields: dict[str, Any]

    @property
    def names(self) -> bool:
        """Whether it names a model."""
        return NAME in json.dumps(self.fields)

    @property
    def of_all(self) -> bool:
        """Whether it is about all models."""
        return self.method.name in GRPC_OF_ALL or (not self.names and "settings" in self.fields)

    @property
    def path(self) -> str:
        """Of the method."""
        return f"/{self.service}/{self.method.name}"

    def request(self, model: str) -> bytes:
        """What asks for this model."""
        described = service_descriptor(self.service).methods_by_name[self.method.name]
        fields = json.loads(json.dumps(self.fields).replace(NAME, model))
        request = message_factory.GetMessageClass(described.input_type)()
        json_format.ParseDict(fields, request)
        return bytes(request.SerializeToString())

    def __str__(self) -> str:
        return f"{self.service}/{self.method.name} {self.fields}"

    async def of(self, channel: grpc.aio.Channel, model: str, token: str) -> Answer:
        """What it is answered when it asks for this model; of a stream the first answer."""
        described = service_descriptor(self.service).methods_by_name[self.method.name]
        sent, path, metadata = self.request(model), self.path, [("x-api-key", token)]
        answers: list[bytes] = []
        try:
            if self.method.kind is Kind.UNARY:
                answers.append(await channel.unary_unary(path)(sent, metadata=metadata))
            elif self.method.kind is Kind.SERVER_STREAM:
                await _first(channel.unary_stream(path)(sent, metadata=metadata), answers)
            else:
                await _first(channel.stream_stream(path)(_once(sent), metadata=metadata), answers)
        except grpc.aio.AioRpcError as error:
            return Answer(error.code(), str(error.details()))
        reply = message_factory.GetMessageClass(described.output_type)
        return Answer(grpc.StatusCode.OK, "\n".join(str(reply.FromString(answer)) for answer in answers))


async def _once(sent: bytes) -> AsyncIterator[bytes]:
    yield sent


async def _first(call: Any, answers: list[bytes]) -> None:
    with suppress(StopAsyncIteration):
        answers.append(await anext(aiter(call)))
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call.code()


def grpc_asks(services: Sequence[Service]) -> list[GrpcAsk]:
    """Of every method; those last that unload something."""
    found = [
        GrpcAsk(service.name, method, fields)
        for service in services
        for method in service.methods
        for fields in OF_SERVICES.get(f"{service.name}/{method.name}") or MESSAGES[method.name]
    ]
    return sorted(found, key=lambda ask: ask.method.name == "RepositoryModelUnload")
