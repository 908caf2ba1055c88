"""grps projects behind a server's ports: which model answers, which path, and the errors of odd requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.backends.grps_folders import batched, entry, write_project
from tests.backends.grps_served import PREDICT, served
from triglot.backends.grps.settings import read_project
from triglot.pb.grps.grps_pb2 import GenericTensor, GenericTensorData, GrpsMessage
from triglot.protocols.monitor.routes import PAGE, SERIES

NAMES = """
class Name(Base):
    def infer(self, inp, context):
        return GrpsMessage(str_data=str(self._args))

inferer_register.register("inferer", Name())
"""
COUNTS = """
class Counts(Base):
    def infer(self, inp, context):
        kind, _, number = inp.str_data.partition(" ")
        answer = GrpsMessage()
        if kind == "tensors":
            for _ in range(int(number)):
                answer.gtensors.tensors.add(name="x")
        elif kind == "entries":
            for at in range(int(number)):
                answer.gmap.s_i32[str(at)] = at
        else:
            answer.str_data = str(len(inp.gtensors.tensors))
        context.stream_respond(answer)
        return answer

inferer_register.register("inferer", Counts())
"""
HTTP = """
import flask

class Http(Base):
    def infer(self, inp, context):
        request = context.get_http_request()
        if context.if_streaming():
            context.customized_http_stream_respond("chunk")
        elif request.args.get("m") == "cookies":
            response = flask.Response("ok")
            response.set_cookie("a", "1")
            response.set_cookie("b", "2")
            context.set_http_response(response)
        elif request.args.get("m") == "error":
            context.set_err_msg("my error")
        else:
            context.set_http_response(f"{request.method} {request.path} {request.remote_addr}")

