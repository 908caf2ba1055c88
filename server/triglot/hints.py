"""The lines that a started server prints: each calls a model, and works as pasted."""

from __future__ import annotations

import base64
import json
import shlex
from dataclasses import replace
from typing import Any

from triglot.config import Config
from triglot.dataplane import ModelMetadata

_SAMPLES: dict[str, tuple[str, Any]] = {
    "BOOL": ("bool_contents", True),
    "BYTES": ("bytes_contents", "text"),
    "FP32": ("fp32_contents", 1.5),
    "FP64": ("fp64_contents", 1.5),
    "INT8": ("int_contents", 1),
    "INT16": ("int_contents", 1),
    "INT32": ("int_contents", 1),
    "INT64": ("int64_contents", 1),
    "UINT8": ("uint_contents", 1),
    "UINT16": ("uint_contents", 1),
    "UINT32": ("uint_contents", 1),
    "UINT64": ("uint64_contents", 1),
}
LARGEST_SAMPLE = 16


def hint_lines(models: list[ModelMetadata], config: Config, grpc_port: int, rest_port: int) -> list[str]:
    """curl, Python and grpcurl lines for the first model whose inputs fit on a line; none without one."""
    for model in models:
        inputs = None if model.decoupled else _sample_inputs(model)
        if inputs is not None:
            return _lines(model.name, inputs, config, grpc_port, rest_port)
    return []


def _sample_inputs(model: ModelMetadata) -> list[dict[str, Any]] | None:
    """One small tensor for each input, without its elements' form; None when the model takes no small one."""
    inputs = []
    for spec in model.signature.inputs:
        if spec.shape is None:
            return None
        shape = [1 if dim == -1 else dim for dim in spec.shape]
        count = 1
        for dim in shape:
            count *= dim
        if spec.datatype not in _SAMPLES or count > LARGEST_SAMPLE:
            return None
        inputs.append({"name": spec.name, "datatype": spec.datatype, "shape": shape, "count": count})
    return inputs


def _lines(name: str, inputs: list[dict[str, Any]], config: Config, grpc_port: int, rest_port: int) -> list[str]:
    here = replace(config, host="127.0.0.1") if config.host in ("0.0.0.0", "::") else config
    url = f"http://{here.address(rest_port)}/v2/models/{name}/infer"
    rest = {
        "inputs": [_tensor(sample, data=[_SAMPLES[sample["datatype"]][1]] * sample["count"]) for sample in inputs]
    }
    grpc = {
        "model_name": name,
        "inputs": [
            _tensor(sample, contents={_SAMPLES[sample["datatype"]][0]: [_grpc_json(sample)] * sample["count"]})
            for sample in inputs
        ],
    }
    body = json.dumps(rest)
    return [
        f"curl -s {url} -d {shlex.quote(body)}",
        "python3 <<'END'\n"
        "import urllib.request\n"
        f"print(urllib.request.urlopen({url!r}, {body.encode()!r}).read().decode())\n"
        "END",
        f"grpcurl -plaintext -d {shlex.quote(json.dumps(grpc))} {here.address(grpc_port)} "
        "inference.GRPCInferenceService/ModelInfer",
    ]


def _tensor(sample: dict[str, Any], **content: Any) -> dict[str, Any]:
    return {key: sample[key] for key in ("name", "datatype", "shape")} | content


def _grpc_json(sample: dict[str, Any]) -> Any:
    value = _SAMPLES[sample["datatype"]][1]
    # Protobuf's JSON writes bytes as base64.
    return base64.b64encode(value.encode()).decode() if isinstance(value, str) else value
