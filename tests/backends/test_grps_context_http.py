"""Customised HTTP: Triglot's request in place of Flask's, the answers a model may set, chunks."""

from __future__ import annotations

import io
from http import HTTPStatus
from pathlib import Path
from typing import Any

import flask
import pytest

from tests.backends.grps_folders import IMPORTS, GrpsCall, ask, entry, opened, write_project
from triglot.backends.grps.context import GrpsContext
from triglot.core.errors import Internal
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.types import HttpChunk
from triglot.pb.grps.grps_pb2 import GrpsMessage

OCTETS = "application/octet-stream"


def request(body: bytes = b"", target: str = "/custom", verb: str = "POST", **headers: str) -> HttpRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest({}, {"host": "example.org:7080", **named}, body, verb, target)


def seen(http: HttpRequest) -> Any:
    found = GrpsContext.of(GrpsCall(http=http)).get_http_request()
    assert isinstance(found, flask.Request)
    return found


def test_the_request_is_flasks() -> None:
    target = "/v1/chat/%E4%B8%AD%20%2F?a=1&a=2&b=%E4%B8%AD"
    body = b'{"stream": true, "n": [1.5]}'
    headers = {"content_type": "application/json; charset=utf-8", "x_who": "me", "transfer_encoding": "chunked"}
    found = seen(request(body, target, **headers))
    assert found.method == "POST"
    assert found.path == "/v1/chat/中 /"
    assert found.args.getlist("a") == ["1", "2"]
    assert found.args["b"] == "中"
    assert found.content_type == "application/json; charset=utf-8"
    assert found.mimetype == "application/json"
    assert found.headers["X-Who"] == "me"
    assert found.headers.get("Content-Type") == found.content_type
    assert found.content_length == len(body)
    assert found.get_data() == body
    assert found.get_json() == {"stream": True, "n": [1.5]}
    assert found.json["stream"] is True
    assert found.host == "example.org:7080"
    assert found.url.startswith("http://example.org:7080/v1/chat/")
    assert found.remote_addr is None


def test_odd_requests() -> None:
    assert seen(request(target="http://elsewhere.org/a/b?c=d")).path == "/a/b"
    assert seen(request(target="//[")).path == "/["
    assert seen(request(target="*", verb="OPTIONS")).method == "OPTIONS"
    assert seen(request(target="/", host="[::1]")).host == "[::1]"
    assert seen(request(x_name="é\udcff")).headers["X-Name"].encode("latin-1") == b"\xc3\xa9\xff"
    with pytest.raises(Exception, match="400 Bad Request"):
        seen(request(b"{", content_type="application/json")).get_json()
    with pytest.raises(Exception, match="415 Unsupported Media Type"):
        seen(request(b"{}")).get_json()


def test_forms_and_files() -> None:
    form = seen(request(b"a=1&b=%20", content_type="application/x-www-form-urlencoded"))
    assert form.form.to_dict() == {"a": "1", "b": " "}
    body = b'--X\r\nContent-Disposition: form-data; name="f"; filename="f.txt"\r\n\r\ncontent\r\n--X--\r\n'
    upload = seen(request(body, content_type="multipart/form-data; boundary=X"))
    assert upload.files["f"].read() == b"content"
    upload.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("grün", HttpResponse("grün".encode(), 200, "text/plain")),
        (b"\x00\xff", HttpResponse(b"\x00\xff", 200, OCTETS)),
        (("a", 201, {}), HttpResponse(b"a", 201, "text/html; charset=utf-8", ())),
        ((b"a", HTTPStatus.IM_A_TEAPOT, {"content-type": "image/png", "X-N": 3}),
         HttpResponse(b"a", 418, "image/png", (("X-N", "3"),))),
        (("a", 500, {"Content-Type": "application/json", "Content-Length": "99"}),
         HttpResponse(b"a", 500, "application/json", ())),
        (flask.Response("a", 503, {"X-A": "b"}, content_type="text/plain"),
         HttpResponse(b"a", 503, "text/plain", (("X-A", "b"),))),
        (flask.Response(iter([b"a", b"b"]), mimetype="text/csv"),
         HttpResponse(b"ab", 200, "text/csv; charset=utf-8", ())),
        (flask.Response(io.BytesIO(b"file"), direct_passthrough=True, content_type=OCTETS),
         HttpResponse(b"file", 200, OCTETS, ())),
    ],
)  # fmt: skip
def test_what_may_be_answered(answer: Any, expected: HttpResponse) -> None:
    context = GrpsContext()
    context.set_http_response(answer)
    assert context.response == expected
    again = context.get_http_response()
    assert isinstance(again, flask.Response)
    assert (again.get_data(), again.status_code, again.content_type) == (
        expected.body,
        expected.status,
        expected.content_type,
    )


