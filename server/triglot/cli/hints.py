"""The lines that a started server prints: each calls a model, and works as pasted."""

from __future__ import annotations

import base64
import json
import shlex
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import quote

from triglot.config.options import NO_PORT, Config
from triglot.model.metadata import ModelMetadata
from triglot.model.signature import DEFAULT_SIGNATURE


class _Element(NamedTuple):
    """An element of a datatype, and the fields that hold such elements in each protocol's messages.

    `grps_field` is empty where grps has none.
    """

    value: bool | int | float | str
    kserve_field: str
    dtype: str
    tensorflow_field: str
    grps_field: str = ""


_ELEMENTS = {
    "BOOL": _Element(True, "bool_contents", "DT_BOOL", "bool_val"),
    "BYTES": _Element("text", "bytes_contents", "DT_STRING", "string_val", "flat_string"),
    "FP32": _Element(1.5, "fp32_contents", "DT_FLOAT", "float_val", "flat_float32"),
    "FP64": _Element(1.5, "fp64_contents", "DT_DOUBLE", "double_val", "flat_float64"),
    "INT8": _Element(1, "int_contents", "DT_INT8", "int_val", "flat_int8"),
    "INT16": _Element(1, "int_contents", "DT_INT16", "int_val", "flat_int16"),
    "INT32": _Element(1, "int_contents", "DT_INT32", "int_val", "flat_int32"),
    "INT64": _Element(1, "int64_contents", "DT_INT64", "int64_val", "flat_int64"),
    "UINT8": _Element(1, "uint_contents", "DT_UINT8", "int_val", "flat_uint8"),
    "UINT16": _Element(1, "uint_contents", "DT_UINT16", "int_val"),
    "UINT32": _Element(1, "uint_contents", "DT_UINT32", "uint32_val"),
    "UINT64": _Element(1, "uint64_contents", "DT_UINT64", "uint64_val"),
}
LARGEST_SAMPLE = 16
CONTENT_TYPE = "-H 'Content-Type: application/json' "


