"""KServe V2's REST routes: the calls of `service`, with JSON requests and responses (spec 3.1, 3.2, 3.6)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.core.running import Defer, Running, Sink
from triglot.core.types import InferenceResponse, TensorSpec
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.json.dialect import DEFAULT_LIMITS, SIZE_OPTION, JsonLimits, type_name
from triglot.protocols.json.text import read_body, without_nulls
from triglot.protocols.kserve import openapi as api
from triglot.protocols.kserve.extension import MODEL, MODEL_PATHS
from triglot.protocols.kserve.rest import (
    RestInfer,
    body_limit,
    decode_infer,
    decode_raw,
    encode_infer,
    is_raw,
    json_length,
    text_size,
)
from triglot.protocols.kserve.service import FILE_PREFIX, NO_FILES, KServe, UnaryInference
from triglot.protocols.rows import MAX_CONTROL_BYTES, InferenceHandler, Route
from triglot.protocols.wire import check_control_size

REPOSITORIES = ("/v2/repository", "/v2/repository/{repository}")
"""REST paths of the repository calls; a repository's name is rejected (spec 3.1)."""
HTTP_ENDPOINT = "HTTP end point"
COMPRESS_FROM_BYTES = 1024
"""Smaller responses fit into one packet anyway."""
_Answered = tuple[InferenceResponse, RestInfer]
"""A response, and the request that says how to encode it."""


def kserve_routes(service: KServe, limits: JsonLimits = DEFAULT_LIMITS) -> list[Route]:
    """Return the rows of the REST interface."""

    def decode(http: HttpRequest) -> RestInfer:
        # The model is looked up first: the body may be wrong because the model's name is.
        signature = service.require_model(http.permission, http.path["model"], http.path.get("version", ""))
        return decode_raw(http, signature) if is_raw(http) else decode_infer(http, limits)

    health, metadata, index = Operation.HEALTH, Operation.METADATA, Operation.MODEL_INDEX
    live, ready = pb.ServerLiveRequest(), pb.ServerReadyRequest()
    server_metadata = _fixed(pb.ServerMetadataRequest())
    rows = [
        Route(
            "GET",
            "/v2/health/live",
            health,
            _fixed(live),
            service.server_live,
            _encode_live,
            documented=(api.LIVE,),
        ),
        Route(
            "GET",
            "/v2/health/ready",
            health,
            _fixed(ready),
            service.server_ready,
            _encode_ready,
            documented=(api.READY,),
        ),
        Route(
            "GET", "/v2/models", index, _fixed(None), service.model_names, _encode_names, documented=(api.NAMES,)
        ),
    ]
    rows += [
        Route(
            "GET",
            path,
            metadata,
            server_metadata,
            service.server_metadata,
            _encode_server_metadata,
            documented=(api.SERVER,),
        )
        for path in ("/v2", "/v2/")
    ]
    rows += [
        Route(
            "POST",
            f"{repository}/index",
            index,
            _decode_index,
            service.repository_index,
            _encode_index,
            documented=(api.INDEX,),
        )
        for repository in REPOSITORIES
    ]
    for verb, request_class, change in (
        ("load", pb.RepositoryModelLoadRequest, service.load_model),
        ("unload", pb.RepositoryModelUnloadRequest, service.unload_model),
    ):
        rows += [
            Route(
                "POST",
                f"{repository}/models/{{model}}/{verb}",
                Operation.MODEL_CONTROL,
                partial(_decode_change, request_class),
                change,
                partial(_encode_changed, verb),
                body_limit=partial(_change_limit, service.max_upload if verb == "load" else 0),
                documented=(api.CHANGES[verb],),
            )
            for repository in REPOSITORIES
        ]
    for path in MODEL_PATHS:
        ready_of, metadata_of = (
            partial(_named, pb.ModelReadyRequest),
            partial(_named, pb.ModelMetadataRequest),
        )
        rows += [
            Route(
                "GET",
                path + "/ready",
                health,
                ready_of,
                service.require_model_ready,
                _encode_model_ready,
                documented=(api.MODEL_READY,),
            ),
            Route(
                "GET",
                path,
                metadata,
                metadata_of,
                service.model_and_columns,
                _encode_model_metadata,
                documented=(api.MODEL,),
            ),
            Route(
                "POST",
                path + "/infer",
                Operation.INFER,
                decode,
                None,
                _encode_infer,
                text_size=json_length,
                answer_size=_text_size,
                body_limit=partial(body_limit, limits),
                limit_option=SIZE_OPTION,
                compress_from=COMPRESS_FROM_BYTES,
                name="infer",
                inference=RestInference(service.inference(HTTP_ENDPOINT)),
                documented=(api.INFER,),
                of_model=api.infer_of if path == MODEL else None,
            ),
        ]
    # Extensions first: a model named "stats" cannot be reached (spec 3.1).
    return [route for extension in service.extensions for route in extension.routes()] + rows


