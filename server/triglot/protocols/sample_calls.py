"""Sample calls: a first request to a model in each protocol, over REST and over gRPC."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple
from urllib.parse import quote

from triglot.core.tensor import DATATYPES
from triglot.model.samples import Sample, samples_of, samples_of_example
from triglot.model.signature import DEFAULT_SIGNATURE, ModelMetadata


class _Element(NamedTuple):
    """The fields for elements of a datatype in each protocol's messages, and TensorFlow's name of the datatype.

    `grps_field` is empty if grps has none.
    """

    kserve_field: str
    dtype: str
    tensorflow_field: str
    grps_field: str = ""


_ELEMENTS = {
    "BOOL": _Element("bool_contents", "DT_BOOL", "bool_val"),
    "BYTES": _Element("bytes_contents", "DT_STRING", "string_val", "flat_string"),
    "FP32": _Element("fp32_contents", "DT_FLOAT", "float_val", "flat_float32"),
    "FP64": _Element("fp64_contents", "DT_DOUBLE", "double_val", "flat_float64"),
    "INT8": _Element("int_contents", "DT_INT8", "int_val", "flat_int8"),
    "INT16": _Element("int_contents", "DT_INT16", "int_val", "flat_int16"),
    "INT32": _Element("int_contents", "DT_INT32", "int_val", "flat_int32"),
    "INT64": _Element("int64_contents", "DT_INT64", "int64_val", "flat_int64"),
    "UINT8": _Element("uint_contents", "DT_UINT8", "int_val", "flat_uint8"),
    "UINT16": _Element("uint_contents", "DT_UINT16", "int_val"),
    "UINT32": _Element("uint_contents", "DT_UINT32", "uint32_val"),
    "UINT64": _Element("uint64_contents", "DT_UINT64", "uint64_val"),
}
LARGEST_SAMPLE = 16
"""Most elements of an input in a call that fits on a line."""
LARGEST_EXAMPLE = 1024
"""Most elements of an input in a document or a form."""
LARGEST_BINARY = 4 * 1024 * 1024
"""Most elements of an input that is sent as binary data."""


class SampleCall(NamedTuple):
    """One call of a model in one protocol, over REST and gRPC. `json`: REST requires the JSON content type."""

    path: str
    body: dict[str, Any]
    method: str
    message: dict[str, Any]
    json: bool = False


class BinaryCall(NamedTuple):
    """A KServe V2 call over REST with binary tensors: `zeros` zero bytes after the JSON of `head`."""

    path: str
    head: dict[str, Any]
    zeros: int


def element_fields(datatype: str) -> dict[str, str]:
    """Return the fields for a datatype's elements in the messages of each protocol; empty without such a field.

    The keys "kserve", "tfserving" and "grps" are for fields, "dtype" for TensorFlow's name of the datatype.
    """
    element = _ELEMENTS.get(datatype)
    if element is None:
        return {}
    fields = {
        "kserve": element.kserve_field,
        "dtype": element.dtype,
        "tfserving": element.tensorflow_field,
        "grps": element.grps_field,
    }
    return {name: field for name, field in fields.items() if field}


def sample_calls(
    model: ModelMetadata,
    protocols: Collection[str],
    *,
    grps_customized_body: bool = False,
    largest: int = LARGEST_SAMPLE,
) -> list[SampleCall]:
    """Return a call in each of the protocols that can express one.

    Empty for a decoupled model, and for one whose inputs do not fit into `largest` elements.
    """
    samples = None if model.decoupled else made_samples(model, largest)
    if samples is None or not _all_have_fields(samples):
        return []
    calls = []
    if "kserve" in protocols:
        calls.append(_kserve_call(model.name, samples))
    # TensorFlow Serving's REST interface requires inputs, and has JSON for some types only (tfs 4.2).
    specs = [*model.signature.inputs, *model.signature.outputs]
    has_json = bool(samples) and all(spec.datatype in _ELEMENTS.keys() - {"UINT16"} for spec in specs)
    if "tfserving" in protocols and has_json:
        calls.append(_tfserving_call(model, samples))
    # In customised HTTP a grps project parses its requests itself.
    has_grps = "grps" in protocols and not grps_customized_body
    if has_grps and all(_ELEMENTS[sample.datatype].grps_field for sample in samples):
        tensors = {"gtensors": {"tensors": list(map(_grps_tensor, samples))}}
        calls.append(_grps_call({"model": f"{model.name}-{model.versions[-1]}", **tensors}))
    return calls


def first_call(
    model: ModelMetadata,
    protocols: Collection[str],
    largest: int = LARGEST_SAMPLE,
    *,
    grps_customized_body: bool = False,
) -> SampleCall | None:
    """Return the simplest call that the protocols have for the model: of plain JSON, or that of `sample_calls`.

    None as there, but decoupled models have one of plain JSON.
    """
    if "kserve" not in protocols:
        return next(iter(sample_calls(model, protocols, grps_customized_body=grps_customized_body)), None)
    samples = made_samples(model, largest)
    if samples is None or not _all_have_fields(samples):
        return None
    body = {sample.name: sample.nested() for sample in samples}
    call = _kserve_call(model.name, samples)
    return call._replace(path=f"/v2/models/{quote(model.name)}/predict", body=body)


def stream_call(model: ModelMetadata, largest: int = LARGEST_SAMPLE) -> SampleCall | None:
    """Return a call of a decoupled model, by `generate_stream` and ModelStreamInfer; see `sample_calls`."""
    samples = made_samples(model, largest)
    if samples is None or not _all_have_fields(samples):
        return None
    call = _kserve_call(model.name, samples)
    body = {sample.name: sample.flat()[0] if sample.count == 1 else sample.flat() for sample in samples}
    return call._replace(
        path=f"/v2/models/{quote(model.name)}/generate_stream",
        body=body,
        method="inference.GRPCInferenceService/ModelStreamInfer",
    )


def binary_call(model: ModelMetadata) -> BinaryCall | None:
    """Return a call whose inputs are zeros, or empty strings; they may be large, or have no JSON form."""
    samples = made_samples(model, LARGEST_BINARY)
    if samples is None:
        return None
    # Each string starts with its length in four bytes.
    sizes = [sample.count * (DATATYPES[sample.datatype].itemsize or 4) for sample in samples]
    heads = [
        _head(sample) | {"parameters": {"binary_data_size": n}} for sample, n in zip(samples, sizes, strict=True)
    ]
    head = {"inputs": heads, "parameters": {"binary_data_output": True}}
    return BinaryCall(f"/v2/models/{quote(model.name)}/infer", head, sum(sizes))


def made_samples(model: ModelMetadata, largest: int) -> list[Sample] | None:
    """Return the model's example, or a sample of each input.

    None if none is known to fit, or one has more than `largest` elements.
    """
    if of_example := samples_of_model(model, largest):
        return of_example
    if model.signature.any_tensors and not model.signature.inputs:
        return None  # The model takes any tensors, so no sample is known to fit.
    # No sample of Examples, or of JSON in strings, fits every model; sequences need an id, and a start.
    simple = model.signature.method == "predict" and not (model.speaks_json or model.sequences)
    return samples_of(model.signature.inputs, largest) if simple else None


def samples_of_model(model: ModelMetadata, largest: int) -> list[Sample]:
    """Return the model's own example; empty if it has none with at most `largest` elements in an input."""
    if model.signature.method != "predict" or model.sequences:
        return []
    return samples_of_example(model.example, model.signature, largest)


