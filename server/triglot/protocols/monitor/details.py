"""The page's document for one model, which also feeds its form for calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from triglot.core.errors import ModelNotLoaded, ServingError, as_serving_error
from triglot.core.operation import Permission
from triglot.core.types import TensorSpec
from triglot.dataplane.dataplane import DataPlane
from triglot.model.samples import Sample, sample_of, samples_of_example
from triglot.model.signature import Signature
from triglot.protocols.monitor.overview import Document
from triglot.protocols.sample_calls import LARGEST_EXAMPLE, element_fields
from triglot.repository.config.as_json import json_object
from triglot.repository.config.completed import completed
from triglot.scheduling.servable import Servable

MOST_LABELS = 2048
"""Most labels of an output that the page shows."""
JSON_TEXT = "{}"
"""Sample of a BYTES element that the model parses as JSON."""


async def model_details(dataplane: DataPlane, permission: Permission, name: str, version: str) -> Document:
    """Return the model's `labels`, and in `serves` the version, or the default one for ""; None with an `error`.

    Raise `PermissionDenied`.
    """
    labels = dataplane.labels_of(permission, name)
    try:
        servable = dataplane.servable(permission, name, version)
        loaded = dataplane.loaded_from(permission, name, version)
    except (ModelNotLoaded, ServingError) as error:
        cause = dataplane.broken(permission).get(name) or as_serving_error(error, name)
        return {"name": name, "labels": labels, "error": cause.message, "serves": None}
    config = await dataplane.off_loop(lambda: json_object(completed(loaded)))
    return {"name": name, "labels": labels, "error": "", "serves": {**_served(servable), "config": config}}


def encode_details(document: Document) -> bytes:
    """Return the document as JSON; lone surrogates in names are escaped."""
    return json.dumps(document).encode()


def _served(servable: Servable) -> Document:
    speaks_json = servable.model.speaks_json
    example = servable.model.example
    files = _files_in(example)
    own = {sample.name: sample for sample in samples_of_example(example, servable.signature, LARGEST_EXAMPLE)}
    return {
        "version": servable.version,
        "platform": servable.platform,
        "decoupled": servable.decoupled,
        "sequences": servable.sequences is not None,
        "nodes": Counter(servable.nodes),
        "speaks_json": speaks_json,
        "default_signature": servable.default_signature,
        "signatures": {
            name: _signature(
                signature,
                servable.labels,
                files,
                own if name == servable.default_signature else {},
                speaks_json=speaks_json,
            )
            for name, signature in servable.signatures.items()
        },
    }


def _files_in(example: Any) -> set[str]:
    """Return the names of inputs that are not text in a model's `example`."""
    inputs = example if isinstance(example, Mapping) else next(iter(example), {})
    return {name for name, value in inputs.items() if any(map(_is_binary, np.ravel(np.asarray(value, object))))}


def _is_binary(element: Any) -> bool:
    if not isinstance(element, bytes):
        return False
    try:
        element.decode()
    except UnicodeDecodeError:
        return True
    return False


def _signature(
    signature: Signature,
    labels: Mapping[str, Sequence[bytes]],
    files: set[str],
    own: Mapping[str, Sample],
    *,
    speaks_json: bool,
) -> Document:
    return {
        "method": signature.method,
        "inputs": [
            _tensor(spec)
            | {
                "optional": spec.name in signature.may_lack,
                "sample": _sample(spec, own.get(spec.name), speaks_json=speaks_json)
                | {"binary": spec.name in files},
            }
            for spec in signature.inputs
        ],
        "outputs": [_tensor(spec) | {"labels": _texts(labels.get(spec.name, ()))} for spec in signature.outputs],
    }


def _texts(labels: Sequence[bytes]) -> list[str]:
    """Return the labels of an output; none if there are too many to be fetched each second."""
    return [label.decode(errors="replace") for label in labels] if len(labels) <= MOST_LABELS else []


def _tensor(spec: TensorSpec) -> Document:
    shape = None if spec.shape is None else list(spec.shape)
    return {
        "name": spec.name,
        "datatype": spec.datatype,
        "shape": shape,
        "fields": element_fields(spec.datatype),
    }


def _sample(spec: TensorSpec, own: Sample | None, *, speaks_json: bool) -> Document:
    """Return the `shape` and the nested `data` of the model's `own` sample, or of a made one.

    A free rank is one dim. The data are None if too large or unknown.
    """
    if own is not None:
        return {"shape": own.shape, "data": own.nested()}
    shape = [1] if spec.shape is None else [1 if dim == -1 else dim for dim in spec.shape]
    sample = sample_of(replace(spec, shape=shape))
    data: Any = None
    if sample is not None and sample.count <= LARGEST_EXAMPLE:
        data = sample.nested()
        if speaks_json and spec.datatype == "BYTES":
            data = [JSON_TEXT] * sample.count
    return {"shape": shape, "data": data}
