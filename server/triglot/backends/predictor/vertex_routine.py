"""Vertex AI's custom prediction routines (tfs 7.7), named by a `predictor.toml` in the model's folder:

    prediction_class = "predictor.MyPredictor"
    handler_class = "handler.MyHandler"

A predictor has `load(artifacts_uri)`, `preprocess`, `predict` and `postprocess`, and may be all there is. A
handler is constructed as `MyHandler(artifacts_uri, predictor=MyPredictor)`; its `handle(request)` takes a request
of Starlette's, and returns a response of Starlette's or FastAPI's. Both classes are duck-typed.

They are written for a container of their own, and use the working directory: Google's own predictors copy the
artifacts there, and read what they find. So an instance is a process by default, and works in a temporary folder.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from triglot.backends.foreign_classes import CodeLoop
from triglot.backends.json_values import parse, serialize
from triglot.core.call import Call
from triglot.core.errors import (
    Internal,
    InvalidArgument,
    MissingDependency,
    NeedsProcess,
    is_serving_error,
    text_of,
)
from triglot.core.http import error_of
from triglot.core.tensor import Array, object_array
from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.model.signature import DEFAULT_SIGNATURE, Signature

log = logging.getLogger(__name__)

HTTP = "http"
JSON_FIELDS = {"content-type": "application/json"}
_OF_CONNECTIONS = ("connection", "content-length", "transfer-encoding")
"""Header fields that the server sets itself."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A response; names of its header `fields` are in lower case."""

    body: bytes
    fields: Mapping[str, str]
    status: int = 200


def model_of(
    predictor_class: Any, handler_class: Any, file: Path, config: ModelConfig, opened: ExitStack
) -> Model:
    """Return the model of a predictor, or of a handler, which may have none; what is `opened` is closed with it.

    Raise `NeedsProcess` unless the configuration says where it runs, `MissingDependency` for a handler without
    Starlette, and what the classes raise.
    """
    if not config.execution:
        raise NeedsProcess(f"{file}: execution 'process': expected to be loaded by a server", "process", None)
    artifacts = str(file.parent.absolute())
    if config.owns_process:
        os.chdir(opened.enter_context(TemporaryDirectory(prefix="triglot-routine-")))
    if handler_class is None:
        predictor = predictor_class()
        predictor.load(artifacts)
        return VertexPredictor(predictor, opened.pop_all())
    try:
        request_class = importlib.import_module("starlette.requests").Request
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{file}: handler_class needs starlette, which is not installed; run: pip install fastapi"
        ) from error
    handler = handler_class(artifacts, predictor=predictor_class)
    loop = CodeLoop(config.name_for(file))
    opened.callback(loop.close)
    return VertexHandler(handler, request_class, loop, opened.pop_all())