def _all_have_fields(samples: list[Sample]) -> bool:
    return all(sample.datatype in _ELEMENTS for sample in samples)


def _head(sample: Sample) -> dict[str, Any]:
    return {"name": sample.name, "datatype": sample.datatype, "shape": sample.shape}


def _kserve_call(name: str, samples: list[Sample]) -> SampleCall:
    heads = list(map(_head, samples))
    rest = [head | {"data": sample.flat()} for head, sample in zip(heads, samples, strict=True)]
    grpc = [
        head | {"contents": {_ELEMENTS[sample.datatype].kserve_field: sample.message_elements()}}
        for head, sample in zip(heads, samples, strict=True)
    ]
    return SampleCall(
        f"/v2/models/{quote(name)}/infer",
        {"inputs": rest},
        "inference.GRPCInferenceService/ModelInfer",
        {"model_name": name, "inputs": grpc},
    )


def _tfserving_call(model: ModelMetadata, samples: list[Sample]) -> SampleCall:
    # Without a name the signature named as the default is called, not the only one (tfs 3.2).
    is_default = model.signature_name == DEFAULT_SIGNATURE
    named = {} if is_default else {"signature_name": model.signature_name}
    tensors = {
        sample.name: {
            "dtype": _ELEMENTS[sample.datatype].dtype,
            "tensor_shape": {"dim": [{"size": dim} for dim in sample.shape]},
            _ELEMENTS[sample.datatype].tensorflow_field: sample.message_elements(),
        }
        for sample in samples
    }
    return SampleCall(
        f"/v1/models/{quote(model.name)}:predict",
        named | {"inputs": {sample.name: sample.nested() for sample in samples}},
        "tensorflow.serving.PredictionService/Predict",
        {"model_spec": {"name": model.name} | named, "inputs": tensors},
    )


def _grps_tensor(sample: Sample) -> dict[str, Any]:
    field = _ELEMENTS[sample.datatype].grps_field
    return {
        "name": sample.name,
        "dtype": field.upper().replace("FLAT", "DT"),
        "shape": sample.shape,
        field: sample.flat(),
    }


def _grps_call(message: dict[str, Any]) -> SampleCall:
    return SampleCall("/grps/v1/infer/predict", message, "grps.protos.v1.GrpsService/Predict", message, json=True)