inferer_register.register("inferer", Http())
"""


def custom(path: str, **keys: object) -> dict[str, object]:
    return {
        "framework": "http+grpc",
        "host": "127.0.0.1",
        "port": "7080,7081",
        "customized_predict_http": {"path": path, **keys},
    }


def named(name: str, version: str) -> dict[str, object]:
    return entry(name, version=version, inferer_args={"is": f"{name} {version}"})


async def test_the_default_is_the_dag_whatever_its_name(tmp_path: Path) -> None:
    write_project(tmp_path, NAMES, models=[named("a", "1"), named("b", "1")], nodes=["b-1"])
    file = tmp_path / "conf" / "inference.yml"
    file.write_text(file.read_text().replace("the_dag", "a-1"))
    async with served(read_project(tmp_path)) as server:
        assert (await server.predict(GrpsMessage())).str_data == "{'is': 'b 1'}"
        assert (await server.predict(GrpsMessage(model="a-1"))).str_data == "{'is': 'a 1'}"
        assert (await server.ask("POST", PREDICT, {"str_data": ""}))[1]["str_data"] == "{'is': 'b 1'}"


async def test_an_id_without_a_version_is_none(tmp_path: Path) -> None:
    async with served(write_project(tmp_path, NAMES)) as server:
        for model in ("m-", "m--", "-", "m"):
            status = (await server.predict(GrpsMessage(model=model))).status
            assert (status.code, status.msg.startswith(f"Model {model} not found.")) == (500, True)


async def test_metadata_by_name_and_by_id(tmp_path: Path) -> None:
    models = [named("m", "2.0"), named("m", "1.0"), named("m", "3")]
    async with served(write_project(tmp_path, NAMES, models=models)) as server:
        # Without a version it is the first that the file lists.
        for asked, version in (("m", "2.0"), ("m-1.0", "1.0"), ("m-3", "3")):
            answer = await server.predict(GrpsMessage(str_data=asked), "ModelMetadata")
            assert f"version: '{version}'" in answer.str_data
            status, document = await server.ask("POST", "/grps/v1/metadata/model", {"str_data": asked})
            assert (status, document["str_data"]) == (200, answer.str_data)


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b'{"str_data": 5}', b"\xff"])
async def test_metadata_of_a_broken_body(tmp_path: Path, body: bytes) -> None:
    async with served(write_project(tmp_path, NAMES)) as server:
        status, document = await server.ask("POST", "/grps/v1/metadata/model", body)
        assert (status, document["status"]["code"], document["status"]["status"]) == (400, 400, "FAILURE")


async def test_head_and_options(tmp_path: Path) -> None:
    async with served(write_project(tmp_path, NAMES, interface=custom("/mine"))) as server:
        for path, verbs in (
            ("/grps/v1/health/live", {"GET", "HEAD", "POST", "OPTIONS"}),
            ("/grps/v1/metadata/server", {"GET", "HEAD", "POST", "OPTIONS"}),
            ("/grps/v1/metadata/model", {"POST", "OPTIONS"}),
            (PREDICT, {"POST", "OPTIONS"}),
            ("/mine", {"GET", "HEAD", "POST", "OPTIONS"}),
            *((path, {"GET", "HEAD", "OPTIONS"}) for path in ("/", "/metrics", SERIES, PAGE)),
        ):
            async with server.session.options(server.url + path) as response:
                assert (response.status, await response.read()) == (200, b"")
                assert set(response.headers["Allow"].split(", ")) == verbs
            async with server.session.head(server.url + path) as response:
                # A GET without content type is a bad request to predict.
                assert response.status == (400 if path == "/mine" else 200 if "HEAD" in verbs else 405)
                assert await response.read() == b""
            assert (await server.ask("PUT", path))[0] == 405


@pytest.mark.parametrize("path", ["/metrics", "/v2/health/live", "/v1/models/m", "/v2/models/m/infer", "/v2"])
async def test_a_projects_path_wins_over_ours(tmp_path: Path, path: str) -> None:
    interface = custom(path, customized_body=True)
    async with served(write_project(tmp_path, HTTP, interface=interface)) as server:
        for verb in ("GET", "POST"):
            assert await server.ask(verb, path) == (200, f"{verb} {path} 127.0.0.1".encode())


async def test_every_cookie_is_a_header_of_its_own(tmp_path: Path) -> None:
    interface = custom("/mine", customized_body=True)
    async with (
        served(write_project(tmp_path, HTTP, interface=interface)) as server,
        server.session.get(f"{server.url}/mine?m=cookies") as response,
    ):
        assert response.headers.getall("Set-Cookie") == ["a=1; Path=/", "b=2; Path=/"]
        assert response.headers.getall("Content-Type") == ["text/html; charset=utf-8"]


async def test_a_body_that_asks_for_a_stream_may_have_nan(tmp_path: Path) -> None:
    interface = custom("/mine", customized_body=True, streaming_ctrl={"ctrl_mode": "body_param"})
    async with served(write_project(tmp_path, HTTP, interface=interface)) as server:
        for body, streams in (
            (b'{"x": NaN, "streaming": true}', True),
            (b'{"x": [NaN, 1], "streaming": true' + b" " * 4096 + b"}", True),
            (b'{"x": ' + b"9" * 400 + b', "streaming": true}', True),
            (b'{"streaming": "true"}', False),
            (b'{"streaming": 1}', False),
            (b'[{"streaming": true}]', False),
            (b'{"streaming": true', False),
            (b'{"streaming": true, "x": ' + b"[" * 100_000, False),
            (b"", False),
        ):
            answer = await server.ask("POST", "/mine", body, "text/plain")
            assert answer == (200, b"chunk" if streams else b"POST /mine 127.0.0.1")


async def test_an_error_of_customised_http_is_counted(tmp_path: Path) -> None:
    interface = custom("/mine", customized_body=True)
    async with served(write_project(tmp_path, HTTP, interface=interface)) as server:
        assert await server.ask("GET", "/mine?m=error") == (200, b"")
        text = (await server.ask("GET", "/metrics"))[1].decode()
        count_lines = [line for line in text.splitlines() if "predict" in line and "requests_total" in line]
        assert [line for line in count_lines if 'code="INTERNAL"' in line], text


@pytest.mark.parametrize("many", [2000, 20_000])
async def test_a_project_answers_with_any_number_of_things(tmp_path: Path, many: int) -> None:
    async with served(write_project(tmp_path, COUNTS)) as server:
        for kind in ("tensors", "entries"):
            message = GrpsMessage(str_data=f"{kind} {many}")
            over_grpc = await server.predict(message)
            status, document = await server.ask("POST", PREDICT, {"str_data": message.str_data})
            assert (status, over_grpc.status.code) == (200, 200)
            streamed = await server.ask("POST", f"{PREDICT}?streaming=true", {"str_data": message.str_data})
            assert json.loads(streamed[1]) == document
            if kind == "tensors":
                assert len(document["gtensors"]["tensors"]) == len(over_grpc.gtensors.tensors) == many
            else:
                assert len(document["gmap"]["s_i32"]) == len(over_grpc.gmap.s_i32) == many


@pytest.mark.parametrize("name", ["x", "a name that makes the message a large one" * 4])
async def test_how_many_tensors_a_project_takes(tmp_path: Path, name: str) -> None:
    """Large messages and small ones have the same limit; the error of larger ones is in the message."""
    async with served(write_project(tmp_path, COUNTS)) as server:
        request = GrpsMessage(gtensors=GenericTensorData(tensors=[GenericTensor(name=name)] * 5000))
        assert (await server.predict(request)).str_data == "5000"
    async with served(write_project(tmp_path, COUNTS)) as server:
        request = GrpsMessage(gtensors=GenericTensorData(tensors=[GenericTensor()] * 100_000))
        answer = await server.predict(request)
        assert (answer.status.code, answer.status.msg) == (500, "the request has more than 32768 tensors")


@pytest.mark.parametrize("size", [10, 200_000])
async def test_bytes_that_are_no_message_are_internal(tmp_path: Path, size: int) -> None:
    async with served(write_project(tmp_path, COUNTS)) as server:
        for method in ("Predict", "PredictStreaming"):
            call = server.channel.unary_stream(f"/grps.protos.v1.GrpsService/{method}")(b"\xff" * size)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INTERNAL


# --- whatever the code raises: each request has its answer, and the project continues ---


CODE = """
import asyncio

