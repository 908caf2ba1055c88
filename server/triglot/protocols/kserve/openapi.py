"""KServe V2's part of the OpenAPI document: schemas, operations, and operations of single models (spec 3)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from triglot.core.types import TensorSpec
from triglot.model.signature import ModelMetadata, shape_text
from triglot.protocols.api_operation import (
    BINARY,
    BOOLEAN,
    BYTES,
    COUNT,
    ERROR,
    EVENTS,
    NO_CONTENT,
    OBJECT,
    STRING,
    ApiOperation,
    Content,
    Schema,
    array,
    described,
    element_schema,
    header,
    json_body,
    record,
    ref,
    shape_schema,
)
from triglot.protocols.kserve.json_elements import NO_JSON
from triglot.protocols.kserve.rest import HEADER_NAME
from triglot.protocols.sample_calls import LARGEST_EXAMPLE, binary_call, first_call, sample_calls, stream_call

_BINARY = (
    "Tensors are JSON, or binary data: a JSON part of as many bytes as the header "
    f"{HEADER_NAME} says, and behind it the bytes of the tensors whose parameters have a binary_data_size. "
    "FP16 and BF16 have no JSON form. NaN, Infinity and -Infinity are bare tokens in JSON."
)
_PARAMETER: Schema = {"type": ["string", "number", "boolean"]}
_REGION = record({"name": STRING, "key": STRING, "offset": COUNT, "byte_size": COUNT})
_DURATION = record({"count": COUNT, "ns": COUNT})
_DURATIONS: Schema = {"type": "object", "additionalProperties": _DURATION}
SCHEMAS: dict[str, Schema] = {
    "Live": record({"live": BOOLEAN}),
    "Ready": record({"ready": BOOLEAN, "live": BOOLEAN}),
    "ModelNames": record({"models": array(STRING)}),
    "ModelReady": record({"name": STRING, "ready": BOOLEAN}),
    "ServerMetadata": record({"name": STRING, "version": STRING, "extensions": array(STRING)}),
    "TensorMetadata": record({"name": STRING, "datatype": STRING, "shape": array({"type": "integer"})}),
    "ModelMetadata": record(
        {
            "name": STRING,
            "versions": array(STRING),
            "platform": STRING,
            "inputs": array(ref("TensorMetadata")),
            "outputs": array(ref("TensorMetadata")),
        },
        {"columns": array(record({"name": STRING, "datatype": STRING}))},
    ),
    "Parameters": {"type": "object", "additionalProperties": _PARAMETER},
    "TensorData": array({}) | {"description": "Elements in row-major order, flat or as nested arrays."},
    "RequestInput": record(
        {"name": STRING, "datatype": STRING, "shape": array(COUNT)},
        {"parameters": ref("Parameters"), "data": ref("TensorData")},
    ),
    "RequestOutput": record({"name": STRING}, {"parameters": ref("Parameters")}),
    "InferRequest": record(
        {"inputs": array(ref("RequestInput"))},
        {"id": STRING, "parameters": ref("Parameters"), "outputs": array(ref("RequestOutput"))},
    ),
    "ResponseOutput": record(
        {"name": STRING, "datatype": STRING, "shape": array(COUNT)},
        {"parameters": ref("Parameters"), "data": ref("TensorData")},
    ),
    "InferResponse": record(
        {"model_name": STRING, "model_version": STRING, "outputs": array(ref("ResponseOutput"))},
        {"id": STRING, "parameters": ref("Parameters")},
    ),
    "GenerateRequest": {
        "type": "object",
        "description": "A member that is called like an input is that input; any other one is a parameter.",
        "properties": {"id": STRING, "parameters": OBJECT},
    },
    "PlainOutputs": {"type": "object", "description": "The outputs by name, as nested lists."},
    "GenerateResponse": record({"model_name": STRING, "model_version": STRING}, {"id": STRING}),
    "IndexRequest": record({}, {"ready": BOOLEAN}),
    "Index": array(record({"name": STRING}, {"version": STRING, "state": STRING, "reason": STRING})),
    "ChangeRequest": record(
        {}, {"parameters": {"type": "object", "additionalProperties": {"type": ["string", "boolean"]}}}
    ),
    "ModelLoaded": record({"name": STRING, "load": BOOLEAN}),
    "ModelUnloaded": record({"name": STRING, "unload": BOOLEAN}),
    "ModelConfig": record({"name": STRING, "platform": STRING, "backend": STRING}),
    "InferStatistics": _DURATIONS,
    "ModelStatistics": record(
        {
            "name": STRING,
            "version": STRING,
            "last_inference": COUNT,
            "inference_count": COUNT,
            "execution_count": COUNT,
            "inference_stats": ref("InferStatistics"),
        },
        {
            "batch_stats": array(record({"batch_size": COUNT}, {"compute_infer": _DURATION})),
            "response_stats": {"type": "object", "additionalProperties": _DURATIONS},
        },
    ),
    "Statistics": record({"model_stats": array(ref("ModelStatistics"))}),
    "TraceSettings": record(
        {},
        {
            "trace_level": array({"enum": ["OFF", "TIMESTAMPS", "TENSORS"]}),
            "trace_rate": STRING,
            "trace_count": STRING,
            "log_frequency": STRING,
            "trace_file": STRING,
            "trace_mode": STRING,
        },
    ),
    "LogSettings": record(
        {},
        {
            "log_file": STRING,
            "log_info": BOOLEAN,
            "log_warning": BOOLEAN,
            "log_error": BOOLEAN,
            "log_verbose_level": COUNT,
            "log_format": {"enum": ["default", "ISO8601"]},
        },
    ),
    "SharedMemoryRegions": array(_REGION),
    "SharedMemoryRegion": record({"key": STRING, "byte_size": COUNT}, {"offset": COUNT}),
    "CudaSharedMemoryRegion": OBJECT,
}
_UNIMPLEMENTED = {501: ERROR}
_BINARY_LENGTH = header(HEADER_NAME, COUNT, "Bytes of the JSON part of a body with binary tensors")
_NOT_READY = {503: ERROR}

LIVE = ApiOperation("Liveness of the server", json_body(ref("Live")))
READY = ApiOperation("Readiness of the server", json_body(ref("Ready")), others={503: json_body(ref("Ready"))})
NAMES = ApiOperation("Names of the models", json_body(ref("ModelNames")))
SERVER = ApiOperation("Metadata of the server", json_body(ref("ServerMetadata")))
MODEL_READY = ApiOperation("Readiness of a model", json_body(ref("ModelReady")), others=_NOT_READY)
MODEL = ApiOperation("Metadata of a model", json_body(ref("ModelMetadata")), others=_NOT_READY)
CONFIG = ApiOperation("Configuration of a model", json_body(ref("ModelConfig")), others=_NOT_READY)
STATISTICS = ApiOperation("Statistics of models", json_body(ref("Statistics")), others=_NOT_READY)
INDEX = ApiOperation(
    "Index of the model repository",
    json_body(ref("Index")),
    json_body(ref("IndexRequest")),
    others=_UNIMPLEMENTED,
    body_required=False,
)
CHANGES = {
    "load": ApiOperation(
        "Load a model, or load it again",
        json_body(ref("ModelLoaded")),
        json_body(ref("ChangeRequest")),
        "Needs --model-control-mode explicit. The parameter config is a model configuration as JSON.",
        others=_UNIMPLEMENTED | _NOT_READY | {500: ERROR},
        body_required=False,
    ),
    "unload": ApiOperation(
        "Unload a model",
        json_body(ref("ModelUnloaded")),
        json_body(ref("ChangeRequest")),
        "Needs --model-control-mode explicit. The parameter unload_dependents unloads an ensemble's models, too.",
        others=_UNIMPLEMENTED | _NOT_READY,
        body_required=False,
    ),
}
INFER = ApiOperation(
    "Inference",
    json_body(ref("InferResponse")) | {BYTES: BINARY},
    json_body(ref("InferRequest")) | {BYTES: BINARY},
    _BINARY,
    others=_UNIMPLEMENTED | _NOT_READY,
    parameters=[_BINARY_LENGTH],
)
_STREAMED: Content = {EVENTS: {}, "application/x-ndjson": {}}
PREDICT = ApiOperation(
    "Inference with plain JSON, a form, or a file",
    json_body(ref("PlainOutputs")) | _STREAMED,
    json_body({}) | {"multipart/form-data": OBJECT},
    "An object of the inputs by name, as nested lists, or a list of rows: objects, or items of the only input. "
    'Bytes are {"b64": TEXT}, files of a form, or, for a model with one BYTES input, a body of any other type. '
    "Models with several responses answer with server-sent events, or with lines of JSON for "
    "Accept: application/x-ndjson.",
    others=_UNIMPLEMENTED | _NOT_READY,
)
GENERATE = ApiOperation(
    "Inference with one flat JSON object",
    json_body(ref("GenerateResponse")),
    json_body(ref("GenerateRequest")),
    "For models that answer once.",
    others=_UNIMPLEMENTED | _NOT_READY,
)
_STREAM = (
    "Server-sent events, one for each response of the model: lines of `data:` and a JSON object. An error before "
    "the first one has a status of its own; a later one is the last event, with the member error."
)
GENERATE_STREAM = ApiOperation(
    "Inference with one flat JSON object, and a stream of responses",
    {EVENTS: {}},
    json_body(ref("GenerateRequest")),
    _STREAM,
    others=_UNIMPLEMENTED | _NOT_READY,
)
INFER_STREAM = ApiOperation(
    "Inference with a stream of responses",
    {EVENTS: {}},
    json_body(ref("InferRequest")) | {BYTES: BINARY},
    f"{_STREAM} Inputs may be binary data, responses are JSON.",
    others=_UNIMPLEMENTED | _NOT_READY,
    parameters=[_BINARY_LENGTH],
)
TRACE = ApiOperation("Trace settings", json_body(ref("TraceSettings")))
SET_TRACE = ApiOperation(
    "Change trace settings",
    json_body(ref("TraceSettings")),
    json_body(OBJECT),
    "A null takes a setting back. Without a trace_file of the server nothing is traced.",
    others=_UNIMPLEMENTED,
)
LOG = ApiOperation("Log settings", json_body(ref("LogSettings")))
SET_LOG = ApiOperation(
    "Change log settings",
    json_body(ref("LogSettings")),
    json_body(OBJECT),
    "Values as in the answer; a null leaves a setting as it is.",
    others=_UNIMPLEMENTED,
)
_CLOSED = "Needs --shared-memory-prefix."
REGIONS = ApiOperation("Registered regions of shared memory", json_body(ref("SharedMemoryRegions")))
REGISTER = ApiOperation(
    "Register a region of system shared memory",
    NO_CONTENT,
    json_body(ref("SharedMemoryRegion")),
    _CLOSED,
    others=_UNIMPLEMENTED,
)
REGISTER_CUDA = ApiOperation(
    "Register a region of CUDA shared memory",
    NO_CONTENT,
    json_body(OBJECT),
    "Always refused: there is no GPU code.",
)
UNREGISTER = ApiOperation("Unregister regions of shared memory", NO_CONTENT, others=_UNIMPLEMENTED)


def infer_of(model: ModelMetadata, server: str) -> ApiOperation | None:
    """Return `INFER` for one model, None if it is decoupled; `server` is the address in sample code."""
    if model.decoupled:
        return None
    calls = sample_calls(model, ["kserve"], largest=LARGEST_EXAMPLE)
    return ApiOperation(
        f"Inference with {model.name}",
        json_body(_response(model)) | {BYTES: BINARY},
        json_body(_request(model)) | {BYTES: BINARY},
        f"{described(model)}\n\n{_BINARY}",
        others=INFER.others,
        parameters=INFER.parameters,
        examples={model.name: calls[0].body} if calls else {},
        code="" if calls else _binary_code(model, server),
        model=model.name,
        path=f"/v2/models/{quote(model.name)}/infer",
    )


def predict_of(model: ModelMetadata, _: str) -> ApiOperation | None:
    """Return `PREDICT` for one model, None if no example of plain JSON is known for it."""
    call = first_call(model, ["kserve"], LARGEST_EXAMPLE)
    return call and replace(
        PREDICT,
        answer=_STREAMED if model.decoupled else json_body(ref("PlainOutputs")),
        summary=f"Inference with {model.name} and plain JSON",
        description=f"{described(model)}\n\n{PREDICT.description}",
        examples={model.name: call.body},
        model=model.name,
        path=call.path,
    )


def stream_of(model: ModelMetadata, _: str) -> ApiOperation | None:
    """Return `GENERATE_STREAM` for one model, None if it is not decoupled, or declares no tensors."""
    if not model.decoupled or model.signature.any_tensors:
        return None
    call = stream_call(model, LARGEST_EXAMPLE)
    inputs = {spec.name: _generated(spec) for spec in model.signature.inputs}
    required = [spec.name for spec in model.signature.inputs if spec.name not in model.signature.may_lack]
    schema = ref("GenerateRequest") | {"properties": inputs} | ({"required": required} if required else {})
    return ApiOperation(
        f"Stream of responses of {model.name}",
        GENERATE_STREAM.answer,
        json_body(schema),
        f"{described(model)}\n\n{_STREAM}",
        others=GENERATE_STREAM.others,
        examples={} if call is None else {model.name: call.body},
        model=model.name,
        path=f"/v2/models/{quote(model.name)}/generate_stream",
    )


def _generated(spec: TensorSpec) -> Schema:
    element = element_schema(spec.datatype)
    return {"anyOf": [element, array(element)], "description": f"{spec.datatype} {shape_text(spec.shape)}"}


def _request(model: ModelMetadata) -> Schema:
    signature = model.signature
    if signature.any_tensors:
        return ref("InferRequest")
    inputs: dict[str, Any] = {
        "type": "array",
        "minItems": sum(spec.name not in signature.may_lack for spec in signature.inputs),
        "maxItems": len(signature.inputs),
    }
    if signature.inputs:
        inputs["items"] = {"anyOf": list(map(_input, signature.inputs))}
    return ref("InferRequest") | {"properties": {"inputs": inputs}}


def _response(model: ModelMetadata) -> Schema:
    signature = model.signature
    if signature.any_tensors or not signature.outputs:
        return ref("InferResponse")
    outputs = [_output(spec) for spec in signature.outputs]
    return ref("InferResponse") | {"properties": {"outputs": {"type": "array", "items": {"anyOf": outputs}}}}


def _input(spec: TensorSpec) -> Schema:
    data: Schema = {}
    if spec.datatype not in NO_JSON:
        element = element_schema(spec.datatype)
        data = {"data": array({"anyOf": [element, array({})]})}
    return _tensor(spec, data)


def _output(spec: TensorSpec) -> Schema:
    """Return an output's schema: the tensor, or BYTES in another shape if classification is requested."""
    classes = record({"name": {"const": spec.name}, "datatype": {"const": "BYTES"}})
    return {"anyOf": [_tensor(spec, {}), {"title": "classification"} | classes]}


def _tensor(spec: TensorSpec, data: Mapping[str, Schema]) -> Schema:
    return record(
        {
            "name": {"const": spec.name},
            "datatype": {"const": spec.datatype},
            "shape": shape_schema(spec.shape),
        },
        data,
    )


def _binary_code(model: ModelMetadata, server: str) -> str:
    call = binary_call(model)
    if call is None:
        return ""
    head = json.dumps(call.head)
    return (
        f"(printf %s {shlex.quote(head)}; head -c {call.zeros} /dev/zero) |\n"
        f"curl -s {shlex.quote(server + call.path)} -H '{HEADER_NAME}: {len(head)}' --data-binary @- --output -"
    )
