"""TensorFlow Serving's calls about models: metadata, status, configuration (tfs 3.5–3.7)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import google.protobuf
from google.protobuf import json_format

from triglot.core.call import Call
from triglot.core.errors import FailedPrecondition, InvalidArgument, ModelNotFound, NotFound, PermissionDenied
from triglot.dataplane.dataplane import DataPlane
from triglot.pb.tfserving import management_pb2, metadata_pb2
from triglot.protocols.tfserving.codec import decode_spec, spec_message
from triglot.protocols.tfserving.model_config import model_settings
from triglot.protocols.tfserving.service import find_servable, require_spec, signature_def_map
from triglot.repository.config.bounds import check_entries
from triglot.repository.config.settings import ModelSettings
from triglot.repository.manager.plan import State

log = logging.getLogger(__name__)

SIGNATURE_DEF = "signature_def"
_STATES = {
    State.START: management_pb2.ModelVersionStatus.START,
    State.LOADING: management_pb2.ModelVersionStatus.LOADING,
    State.READY: management_pb2.ModelVersionStatus.AVAILABLE,
    State.UNLOADING: management_pb2.ModelVersionStatus.UNLOADING,
    State.UNAVAILABLE: management_pb2.ModelVersionStatus.END,
}


class Models:
    """The calls of ModelService, and GetModelMetadata, for gRPC and REST.

    `max_entries`: most entries in all lists and tables of a configuration in a request.
    """

    def __init__(self, dataplane: DataPlane, max_entries: int) -> None:
        self._dataplane = dataplane
        self._max_entries = max_entries

    async def metadata(
        self, request: metadata_pb2.GetModelMetadataRequest, call: Call
    ) -> metadata_pb2.GetModelMetadataResponse:
        """Return all signatures of the model, callable or not (tfs 3.5). Raise `ServingError`."""
        spec = require_spec(decode_spec(request))
        if not request.metadata_field:
            raise InvalidArgument("GetModelMetadataRequest must specify at least one metadata_field")
        for field in request.metadata_field:
            if field != SIGNATURE_DEF:
                raise InvalidArgument(f"Metadata field {field} is not supported")
        with find_servable(self._dataplane, call.permission, spec) as servable:
            response = metadata_pb2.GetModelMetadataResponse(
                model_spec=spec_message(servable.name, servable.version)
            )
            definitions = signature_def_map(servable.signatures, servable.model.signature_defs)
            response.metadata[SIGNATURE_DEF].Pack(definitions)
        return response

    async def status(
        self, request: management_pb2.GetModelStatusRequest, call: Call
    ) -> management_pb2.GetModelStatusResponse:
        """Return the state of every known version, highest first, or of the requested one only (tfs 3.6).

        Raise `NotFound` for a model without any, with the reason.
        """
        spec = require_spec(decode_spec(request))
        try:
            versions = self._dataplane.statuses(call.permission, spec.name)
        except ModelNotFound:
            problem = self._dataplane.broken(call.permission).get(spec.name)
            why = "" if problem is None else f": {problem.message}"
            raise NotFound(f"Could not find any versions of model {spec.name}{why}") from None
        if spec.version is not None:
            named = [version for version in versions if version.files.version == spec.version]
            if not named and spec.version:  # Clients of OpenVINO Model Server send 0 for all.
                raise NotFound(f"Could not find version {spec.version} of model {spec.name}")
            versions = named or versions
        response = management_pb2.GetModelStatusResponse()
        for version in versions:
            # A version whose load will be retried is loading, in TensorFlow Serving's terms.
            retried = version.retry_at is not None and version.state is State.UNAVAILABLE
            state = _STATES[State.LOADING if retried else version.state]
            status = response.model_version_status.add(version=version.files.version, state=state, status={})
            if (failure := version.failure) is not None and not retried:
                # Both enumerations have gRPC's numbers.
                code: Any = failure.code
                status.status.error_code = code
                status.status.error_message = failure.message
            elif state == _STATES[State.READY]:
                status.status.error_message = version.warnings
        return response

    async def reload(
        self, request: management_pb2.ReloadConfigRequest, call: Call
    ) -> management_pb2.ReloadConfigResponse:
        """Replace the whole list of models, or raise and change nothing (tfs 3.7)."""
        try:
            platforms = self._dataplane.platforms(call.permission)
            models = await self._dataplane.off_loop(partial(self._settings, request.config, platforms))
            await self._dataplane.reload(call.permission, models)
        except (InvalidArgument, FailedPrecondition, PermissionDenied) as error:
            log.warning("rejected a request to replace the model list: %s", error.message)
            raise
        response = management_pb2.ReloadConfigResponse(status={})
        for name in request.metric_names:
            response.metric.add(name=name, int64_value_increase=0)
        return response

    def _settings(self, config: Any, platforms: Mapping[str, str]) -> list[ModelSettings]:
        check_entries(config, self._max_entries, "the configuration in the request")
        return model_settings(config, platforms)


# protobuf 5.26 renamed the option.
_WITH_DEFAULTS: dict[str, Any] = (
    {"including_default_value_fields": True}
    if google.protobuf.__version__.startswith("4.")
    else {"always_print_fields_with_no_presence": True}
)


def _print(message: Any) -> str:
    """Return a message as JSON: all fields, protocol names, 64-bit numbers as strings, indented by one space."""
    values = json_format.MessageToDict(message, preserving_proto_field_name=True, **_WITH_DEFAULTS)
    return json.dumps(_ordered(values, message.DESCRIPTOR), indent=1, ensure_ascii=False) + "\n"


def _ordered(values: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    """Return the fields in the order of their numbers; Python's printer puts defaults last."""
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
        return {key: _ordered_value(item, inner) for key, item in value.items()}
    return [_ordered(item, message) for item in value] if isinstance(value, list) else _ordered(value, message)


def encode_status(response: management_pb2.GetModelStatusResponse) -> bytes:
    """Return the response to GET /v1/models/MODEL."""
    return _print(response).encode()


def encode_metadata(response: metadata_pb2.GetModelMetadataResponse) -> bytes:
    """Return the response to GET /v1/models/MODEL/metadata; the value nests twice, as clients expect."""
    spec = response.model_spec
    described = {"name": spec.name, "version": str(spec.version.value), "signature_name": spec.signature_name}
    definitions = metadata_pb2.SignatureDefMap()
    response.metadata[SIGNATURE_DEF].Unpack(definitions)
    return (
        f'{{\n"model_spec":{json.dumps(described, indent=1, ensure_ascii=False)}\n,\n'
        f'"metadata": {{"signature_def": {_print(definitions)}}}\n}}\n'
    ).encode()
