"""grps' part of the OpenAPI document: schemas and operations (grps 2, 3)."""

from __future__ import annotations

from collections.abc import Mapping

from triglot.model.signature import ModelMetadata
from triglot.protocols.api_operation import (
    BINARY,
    BYTES,
    COUNT,
    OBJECT,
    STRING,
    ApiOperation,
    Content,
    Schema,
    array,
    json_body,
    query,
    record,
    ref,
)
from triglot.protocols.sample_calls import LARGEST_EXAMPLE, sample_calls

_NUMBERS = array({"type": "number"})
_INTEGERS = array({"type": "integer"})
# 64-bit integers, NaN and the infinities are strings, as in protobuf's JSON mapping.
_TEXTS = array({"type": ["string", "number"]})
_MESSAGE: Mapping[str, Schema] = {"model": STRING, "str_data": STRING, "gmap": ref("GrpsMap")}
SCHEMAS: dict[str, Schema] = {
    "GrpsStatus": record(
        {}, {"code": {"type": "integer"}, "msg": STRING, "status": {"type": ["string", "integer"]}}
    ),
    "GrpsTensor": record(
        {},
        {
            "name": STRING,
            "dtype": {"type": ["string", "integer"]},
            "shape": array(COUNT),
            "flat_uint8": _INTEGERS,
            "flat_int8": _INTEGERS,
            "flat_int16": _INTEGERS,
            "flat_int32": _INTEGERS,
            "flat_int64": _TEXTS,
            "flat_float16": _TEXTS,
            "flat_float32": _TEXTS,
            "flat_float64": _TEXTS,
            "flat_string": array(STRING),
        },
    ),
    "GrpsTensors": record({}, {"tensors": array(ref("GrpsTensor"))}),
    "GrpsMap": record({}, dict.fromkeys(("s_s", "s_b", "s_i32", "s_i64", "s_f", "s_d"), OBJECT)),
    "GrpsRequest": {
        "type": "object",
        "description": "One of str_data, gtensors, gmap and ndarray (nested lists of numbers, or a number).",
        "properties": {**_MESSAGE, "gtensors": ref("GrpsTensors"), "ndarray": {}},
    },
    "GrpsMessage": record(
        {"status": ref("GrpsStatus")},
        {**_MESSAGE, "gtensors": ref("GrpsTensors"), "bin_data": STRING, "ndarray": {}},
    ),
    "GrpsModelName": record({}, {"str_data": STRING}),
}
MESSAGE = json_body(ref("GrpsMessage"))
LIVE = ApiOperation("Liveness of the server", MESSAGE, error=MESSAGE)
READY = ApiOperation("Whether the server is online", MESSAGE, error=MESSAGE, others={503: MESSAGE})
ONLINE = ApiOperation("Be ready", MESSAGE, error=MESSAGE)
OFFLINE = ApiOperation("Be no longer ready", MESSAGE, error=MESSAGE)
SERVER = ApiOperation("Metadata of the server, as YAML in str_data", MESSAGE, error=MESSAGE)
MODEL = ApiOperation(
    "Metadata of a model, as YAML in str_data",
    MESSAGE,
    json_body(ref("GrpsModelName")),
    "Without a name, of the default model.",
    others={500: MESSAGE},
    error=MESSAGE,
    body_required=False,
)


def predict_operation(streaming_type: str, *, customized: bool, streaming_query: str = "") -> ApiOperation:
    """Return the operation of a predict row. `streaming_query`: the query parameter for streams, if any."""
    streamed = [query(streaming_query, STRING, "true: answer with a stream")] if streaming_query else []
    if customized:
        return ApiOperation(
            "Predict, with requests and answers of the project's own",
            {"*/*": {}},
            {"*/*": {}},
            others={500: {"*/*": {}}},
            error={"*/*": {}},
            parameters=streamed,
            body_required=False,
        )
    answer: Content = MESSAGE | {BYTES: BINARY} | {streaming_type: {}}
    return ApiOperation(
        "Predict",
        answer,
        json_body(ref("GrpsRequest")) | {BYTES: BINARY},
        "JSON is a GrpsMessage, application/octet-stream is its bin_data, also in answers. A stream is "
        f"{streaming_type}: JSON messages on lines of their own, or the model's bytes. What is wrong with a "
        "model's input has status 500.",
        others={500: MESSAGE, 503: MESSAGE},
        error=MESSAGE,
        parameters=[
            query("model", STRING, "The model, where the message names none: NAME or NAME-VERSION"),
            query("return-ndarray", STRING, "true: answer with the first FP32 tensor as nested lists"),
            *streamed,
        ],
    )


def predict_of(model: ModelMetadata) -> ApiOperation | None:
    """Return an example of the row's own operation for one model."""
    calls = sample_calls(model, ["grps"], largest=LARGEST_EXAMPLE)
    return ApiOperation(f"Predict with {model.name}", examples={model.name: calls[0].body}) if calls else None
