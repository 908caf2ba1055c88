"""Status and metadata in the form of TensorFlow Serving's REST interface (tfs 4.6). Pure functions."""

from __future__ import annotations

import json
from typing import Any

import google.protobuf
from google.protobuf import json_format

from triglot.pb.tfserving import management_pb2, metadata_pb2
from triglot.protocols.tfserving.models import SIGNATURE_DEF

# protobuf 5.26 renamed the option.
_WITH_DEFAULTS: dict[str, Any] = (
    {"including_default_value_fields": True}
    if google.protobuf.__version__.startswith("4.")
    else {"always_print_fields_with_no_presence": True}
)


def _print(message: Any) -> str:
    """Returns a message as JSON: all fields, protocol names, 64-bit numbers as strings, indented by one space."""
    values = json_format.MessageToDict(message, preserving_proto_field_name=True, **_WITH_DEFAULTS)
    return json.dumps(_ordered(values, message.DESCRIPTOR), indent=1, ensure_ascii=False) + "\n"


def _ordered(values: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    """Returns the fields in the order of their numbers; Python's printer puts defaults last."""
    ordered: dict[str, Any] = {}
    for field in sorted(descriptor.fields, key=lambda field: field.number):
        if field.name in values:
            ordered[field.name] = _ordered_value(values[field.name], field.message_type)
    return ordered


def _ordered_value(value: Any, message: Any) -> Any:
    if message is None:
        return value
    if message.GetOptions().map_entry:
        inner = message.fields_by_name["value"].message_type
        return {key: _ordered_value(one, inner) for key, one in value.items()}
    return [_ordered(one, message) for one in value] if isinstance(value, list) else _ordered(value, message)


def encode_status(response: management_pb2.GetModelStatusResponse) -> bytes:
    """Returns the response to GET /v1/models/MODEL."""
    return _print(response).encode()


def encode_metadata(response: metadata_pb2.GetModelMetadataResponse) -> bytes:
    """Returns the response to GET /v1/models/MODEL/metadata; the value nests twice, as clients expect."""
    spec = response.model_spec
    described = {"name": spec.name, "version": str(spec.version.value), "signature_name": spec.signature_name}
    definitions = metadata_pb2.SignatureDefMap()
    response.metadata[SIGNATURE_DEF].Unpack(definitions)
    return (
        f'{{\n"model_spec":{json.dumps(described, indent=1, ensure_ascii=False)}\n,\n'
        f'"metadata": {{"signature_def": {_print(definitions)}}}\n}}\n'
    ).encode()