class RestInference(InferenceHandler):
    """The handler of REST: the `inference` of gRPC, for requests that say how to encode their responses."""

    def __init__(self, inference: UnaryInference) -> None:
        self._inference = inference

    def start(self, rest: RestInfer, call: Call, sink: Sink, defer: Defer | None = None) -> Running:
        return self._inference.start(rest.request, call, sink, defer)

    def answer(self, response: InferenceResponse, rest: RestInfer) -> _Answered:
        return response, rest

    def map_error(self, error: ServingError, rest: RestInfer, call: Call) -> ServingError:
        return self._inference.map_error(error, rest.request, call)


def _encode_infer(answered: _Answered, _: RestInfer) -> HttpResponse:
    return encode_infer(*answered)


def _text_size(answered: _Answered) -> int:
    return text_size(*answered)


def _fixed(request: Any) -> Callable[[HttpRequest], Any]:
    return lambda _: request


def _named(request_class: Any, http: HttpRequest) -> Any:
    return request_class(name=http.path["model"], version=http.path.get("version", ""))


def _decode_index(http: HttpRequest) -> pb.RepositoryIndexRequest:
    # tritonclient sends an empty body.
    ready = read_body(bytes(http.body) or b"{}", "", without_nulls).get("ready", False)
    if not isinstance(ready, bool):
        raise InvalidArgument(f"'ready' must be true or false, got {type_name(ready)}")
    return pb.RepositoryIndexRequest(repository_name=http.path.get("repository", ""), ready=ready)


def _encode_index(reply: pb.RepositoryIndexResponse, _: Any) -> HttpResponse:
    models = [
        {"name": model.name, "version": model.version, "state": model.state, "reason": model.reason}
        for model in reply.models
    ]
    return HttpResponse(dumps([{key: value for key, value in model.items() if value} for model in models]))


def _decode_change(request_class: Any, http: HttpRequest) -> Any:
    """Decode a load or unload. Raise `InvalidArgument` for unexpected keys or types of parameters."""
    request = request_class(repository_name=http.path.get("repository", ""), model_name=http.path["model"])
    fields = read_body(bytes(http.body) or b"{}", "", without_nulls)
    parameters = fields.pop("parameters", {})
    for key in fields:
        raise InvalidArgument(f"unexpected key '{key}', expected 'parameters'")
    if not isinstance(parameters, dict):
        raise InvalidArgument(f"'parameters' must be an object, got {type_name(parameters)}")
    for key, value in without_nulls(parameters).items():
        if not isinstance(value, bool | str):
            raise InvalidArgument(f"parameter '{key}' must be a string or a boolean, got {type_name(value)}")
        try:
            if isinstance(value, str) and key.startswith(FILE_PREFIX):
                request.parameters[key].bytes_param = base64.b64decode(value, validate=True)
                continue
            setattr(request.parameters[key], "bool_param" if isinstance(value, bool) else "string_param", value)
        except binascii.Error as error:
            raise InvalidArgument(f"parameter '{key}': expected base64, got something else: {error}") from None
        except ValueError:  # JSON can hold strings that are not valid UTF-8.
            raise InvalidArgument(f"parameter '{key}' has a lone surrogate, expected Unicode text") from None
    return request


def _change_limit(max_upload: int, headers: Mapping[str, str]) -> int:
    length = headers.get("content-length", "")
    if not max_upload:
        check_control_size(int(length) if length.isdecimal() else 0, f": {NO_FILES}")
    return max_upload or MAX_CONTROL_BYTES


def _encode_changed(verb: str, name: str, _: Any) -> HttpResponse:
    """Encode KServe's response; Triton's has no body, and its clients do not read one (spec 3.9)."""
    return HttpResponse(dumps({"name": name, verb: True}))


def _encode_names(names: list[str], _: Any) -> HttpResponse:
    return HttpResponse(dumps({"models": names}))


def _encode_model_ready(model: pb.ModelReadyRequest, _: Any) -> HttpResponse:
    return HttpResponse(dumps({"name": model.name, "ready": True}))


def _encode_live(reply: pb.ServerLiveResponse, _: Any) -> HttpResponse:
    return HttpResponse(dumps({"live": reply.live}))


def _encode_ready(reply: pb.ServerReadyResponse, _: Any) -> HttpResponse:
    # "ready" is KServe's key, "live" the one in the protocol's text (spec 3.6).
    body = dumps({"ready": reply.ready, "live": True})
    return HttpResponse(body, status=200 if reply.ready else 503)


def _encode_server_metadata(reply: pb.ServerMetadataResponse, _: Any) -> HttpResponse:
    return HttpResponse(
        dumps({"name": reply.name, "version": reply.version, "extensions": list(reply.extensions)})
    )


def _encode_model_metadata(
    described: tuple[pb.ModelMetadataResponse, Sequence[TensorSpec]], _: Any
) -> HttpResponse:
    reply, columns = described
    body = {
        "name": reply.name,
        "versions": list(reply.versions),
        "platform": reply.platform,
        "inputs": list(map(_tensor, reply.inputs)),
        "outputs": list(map(_tensor, reply.outputs)),
    }
    if columns:
        body["columns"] = [{"name": column.name, "datatype": column.datatype} for column in columns]
    return HttpResponse(dumps(body))


def _tensor(tensor: pb.ModelMetadataResponse.TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
