"""`GrpsContext`: what a grps project's code knows of one request, and says about it (grps 6.3).

Strategy: any thread may use a context. Flags are plain attributes, each written in one step; what is sent goes
through a lock, so that nothing is sent after the final answer, and nothing before it comes later.
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
    """One request. Without arguments, as in a project's own tests, it neither streams nor is ever disconnected.

    `http_request` is a Flask request of customised HTTP. `grpc_context` is there for code that names it.
    """

    def __init__(self, grpc_context: Any = None, http_request: flask.Request | None = None) -> None:
        self._grpc_context = grpc_context
        self._http_request = http_request
        self._http_response: HttpResponse | None = None
        self._call: Call | None = None
        self._streaming = False
        self._finished = False
        self._nobody_reads = False
        self._sending = threading.Lock()
        self._on_finish: Callable[[], None] | None = None
        self._has_err = False
        self._err_msg: Any = ""
        self._user_data: dict[Any, Any] = {}
        self._converter: Any = None
        self._inferer: Any = None

    @classmethod
    def of(cls, call: Call) -> Self:
        """The context of a call."""
        exchange = call.exchange
        http = None if exchange is None else exchange.http
        context = cls(http_request=None if http is None else flask_request(http))
        context._call = call
        context._streaming = exchange is not None and exchange.streaming
        return context

    # --- Data of the request's own, shared by all nodes of a DAG ---

    def put_user_data(self, key: Any, value: Any) -> None:
        """Keep a value for this request."""
        self._user_data[key] = value

    def get_user_data(self, key: Any) -> Any:
        """The value that was kept under `key`, or None."""
        return self._user_data.get(key)

    # --- Streaming ---

    def if_streaming(self) -> bool:
        """Whether answers go out one by one; False after the final one."""
        return self._streaming and not self._finished

    def stream_respond(self, msg: Any, final: bool = False) -> None:
        """Send one answer, and none after it if it is `final`; blocks while the reader is slow.

        Does nothing where nothing is streamed. Raises `ValueError` for anything but a GrpsMessage.
        """
        if not is_message(msg):
            raise ValueError(f"stream_respond: expected a GrpsMessage, got {type(msg).__name__}")
        mark_success(msg)
        if self.if_streaming():
            self._send(msg.SerializeToString(), final)

    def stream_respond_with_postprocess(self, inp: Any, final: bool = False) -> None:
        """Send what the converter's `postprocess` makes of `inp`; as `stream_respond`.

        Raises `ValueError` for a model without a converter.
        """
        if self._converter is None:
            raise ValueError("stream_respond_with_postprocess: the model has no converter")
        self.stream_respond(self._converter.postprocess(inp, self), final)

    def customized_http_stream_respond(self, msg: str | bytes, final: bool = False) -> None:
        """Send text or bytes as one chunk of customised HTTP; as `stream_respond`.

        Raises `ValueError` for anything else, and outside of customised HTTP.
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
            # A chunk of no bytes would end a chunked body; a message of no bytes is one.
            if (answer or not isinstance(answer, HttpChunk)) and not self._call.respond(answer):
                self._nobody_reads = True
            if final:
                self._finished = True
                self._call.finish()
                if self._on_finish is not None:
                    self._on_finish()

    # --- Errors ---

    def set_err_msg(self, err_msg: Any) -> None:
        """Let the request fail with this text, after the current step."""
        self._err_msg = err_msg
        self._has_err = True

    def get_err_msg(self) -> Any:
        """The text that was set, or ""."""
        return self._err_msg

    def set_has_err(self, has_err: bool) -> None:
        """Say whether the request fails after the current step."""
        self._has_err = has_err

    def has_err(self) -> bool:
        """Whether the request fails."""
        return self._has_err

    # --- Customised HTTP ---

    def get_http_request(self) -> flask.Request | None:
        """The request of customised HTTP; None in any other call."""
        return self._http_request

    def set_http_response(self, response: Any) -> None:
        """Answer with str (text/plain), bytes (octet-stream), (str or bytes, status, headers) or a Flask response.

        Raises `ValueError` for anything else.
        """
        self._http_response = http_response(response)

    def get_http_response(self) -> flask.Response | None:
        """What was set, as a Flask response; None when nothing was."""
        return None if self._http_response is None else flask_response(self._http_response)

    # --- The rest ---

    def if_disconnected(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._nobody_reads or (self._call is not None and self._call.cancelled)

    @property
    def converter(self) -> Any:
        """The converter of the model that runs, or None."""
        return self._converter

    @property
    def inferer(self) -> Any:
        """The inferer of the model that runs."""
        return self._inferer

    # --- For the framework ---

    @property
    def finished(self) -> bool:
        """Whether the final answer is sent."""
        return self._finished

    @property
    def call(self) -> Call | None:
        """The call, outside of a project's own tests."""
        return self._call

    @property
    def response(self) -> HttpResponse | None:
        """The answer of customised HTTP, if one was set."""
        return self._http_response

    def enter(self, inferer: Any, converter: Any) -> None:
        """From now on this model runs."""
        self._inferer = inferer
        self._converter = converter

    def close(self) -> None:
        """The request is over: its uploaded files are closed."""
        if self._http_request is not None:
            self._http_request.close()

    def on_finish(self, finished: Callable[[], None]) -> None:
        """Call `finished` when the final answer is sent."""
        self._on_finish = finished
