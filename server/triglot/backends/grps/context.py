"""`GrpsContext`: the context of one request, used by a grps project's code (grps 6.3).

Contexts are thread-safe. Flags are plain attributes, each written in one step. Responses are sent under a lock, so
that none is sent after the final one, and the final one is sent last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from triglot.backends.grps.http_values import flask_request, flask_response, http_response
from triglot.backends.grps.messages import is_message, mark_success
from triglot.core.call import Call
from triglot.core.http import HttpResponse
from triglot.core.types import HttpChunk

if TYPE_CHECKING:
    import flask


class GrpsContext:
    """The context of one request. Without arguments, in a project's tests, it neither streams nor disconnects.

    `http_request` is a Flask request of customised HTTP. `grpc_context` exists only for compatibility with grps.
    """

    def __init__(self, grpc_context: Any = None, http_request: flask.Request | None = None) -> None:
        self._grpc_context = grpc_context
        self._http_request = http_request
        self._http_response: HttpResponse | None = None
        self._call: Call | None = None
        self._streaming = False
        self._finished = False
        self._is_abandoned = False
        self._sending = threading.Lock()
        self._on_finish: Callable[[], None] | None = None
        self._has_err = False
        self._err_msg: Any = ""
        self._user_data: dict[Any, Any] = {}
        self._converter: Any = None
        self._inferer: Any = None

    @classmethod
    def of(cls, call: Call) -> Self:
        """Return the context of a call."""
        exchange = call.exchange
        http = None if exchange is None else exchange.http
        context = cls(http_request=None if http is None else flask_request(http))
        context._call = call
        context._streaming = exchange is not None and exchange.streaming
        return context

    # --- Data of the request, shared by all nodes of a DAG ---

    def put_user_data(self, key: Any, value: Any) -> None:
        """Store a value for this request."""
        self._user_data[key] = value

    def get_user_data(self, key: Any) -> Any:
        """Return the value stored under `key`, or None."""
        return self._user_data.get(key)

    # --- Streaming ---

    def if_streaming(self) -> bool:
        """Whether responses are streamed; False after the final one."""
        return self._streaming and not self._finished

    def stream_respond(self, msg: Any, final: bool = False) -> None:
        """Send one response, the last one if it is `final`; block while the client reads slowly.

        Does nothing if the request does not stream. Raise `ValueError` for anything but a GrpsMessage.
        """
        if not is_message(msg):
            raise ValueError(f"stream_respond: expected a GrpsMessage, got {type(msg).__name__}")
        mark_success(msg)
        if self.if_streaming():
            self._send(msg.SerializeToString(), final)

    def stream_respond_with_postprocess(self, inp: Any, final: bool = False) -> None:
        """Send the converter's `postprocess` of `inp`, as `stream_respond` does.

        Raise `ValueError` for a model without a converter.
        """
        if self._converter is None:
            raise ValueError("stream_respond_with_postprocess: the model has no converter")
        self.stream_respond(self._converter.postprocess(inp, self), final)

    def customized_http_stream_respond(self, msg: str | bytes, final: bool = False) -> None:
        """Send text or bytes as one chunk of customised HTTP, as `stream_respond` does.

        Raise `ValueError` for other types, and outside of customised HTTP.
        """
        if not isinstance(msg, str | bytes):
            raise ValueError(f"customized_http_stream_respond: expected str or bytes, got {type(msg).__name__}")
        if self._http_request is None:
            raise ValueError("customized_http_stream_respond: the request did not arrive as customized HTTP")
        if self.if_streaming():
            self._send(HttpChunk(msg.encode() if isinstance(msg, str) else msg), final)

    def _send(self, answer: bytes, final: bool) -> None:
        with self._sending:
            if self._finished or self._call is None:
                return
            # An empty chunk would end a chunked body; an empty message is valid.
            if (answer or not isinstance(answer, HttpChunk)) and not self._call.respond(answer):
                self._is_abandoned = True
            if final:
                self._finished = True
                self._call.finish()
                if self._on_finish is not None:
                    self._on_finish()

    # --- Errors ---

    def set_err_msg(self, err_msg: Any) -> None:
        """Make the request fail with this text after the current step."""
        self._err_msg = err_msg
        self._has_err = True

    def get_err_msg(self) -> Any:
        """Return the text that was set, or ""."""
        return self._err_msg

    def set_has_err(self, has_err: bool) -> None:
        """Set whether the request fails after the current step."""
        self._has_err = has_err

    def has_err(self) -> bool:
        """Whether the request fails."""
        return self._has_err

    # --- Customised HTTP ---

    def get_http_request(self) -> flask.Request | None:
        """Return the request of customised HTTP; None for any other call."""
        return self._http_request

    def set_http_response(self, response: Any) -> None:
        """Set the response: str (text/plain), bytes (octet-stream), (str or bytes, status, headers), or Flask's.

        Raise `ValueError` for other types.
        """
        self._http_response = http_response(response)

    def get_http_response(self) -> flask.Response | None:
        """Return the response that was set as a Flask response; None if none was."""
        return None if self._http_response is None else flask_response(self._http_response)

    # --- Other ---

    def if_disconnected(self) -> bool:
        """Whether the client has disconnected."""
        return self._is_abandoned or (self._call is not None and self._call.cancelled)

    @property
    def converter(self) -> Any:
        """The converter of the current model, or None."""
        return self._converter

    @property
    def inferer(self) -> Any:
        """The inferer of the current model."""
        return self._inferer

    # --- For the framework ---

    @property
    def finished(self) -> bool:
        """Whether the final response is sent."""
        return self._finished

    @property
    def call(self) -> Call | None:
        """The call; None in a project's own tests."""
        return self._call

    @property
    def response(self) -> HttpResponse | None:
        """The response of customised HTTP, if one was set."""
        return self._http_response

    def enter(self, inferer: Any, converter: Any) -> None:
        """Set the current model."""
        self._inferer = inferer
        self._converter = converter

    def close(self) -> None:
        """Close uploaded files at the end of the request."""
        if self._http_request is not None:
            self._http_request.close()

    def on_finish(self, finished: Callable[[], None]) -> None:
        """Set a callback for when the final response is sent."""
        self._on_finish = finished
