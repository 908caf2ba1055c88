"""TensorFlow Serving's and AI Platform's parts of the OpenAPI document (tfs 4, 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from urllib.parse import quote

from triglot.core.tensor import DATATYPES
from triglot.core.types import TensorSpec
from triglot.model.signature import ModelMetadata, shape_text
from triglot.protocols.api_operation import (
    AI_PLATFORM,
    BOOLEAN,
    ERROR,
    NO_CONTENT,
    OBJECT,
    STRING,
    TEXT,
    ApiOperation,
    Schema,
    array,
    described,
    json_body,
    record,
    ref,
)
from triglot.protocols.sample_calls import LARGEST_EXAMPLE, sample_calls
from triglot.protocols.tfserving.rest_predict import RULES

MODEL = "/v1/models/{model}"
_VERSIONS = ("", "/versions/{version}", "/labels/{label}")
_BYTES: Schema = {"anyOf": [STRING, record({"b64": STRING})]}
_INTEGER: Schema = {"type": "integer"}
_ELEMENTS: Mapping[str, Schema] = {"b": BOOLEAN, "f": {"type": "number"}, "O": _BYTES}
"""JSON types of elements, by the kind of their numpy dtype."""
_UNIMPLEMENTED = {501: ERROR}
_TOO_LARGE = "A version beyond 64 bits is answered with status 400 and no body."
SCHEMAS: dict[str, Schema] = {
    "PredictRequest": {
        "type": "object",
        "description": "One of instances (rows) and inputs (columns). Bytes are {'b64': '...'}.",
        "properties": {"signature_name": STRING, "instances": array({}), "inputs": {}},
    },
    "PredictResponse": {
        "type": "object",
        "description": "predictions for instances, outputs for inputs",
        "properties": {"predictions": {}, "outputs": {}},
    },
    "ExamplesRequest": record({"examples": array(OBJECT)}, {"signature_name": STRING, "context": OBJECT}),
    "ClassifyResponse": record({"results": array(array(array({}) | {"minItems": 2, "maxItems": 2}))}),
    "RegressResponse": record({"results": array({"type": "number"})}),
    "ModelStatus": record(
        {
            "model_version_status": array(
                record(
                    {
                        "version": STRING,
                        "state": STRING,
                        "status": record({"error_code": STRING, "error_message": STRING}),
                    }
                )
            )
        }
    ),
    "ModelSignatures": record(
        {
            "model_spec": record({"name": STRING, "version": STRING, "signature_name": STRING}),
            "metadata": record({"signature_def": OBJECT}),
        }
    ),
    "ModelList": record({"models": array(STRING)}),
    "PredictionRequest": {
        "type": "object",
        "properties": {"instances": array({}), "signature_name": STRING, "httpBody": OBJECT},
    },
    "PredictionResponse": {"type": "object", "properties": {"predictions": {}}},
    "PlatformError": record({"error": {"anyOf": [STRING, OBJECT]}}),
    "Detail": record({"detail": STRING}),
}
PREDICT = "predict"
CALLS = {
    PREDICT: ApiOperation(
        "Predict",
        json_body(ref("PredictResponse")),
        json_body(ref("PredictRequest")),
        "NaN, Infinity and -Infinity are bare tokens in JSON.",
        others=_UNIMPLEMENTED,
    ),
    "classify": ApiOperation(
        "Classify examples", json_body(ref("ClassifyResponse")), json_body(ref("ExamplesRequest"))
    ),
    "regress": ApiOperation(
        "Regress examples", json_body(ref("RegressResponse")), json_body(ref("ExamplesRequest"))
    ),
}
STATUS = ApiOperation("Status of a model's versions", json_body(ref("ModelStatus")))
METADATA = ApiOperation("Signatures of a model", json_body(ref("ModelSignatures")))
LIST = ApiOperation("Names of the models (KServe V1)", json_body(ref("ModelList")), path="/v1/models")
METRICS = ApiOperation(
    "Metrics under TensorFlow Serving's names",
    {TEXT: STRING},
    description="In Prometheus' text form. Any method does, and no query.",
    error={TEXT: STRING},
)
_VERSION = {"name": "version", "in": "path", "required": True, "schema": STRING}
PROJECT = ApiOperation(
    "Predict",
    json_body(ref("PredictionResponse")),
    json_body(ref("PredictionRequest")),
    "A version is a name from versions.toml, a label or a number.",
    others={500: json_body(ref("PlatformError")), 501: json_body(ref("PlatformError"))},
    error=json_body(ref("PlatformError")),
    parameters=[_VERSION | {"description": "A version's name, label or number"}],
    tag=AI_PLATFORM,
)
ENDPOINT = replace(
    PROJECT,
    description="Of the model that --vertex-endpoints gives the endpoint, or that has its name.",
    others={status: json_body(ref("PlatformError")) for status in (500, 501, 503)},
    parameters=(),
)
RAW_ENDPOINT = replace(
    ENDPOINT, summary="Predict, without Vertex AI's additions to the response", description=ENDPOINT.description
)
GET_ENDPOINT = ApiOperation(
    "An endpoint and its model", json_body(OBJECT), error=json_body(ref("PlatformError")), tag=AI_PLATFORM
)
VERTEX = replace(
    PROJECT,
    description="Of the one model that is served.",
    error=json_body(ref("Detail")),
    others={status: json_body(ref("Detail")) for status in (500, 501, 503)},
    parameters=(),
)
VERTEX_HEALTH = ApiOperation(
    "Readiness of the server",
    json_body(OBJECT),
    error=json_body(ref("Detail")),
    others={503: json_body(ref("Detail"))},
    tag=AI_PLATFORM,
)


def call_operations(name: str) -> tuple[ApiOperation, ...]:
    """Return the operations of the row for one of the three calls, which parses its paths itself."""
    return tuple(_each_version(CALLS[name], f":{name}"))


def get_operations(*, kserve_v1: bool) -> tuple[ApiOperation, ...]:
    """Return the operations of the row that answers all GET requests."""
    looks = *_each_version(STATUS, ""), *_each_version(METADATA, "/metadata")
    return (LIST, *looks) if kserve_v1 else looks


def _each_version(operation: ApiOperation, end: str) -> Iterable[ApiOperation]:
    for version in _VERSIONS:
        # An empty error response has no content to document beside the one that has a body.
        too_large = {400: NO_CONTENT} if version == _VERSIONS[1] else {}
        description = f"{operation.description} {_TOO_LARGE}".strip() if too_large else operation.description
        yield replace(
            operation,
            path=f"{MODEL}{version}{end}",
            description=description,
            others={**operation.others, **too_large},
        )


def predict_of(model: ModelMetadata, _: str) -> ApiOperation | None:
    """Return Predict for one model; None if its tensors have no JSON form."""
    signature = model.signature
    specs = [*signature.inputs, *signature.outputs]
    if model.decoupled or model.speaks_json or signature.any_tensors or signature.method != "predict":
        return None
    if not signature.inputs or any(spec.datatype not in RULES for spec in specs):
        return None
    calls = sample_calls(model, ["tfserving"], largest=LARGEST_EXAMPLE)
    inputs = {spec.name: _nested(spec) for spec in signature.inputs}
    required = [spec.name for spec in signature.inputs if spec.name not in signature.may_lack]
    columns: Schema = record({name: inputs[name] for name in required}, inputs)
    if len(required) == 1:
        columns = {"anyOf": [inputs[required[0]], columns]}
    return replace(
        CALLS[PREDICT],
        summary=f"Predict with {model.name}",
        description=f"{described(model)}\n\n{CALLS[PREDICT].description}",
        request=json_body(ref("PredictRequest") | {"properties": {"inputs": columns}}),
        examples={model.name: calls[0].body} if calls else {},
        model=model.name,
        path=f"/v1/models/{quote(model.name)}:predict",
    )


def _nested(spec: TensorSpec) -> Schema:
    """Return the schema of an element, or nested lists of them; the model checks their shape."""
    element = _ELEMENTS.get(DATATYPES[spec.datatype].dtype.kind, _INTEGER)
    values = {"anyOf": [element, array({"anyOf": [element, array({})]})]}
    return values | {"description": f"{spec.datatype} {shape_text(spec.shape)}"}