def test_headers_may_repeat() -> None:
    response = flask.Response("a")
    response.set_cookie("a", "1")
    response.set_cookie("b", "2")
    context = GrpsContext()
    context.set_http_response(response)
    assert context.response is not None
    assert context.response.headers == (("Set-Cookie", "a=1; Path=/"), ("Set-Cookie", "b=2; Path=/"))
    again = context.get_http_response()
    assert again is not None
    assert again.headers.getlist("Set-Cookie") == ["a=1; Path=/", "b=2; Path=/"]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        3,
        ("a", 200),
        ("a", "200", {}),
        (None, 200, {}),
        ("a", 200, [("X-A", "b")]),
        ("a", 99, {}),
        ("a", 200, {"X-A": "b\r\nX-C: d"}),
        ("a", 200, {"X-A": "b\0"}),
        ("a", 200, {"X-A\r\nX-C: d": "b"}),
        ("a", 200, {"X A": "b"}),
        ("a", 200, {"": "b"}),
    ],
)
def test_what_may_not_be_answered(answer: Any) -> None:
    context = GrpsContext()
    with pytest.raises(ValueError, match="set_http_response: "):
        context.set_http_response(answer)
    assert context.response is None


def test_chunks() -> None:
    call = GrpsCall(streaming=True, http=request())
    context = GrpsContext.of(call)
    context.customized_http_stream_respond("data: é\n\n")
    context.customized_http_stream_respond("")
    context.customized_http_stream_respond(b"\xff")
    context.customized_http_stream_respond("", final=True)
    context.customized_http_stream_respond("late")
    assert call.answers == ["data: é\n\n".encode(), b"\xff"]
    assert all(type(answer) is HttpChunk for answer in call.answers)
    assert call.finished.is_set()


def test_what_is_no_chunk() -> None:
    context = GrpsContext.of(GrpsCall(streaming=True, http=request()))
    answers: list[Any] = [None, {}, bytearray(b"a"), GrpsMessage()]
    for answer in answers:
        with pytest.raises(ValueError, match="expected str or bytes"):
            context.customized_http_stream_respond(answer)
    with pytest.raises(ValueError, match="did not arrive as customized HTTP"):
        GrpsContext.of(GrpsCall(streaming=True)).customized_http_stream_respond("a")
    unary = GrpsCall(http=request())
    GrpsContext.of(unary).customized_http_stream_respond("a", final=True)
    assert unary.answers == []


MODES = """
class Modes(Base):
    def infer(self, inp, context):
        request = context.get_http_request()
        assert (inp == GrpsMessage()) == (request is not None)
        if request is None:
            return inp
        mode = request.args.get("m")
        if context.if_streaming():
            for part in request.get_json()["parts"]:
                context.customized_http_stream_respond(f"data: {part}\\n\\n")
            context.stream_respond(GrpsMessage(str_data="message"))
        if mode == "raise":
            raise ValueError("boom")
        if mode == "err":
            context.set_err_msg("my error")
        if mode == "str":
            context.set_http_response(request.path)
        return {"anything": 1}


inferer_register.register("inferer", Modes())
"""


def custom(model: Any, mode: str, **keys: Any) -> GrpsCall:
    http = request(b'{"parts": [1, 2]}', f"/custom?m={mode}", content_type="application/json")
    call = GrpsCall(http=http, **keys)
    assert model.infer({}, call) is None
    return call


def test_a_model_speaks_http(tmp_path: Path) -> None:
    with opened(write_project(tmp_path, MODES)) as model:
        exchange = custom(model, "str").exchange
        assert exchange is not None
        assert exchange.http_response == HttpResponse(b"/custom", 200, "text/plain")
        for quiet in ("none", "err"):
            exchange = custom(model, quiet).exchange
            assert exchange is not None
            assert exchange.http_response is None
        with pytest.raises(Internal) as caught:
            custom(model, "raise")
        assert caught.value.message == "ValueError: boom"
        assert ask(model, "grpc") == "grpc"


def test_a_model_streams_http(tmp_path: Path) -> None:
    with opened(write_project(tmp_path, MODES)) as model:
        for mode in ("str", "err"):
            call = custom(model, mode, streaming=True)
            assert call.answers[:2] == [b"data: 1\n\n", b"data: 2\n\n"]
            assert GrpsMessage.FromString(call.answers[2]).str_data == "message"
        with pytest.raises(Internal, match="ValueError: boom"):
            custom(model, "raise", streaming=True)


def test_a_converter_reads_the_request(tmp_path: Path) -> None:
    code = """
class Sum(Base):
    def infer(self, inp, context):
        return {"c": inp["a"] + inp["b"]}


inferer_register.register("inferer", Sum())
"""
    converter = """
class Json(Converter):
    def init(self, path=None, args=None):
        super().init(path, args)

    def preprocess(self, inp, context):
        return context.get_http_request().get_json()

    def postprocess(self, inp, context):
        import flask

        context.set_http_response(flask.Response(f"{inp['c']}", 200, content_type="text/plain"))
        return None


converter_register.register("json", Json())
"""
    models = [entry(converter_type="customized", converter_name="json")]
    files = {"src/customized_converter.py": IMPORTS + converter}
    settings = write_project(tmp_path, code, models=models, files=files)
    with opened(settings) as model:
        call = GrpsCall(http=request(b'{"a": 1, "b": 2}', content_type="application/json"))
        assert model.infer({}, call) is None
        assert call.exchange is not None
        assert call.exchange.http_response == HttpResponse(b"3", 200, "text/plain", ())
        call = GrpsCall(http=request(b'{"a": 1}', content_type="application/json"))
        with pytest.raises(Internal, match="KeyError: 'b'"):
            model.infer({}, call)