@dataclass(frozen=True, slots=True)
class _Sample:
    """A small tensor for one input."""

    name: str
    datatype: str
    shape: list[int]

    @property
    def element(self) -> _Element:
        return _ELEMENTS[self.datatype]

    @property
    def count(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    def nested(self) -> Any:
        """The elements as lists in lists."""
        nested: Any = self.element.value
        for dim in reversed(self.shape):
            nested = [nested] * dim
        return nested

    def message_elements(self) -> list[Any]:
        """The elements as protobuf's JSON writes them: bytes in base64."""
        value = self.element.value
        return [base64.b64encode(value.encode()).decode() if isinstance(value, str) else value] * self.count


class _SampleCall(NamedTuple):
    """One call of a model in one protocol, over REST and over gRPC. `json`: REST insists on the content type."""

    path: str
    body: dict[str, Any]
    method: str
    message: dict[str, Any]
    json: bool = False


def hint_lines(models: list[ModelMetadata], config: Config, grpc_port: int, rest_port: int) -> list[str]:
    """Lines for the first model whose inputs fit on one; none without such a model.

    curl for each protocol, and Python and grpcurl for the first one, as far as their port is open. With TLS they
    take any certificate, as nobody knows under which name the server is called; with certificates of clients there
    are none.
    """
    if config.tls_client_ca:
        return []
    for model in models:
        calls = _calls(model, config)
        if calls:
            return _lines(calls, config, grpc_port, rest_port)
    return []


def _calls(model: ModelMetadata, config: Config) -> list[_SampleCall]:
    if model.signature.any_tensors and not model.signature.inputs:
        return []  # What it takes, only its author knows.
    # Of examples, and of JSON in JSON, no sample is right for every model; a sequence has an id, and a start.
    simple = model.signature.method == "predict" and not (model.decoupled or model.speaks_json or model.sequences)
    samples = _samples(model) if simple else None
    if samples is None:
        return []
    calls = []
    if "kserve" in config.protocol_names:
        calls.append(_kserve_call(model.name, samples))
    # TensorFlow Serving's REST interface takes no call without inputs, and has JSON for some types only (tfs 4.2).
    specs = [*model.signature.inputs, *model.signature.outputs]
    has_json = bool(samples) and all(spec.datatype in _ELEMENTS.keys() - {"UINT16"} for spec in specs)
    if "tfserving" in config.protocol_names and has_json:
        calls.append(_tfserving_call(model, samples))
    # In customised HTTP a project reads its requests itself.
    has_grps = "grps" in config.protocol_names and not config.grps_customized_body
    if has_grps and all(sample.element.grps_field for sample in samples):
        tensors = {"gtensors": {"tensors": list(map(_grps_tensor, samples))}}
        calls.append(_grps_call({"model": f"{model.name}-{model.versions[-1]}", **tensors}))
    return calls


def _samples(model: ModelMetadata) -> list[_Sample] | None:
    """A tensor for each input; None when the model takes no small one."""
    samples = []
    for spec in model.signature.inputs:
        if spec.shape is None or spec.datatype not in _ELEMENTS:
            return None
        sample = _Sample(spec.name, spec.datatype, [1 if dim == -1 else dim for dim in spec.shape])
        if sample.count > LARGEST_SAMPLE:
            return None
        samples.append(sample)
    return samples


def _kserve_call(name: str, samples: list[_Sample]) -> _SampleCall:
    heads = [{"name": sample.name, "datatype": sample.datatype, "shape": sample.shape} for sample in samples]
    rest = [
        head | {"data": [sample.element.value] * sample.count} for head, sample in zip(heads, samples, strict=True)
    ]
    grpc = [
        head | {"contents": {sample.element.kserve_field: sample.message_elements()}}
        for head, sample in zip(heads, samples, strict=True)
    ]
    return _SampleCall(
        f"/v2/models/{quote(name)}/infer",
        {"inputs": rest},
        "inference.GRPCInferenceService/ModelInfer",
        {"model_name": name, "inputs": grpc},
    )


def _tfserving_call(model: ModelMetadata, samples: list[_Sample]) -> _SampleCall:
    # Unnamed means the default's name here, and not the only signature (tfs 3.2).
    is_default = model.signature_name == DEFAULT_SIGNATURE
    named = {} if is_default else {"signature_name": model.signature_name}
    tensors = {
        sample.name: {
            "dtype": sample.element.dtype,
            "tensor_shape": {"dim": [{"size": dim} for dim in sample.shape]},
            sample.element.tensorflow_field: sample.message_elements(),
        }
        for sample in samples
    }
    return _SampleCall(
        f"/v1/models/{quote(model.name)}:predict",
        named | {"inputs": {sample.name: sample.nested() for sample in samples}},
        "tensorflow.serving.PredictionService/Predict",
        {"model_spec": {"name": model.name} | named, "inputs": tensors},
    )


def _grps_tensor(sample: _Sample) -> dict[str, Any]:
    field = sample.element.grps_field
    return {
        "name": sample.name,
        "dtype": field.upper().replace("FLAT", "DT"),
        "shape": sample.shape,
        field: [sample.element.value] * sample.count,
    }


def _grps_call(message: dict[str, Any]) -> _SampleCall:
    return _SampleCall("/grps/v1/infer/predict", message, "grps.protos.v1.GrpsService/Predict", message, json=True)


def _lines(calls: list[_SampleCall], config: Config, grpc_port: int, rest_port: int) -> list[str]:
    here = replace(config, host="127.0.0.1") if config.host in ("0.0.0.0", "::") else config
    first, lines = calls[0], []
    tls = bool(config.tls_certificate)
    if config.rest_port != NO_PORT:
        flags = "-sk" if tls else "-s"
        server = f"{'https' if tls else 'http'}://{here.address(rest_port)}"
        for call in calls:
            header = CONTENT_TYPE if call.json else ""
            lines.append(f"curl {flags} {server}{call.path} {header}-d {shlex.quote(json.dumps(call.body))}")
        asked = f"{server + first.path!r}, {json.dumps(first.body).encode()!r}"
        if first.json:
            asked = f"urllib.request.Request({asked}, {{'Content-Type': 'application/json'}})"
        modules, any_certificate = ("ssl, ", ", context=ssl._create_unverified_context()") if tls else ("", "")
        lines.append(
            f"python3 <<'END'\nimport {modules}urllib.request\n"
            f"print(urllib.request.urlopen({asked}{any_certificate}).read().decode())\nEND"
        )
    if config.grpc_port != NO_PORT:
        message = shlex.quote(json.dumps(first.message))
        lines.append(
            f"grpcurl {'-insecure' if tls else '-plaintext'} -d {message} {here.address(grpc_port)} {first.method}"
        )
    return lines