class VertexRoutine(Model):
    """A model that takes JSON, and whole HTTP messages by the signature `http`."""

    platform = "predictor"
    speaks_json = True
    speaks_http = True
    signatures = {
        DEFAULT_SIGNATURE: Signature(
            [TensorSpec("instances", "BYTES", [-1]), TensorSpec("parameters", "BYTES", [1])],
            [TensorSpec("predictions", "BYTES", [1])],
            defaults={"parameters": object_array([b"{}"], [1])},
        ),
        HTTP: Signature(
            [TensorSpec("body", "BYTES", [1]), TensorSpec("headers", "BYTES", [1])],
            [
                TensorSpec("body", "BYTES", [1]),
                TensorSpec("headers", "BYTES", [1]),
                TensorSpec("status", "INT32", [1]),
            ],
        ),
    }

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Array]:
        """Call the routine.

        Raise `InvalidArgument` for invalid JSON, `Internal` for a result without JSON form or predictions and,
        with its text, for an exception of a predictor; a handler's errors have the code of their HTTP status.
        """
        if call.signature_name == HTTP:
            answer = self.answer(inputs["body"].item(), parse("headers", inputs["headers"].item()))
            fields = json.dumps(dict(answer.fields)).encode()
            texts = {"body": object_array([answer.body], [1]), "headers": object_array([fields], [1])}
            return {**texts, "status": np.array([answer.status], np.int32)}
        elements = inputs["instances"].ravel().tolist()
        values = {"instances": [parse(f"instances[{at}]", element) for at, element in enumerate(elements)]}
        if parameters := parse("parameters", inputs["parameters"].item()):
            values["parameters"] = parameters
        result = self.results(values)
        if not isinstance(result, dict) or "predictions" not in result:
            raise Internal(f"the routine returned {type(result).__name__}, expected a dict with 'predictions'")
        return {"predictions": object_array([serialize("the routine", result["predictions"])], [1])}

    @abstractmethod
    def answer(self, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        """Return the response to an HTTP request."""

    @abstractmethod
    def results(self, values: dict[str, Any]) -> Any:
        """Return the result for a request's JSON."""

    def close(self) -> None:
        """Remove the modules, the unpacked packages and the working directory."""
        self._opened.close()


class VertexPredictor(VertexRoutine):
    """A predictor without a handler: JSON in, JSON out."""

    def __init__(self, predictor: Any, opened: ExitStack) -> None:
        super().__init__(opened)
        self._steps: list[Callable[[Any], Any]] = [
            getattr(predictor, name)
            for name in ("preprocess", "predict", "postprocess")
            if name == "predict" or hasattr(predictor, name)
        ]
        self._name = type(predictor).__qualname__

    def _run(self, values: Any) -> Any:
        for step in self._steps:
            values = step(values)
        return values

    def answer(self, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        values = parse("the body", body)
        try:
            return HttpAnswer(serialize("postprocess()", self._run(values)), JSON_FIELDS)
        except Exception as error:
            return _failure(error, self._name, "The following exception has occurred: {}. Arguments: {}.")

    def results(self, values: dict[str, Any]) -> Any:
        try:
            return self._run(values)
        except Exception as error:
            if is_serving_error(error):
                raise
            if (answer := _of_fastapi(error)) is not None:
                raise error_of(answer.status, answer.body) from error
            log.error("%s failed", self._name, exc_info=error)
            raise Internal(text_of(error) or type(error).__name__) from error


class VertexHandler(VertexRoutine):
    """A handler, whose requests and responses are Starlette's."""

    def __init__(self, handler: Any, request_class: Any, loop: CodeLoop, opened: ExitStack) -> None:
        super().__init__(opened)
        self._handler = handler
        self._request_class = request_class
        self._loop = loop
        self._name = type(handler).__qualname__

    def answer(self, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        return self._loop.run(self._handle(body, headers))

    async def _handle(self, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.Event().wait()  # The client does not disconnect.
            return messages.pop()

        fields = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "query_string": b"",
            "headers": fields,
        }
        try:
            response = self._handler.handle(self._request_class(scope, receive))
            if inspect.isawaitable(response):
                response = await response
            if not callable(response):
                return HttpAnswer(serialize("handle()", response), JSON_FIELDS)
            return await _sent(response, scope, receive)
        except Exception as error:
            return _failure(error, self._name, "An exception {} occurred. Arguments: {}.")

    def results(self, values: dict[str, Any]) -> Any:
        answer = self.answer(serialize("the request", values), JSON_FIELDS)
        if answer.status >= 400:
            raise error_of(answer.status, answer.body)
        try:
            return parse("handle()", answer.body)
        except InvalidArgument as error:
            raise Internal(error.message) from None


async def _sent(response: Any, scope: dict[str, Any], receive: Callable[[], Any]) -> HttpAnswer:
    """Return what a response of Starlette sends."""
    status, fields, body = 200, dict[str, str](), bytearray()

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            fields.update(
                {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
            )
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))

    await response(scope, receive, send)
    return HttpAnswer(
        bytes(body), {name: text for name, text in fields.items() if name not in _OF_CONNECTIONS}, status
    )


def _failure(error: Exception, name: str, text: str) -> HttpAnswer:
    """Return the response for an exception, as Vertex AI's server of these routines forms it."""
    if is_serving_error(error):
        raise error
    if (answer := _of_fastapi(error)) is not None:
        return answer
    log.error("%s failed", name, exc_info=error)
    detail = text.format(type(error).__name__, getattr(error, "args", ()))
    return HttpAnswer(json.dumps({"detail": detail}).encode(), JSON_FIELDS, 500)


def _of_fastapi(error: Exception) -> HttpAnswer | None:
    """Return the response that an HTTPException of FastAPI's or Starlette's means, None for any other."""
    status, detail = getattr(error, "status_code", None), getattr(error, "detail", None)
    if not isinstance(status, int) or detail is None:
        return None
    fields = {name.lower(): value for name, value in (getattr(error, "headers", None) or {}).items()}
    return HttpAnswer(serialize("the exception", {"detail": detail}), {**JSON_FIELDS, **fields}, status)