class Own(BaseException):
    pass

class Raises(Base):
    def infer(self, inp, context):
        if inp.str_data == "raise":
            raise {error}
        answer = GrpsMessage(str_data="fine")
        context.stream_respond(answer)
        return answer

    def batch_infer(self, inp, context):
        return [self.infer(one, its) for one, its in zip(inp, context)]

inferer_register.register("inferer", Raises())
"""
ERRORS = [
    "GeneratorExit",
    "StopIteration(3)",
    "StopAsyncIteration",
    "asyncio.CancelledError",
    "KeyboardInterrupt",
    "SystemExit(3)",
    "Own",
]
FOLDERS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "in batches": {"models": [entry(batching=batched(2, 1000))]},
    "a DAG with batches": {
        "models": [entry(batching=batched(2, 1000)), entry("n", batching=batched(2, 1000))],
        "nodes": ["m-1.0.0", "n-1.0.0"],
    },
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", FOLDERS)
async def test_a_request_fails_and_the_next_is_answered(tmp_path: Path, kind: str, error: str) -> None:
    async with served(write_project(tmp_path, CODE.format(error=error), **FOLDERS[kind])) as server:
        for _ in range(2):
            failed = await server.predict(GrpsMessage(str_data="raise"))
            assert (failed.status.code, failed.status.status) == (500, failed.status.FAILURE)
            assert error.partition("(")[0].rpartition(".")[2] in failed.status.msg
            assert (await server.predict(GrpsMessage(str_data="well"))).str_data == "fine"
            (last,) = await server.stream(GrpsMessage(str_data="raise"))
            assert last.status.code == 500
            answers = await server.stream(GrpsMessage(str_data="well"))
            assert answers[0].str_data == "fine"
