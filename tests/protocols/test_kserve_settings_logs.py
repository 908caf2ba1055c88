"""LogSettings over gRPC and REST: what is answered and refused, and what is in the log then (spec 1.3, 3.11)."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.process import FREE_PORTS, IDENTITY, PLAIN_MODELS, Triglot, run_triglot, write_model
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import server_ready
from tests.protocol_clients.kserve_async import STATUS_OF, GrpcClient, RestClient
from tests.protocol_clients.rest import Rest
from tests.protocols.kserve_served import Served, serve_models
from tests.waiting import wait_until
from triglot.backends.triton_python.names import Logger
from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb

MODELS = [PLAIN_MODELS / "half_plus_two"]
START = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
KINDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
Values = Mapping[str, Any]


def log_request(settings: Values) -> pb.LogSettingsRequest:
    request = pb.LogSettingsRequest()
    for key, value in settings.items():
        request.settings[key].SetInParent()
        if value is not None:
            setattr(request.settings[key], KINDS[type(value)], value)
    return request


async def change(interface: GrpcClient | RestClient, **settings: Any) -> Values | tuple[Code, str]:
    """All settings afterwards, or the error."""
    if isinstance(interface, GrpcClient):
        code, text, reply = await interface.call("LogSettings", log_request(settings).SerializeToString())
        if code is not Code.OK:
            return code, text
        found = pb.LogSettingsResponse.FromString(reply).settings
        return {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in found.items()}
    body = json.dumps(settings).encode() if settings else b""
    status, _, reply = await interface.call("POST" if settings else "GET", "/v2/logging", body)
    if status != STATUS_OF[Code.OK]:
        return next(code for code, number in STATUS_OF.items() if number == status), json.loads(reply)["error"]
    return json.loads(reply)  # type: ignore[no-any-return]  # JSON


@pytest.fixture(params=["grpc", "rest"])
def interface(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _informed() -> Iterator[None]:
    """As in a program that logs from INFO on."""
    logger = logging.getLogger("triglot")
    before = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)


# --- answers ---


async def test_settings(interface: str) -> None:
    async with serve_models(MODELS) as served:
        at = served.client(interface)
        assert await change(at) == START
        assert await change(at, log_info=False, log_verbose_level=2) == START | {
            "log_info": False,
            "log_verbose_level": 2,
        }
        other = served.client("rest" if interface == "grpc" else "grpc")
        assert await change(other, log_info=None, log_format="default") == await change(at), "null leaves it"
        assert await change(at, log_info=True, log_verbose_level=0) == START


async def test_settings_are_of_their_kinds() -> None:
    async with serve_models(MODELS) as served:
        _, _, reply = await served.grpc.call("LogSettings", b"")
        kinds = {
            key: value.WhichOneof("parameter_choice")
            for key, value in pb.LogSettingsResponse.FromString(reply).settings.items()
        }
        assert kinds == {key: KINDS[type(value)] for key, value in START.items()}
        status, headers, reply = await served.rest.call("GET", "/v2/logging")
        assert (status, headers["Content-Type"], json.loads(reply)) == (200, "application/json", START)


INVALID = Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        ({"info": True}, INVALID, "unknown log setting 'info', expected log_file, log_info, "),
        ({"info": None}, INVALID, "unknown log setting 'info'"),
        ({"log_info": 1}, INVALID, "log_info: expected true or false, got 1"),
        ({"log_error": "no"}, INVALID, "log_error: expected true or false, got 'no'"),
        (
            {"log_verbose_level": True},
            INVALID,
            "log_verbose_level: expected an integer from 0 to 4294967295, got True",
        ),
        (
            {"log_verbose_level": "1"},
            INVALID,
            "log_verbose_level: expected an integer from 0 to 4294967295, got '1'",
        ),
        ({"log_format": "xml"}, INVALID, "log_format: expected 'default' or 'ISO8601', got 'xml'"),
        ({"log_format": True}, INVALID, "log_format: expected 'default' or 'ISO8601', got True"),
        (
            {"log_format": "ISO8601"},
            Code.UNIMPLEMENTED,
            "cannot be changed, as the embedding program writes the log",
        ),
        ({"log_file": "x"}, Code.UNIMPLEMENTED, "log_file cannot be changed over the network"),
    ],
)
async def test_nothing_of_a_wrong_request_is_taken(
    interface: str, settings: Values, code: Code, text: str
) -> None:
    async with serve_models(MODELS) as served:
        answer = await change(served.client(interface), **{"log_warning": False} | dict(settings))
        assert isinstance(answer, tuple)
        assert answer[0] is code
        assert text in answer[1]
        assert await change(served.client(interface)) == START


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the request has no body, expected a JSON object of settings"),
        (b"7", "expected an object, got a number"),
        (b'{"log_verbose_level": -1}', "log_verbose_level: expected an integer from 0 to 4294967295, got -1"),
        (b'{"log_verbose_level": 4294967296}', "expected an integer from 0 to 4294967295, got 4294967296"),
        (
            b'{"log_verbose_level": 1.0}',
            "log_verbose_level: expected a truth value, a number or a string, got a number",
        ),
        (b'{"log_info": []}', "log_info: expected a truth value, a number or a string, got an array"),
    ],
)
async def test_bodies_that_are_wrong(body: bytes, text: str) -> None:
    async with serve_models(MODELS) as served:
        status, _, reply = await served.rest.call("POST", "/v2/logging", body)
        assert status == STATUS_OF[INVALID]
        assert text in json.loads(reply)["error"]


# --- the log of a program that has a server in it ---


def log_lines(*names: str) -> None:
    """A line of each level from our loggers."""
    for name in names:
        logger = logging.getLogger(name)
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "%s said", name)


def messages(caplog: pytest.LogCaptureFixture, name: str) -> list[int]:
    return [record.levelno for record in caplog.records if record.message == f"{name} said"]


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"log_info": False}, [logging.WARNING, logging.ERROR]),
        ({"log_warning": False}, [logging.INFO, logging.ERROR]),
        ({"log_error": False}, [logging.INFO, logging.WARNING]),
        ({"log_info": False, "log_warning": False}, [logging.ERROR]),
        ({"log_info": False, "log_warning": False, "log_error": False}, []),
    ],
)
async def test_switches(settings: Values, left: list[int], caplog: pytest.LogCaptureFixture) -> None:
    every = [logging.INFO, logging.WARNING, logging.ERROR]
    root = logging.getLogger()
    before = root.level, list(root.handlers), list(root.filters)
    names = "triglot.server", "triglot.core.errors", "triglot.models"
    async with serve_models(MODELS) as served:
        await change(served.rest, **settings)
        log_lines(*names, "elsewhere", "triglotter")
        assert [messages(caplog, name) for name in names] == [left] * 3
        assert messages(caplog, "elsewhere")[-2:] == messages(caplog, "triglotter")[-2:] == every[1:]
        caplog.clear()
        await change(served.rest, **dict.fromkeys(settings, True))
        log_lines(*names)
        assert [messages(caplog, name) for name in names] == [every] * 3
        await change(served.rest, **settings)
    caplog.clear()
    log_lines(*names)
    assert [messages(caplog, name) for name in names] == [every] * 3, "it ends with the server"
    assert (root.level, list(root.handlers), list(root.filters)) == before


async def test_what_models_say_to_those_who_look_closely(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_models(MODELS) as served:
        for level, shown in ((0, 0), (1, 1), (0, 1)):
            await change(served.rest, log_verbose_level=level, log_info=False)
            Logger.log_verbose("closely")
            assert [record.message for record in caplog.records].count("closely") == shown


async def test_info_that_was_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("triglot").setLevel(logging.WARNING)
    async with serve_models(MODELS) as served:
        assert await change(served.rest) == START | {"log_info": False}
        await change(served.rest, log_info=True)
        log_lines("triglot.server")
        assert messages(caplog, "triglot.server") == [logging.INFO, logging.WARNING, logging.ERROR]


LINE = re.compile(r"(?P<who>\w+ (?:REST|GRPC)) (?P<method>\S+)(?P<model>.*) code=(?P<code>\w+) ms=\d+\.\d{3}")


async def ask(served: Served) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
    body = json.dumps({"inputs": [tensor]}).encode()
    await served.rest.call("POST", "/v2/models/half_plus_two/infer", body)
    await served.rest.call("POST", "/v2/models/no%0Apeace/infer", body)
    await served.rest.call("POST", "/v1/models/half_plus_two:predict", b'{"instances": [1.0]}')
    await served.grpc.call("ServerReady", b"")


async def test_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_models(MODELS, log_verbose_level=1) as served:
        await ask(served)
        await change(served.grpc, log_info=False)
        await served.grpc.call("ServerLive", b"")
        await change(served.grpc, log_verbose_level=0)
        caplog.clear()
        await ask(served)
        assert not caplog.records
        await change(served.grpc, log_verbose_level=7)
        await ask(served)
        found = [LINE.fullmatch(record.getMessage()) for record in caplog.records]
    assert [(line["who"], line["model"], line["code"]) for line in found[1:] if line] == [
        ("kserve REST", " model=half_plus_two version=1", "OK"),
        ("kserve REST", " model='no\\npeace'", "NOT_FOUND"),
        ("tfserving REST", " model=half_plus_two version=1", "OK"),
        ("kserve GRPC", "", "OK"),
    ]


# --- the command's own log ---


FAILS = IDENTITY.replace('return {"y": inputs["x"]}', 'raise KeyError("lost")')


def test_what_a_server_process_logs(tmp_path: Path) -> None:
    write_model(tmp_path / "model", FAILS)
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0") as server:
        grpc_port, rest_port = server.ports()
        rest = Rest(rest_port)
        with grpc_channel(grpc_port) as channel:
            settings = rpc(channel, "LogSettings", pb.LogSettingsResponse)
            settings(log_request({"log_format": "ISO8601", "log_verbose_level": 1}))
            assert server_ready(channel)
            server.stderr.wait_for(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I kserve GRPC ServerReady code=OK ms=")
            settings(log_request({"log_warning": False, "log_verbose_level": 0}))
            assert rest.get("/v2/logging") == (
                200,
                START | {"log_format": "ISO8601", "log_warning": False},
            )
            settings(log_request({"log_format": "default", "log_error": False}))
            assert rest.infer("model")[0] == 500
            settings(log_request({"log_error": True}))
            assert rest.infer("model")[0] == 500
        server.stop()
    text = server.stderr.text()
    assert text.count("KeyError: 'lost'") == 1
    assert re.search(r"^\d\d:\d\d:\d\d I stopped$", text, re.MULTILINE)


TALKS = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_INT32", "dims": [1]})
        return config

    def execute(self, requests):
        (request,) = requests
        x = pb_utils.get_input_tensor_by_name(request, "x")
        said = f"call {x.as_numpy()[0]}"
        pb_utils.Logger.log_verbose(f"{said} verbose")
        pb_utils.Logger.log_info(f"{said} info")
        pb_utils.Logger.log_warn(f"{said} warning")
        pb_utils.Logger.log_error(f"{said} error")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())])]
"""


@pytest.mark.parametrize("to_file", [False, True])
def test_what_a_model_in_a_process_logs_follows(to_file: bool, tmp_path: Path) -> None:
    """The process looks some ten times a second, so it is called until it has seen the change."""
    write_model(tmp_path / "model", TALKS)
    (tmp_path / "model" / "config.pbtxt").write_text(
        'backend: "python" parameters { key: "execution" value { string_value: "process" } }'
    )
    file = tmp_path / "server.log"
    options = ("--log-file", file) if to_file else ()
    with Triglot(tmp_path / "model", *FREE_PORTS, "--drain-delay", "0", *options) as server:
        (rest_port,) = server.stdout.wait_for(r"http://127\.0\.0\.1:(\d+)/v2").groups()
        rest = Rest(int(rest_port))
        numbers = itertools.count()

        def lines_of_a_call() -> list[str]:
            """The time's form, the kind and the text of what the model says in one call."""
            number = next(numbers)
            value = {"name": "x", "datatype": "INT32", "shape": [1], "data": [number]}
            assert rest.post("/v2/models/model/infer", {"inputs": [value]})[0] == 200
            text = file.read_text() if to_file else server.stderr.text()
            found = re.findall(rf"^(\S+) (\w) call {number} (\w+)$", text, re.MULTILINE)
            return [f"{'ISO' if time.endswith('Z') else ''}{kind} {message}" for time, kind, message in found]

        def change(**settings: object) -> None:
            assert rest.post("/v2/logging", settings)[0] == 200

        wait_until(lambda: lines_of_a_call() == ["I info", "W warning", "E error"])
        change(log_verbose_level=1)
        wait_until(lambda: lines_of_a_call() == ["D verbose", "I info", "W warning", "E error"])
        change(log_warning=False, log_format="ISO8601")
        wait_until(lambda: lines_of_a_call() == ["ISOD verbose", "ISOI info", "ISOE error"])
        change(log_info=False, log_error=False, log_verbose_level=0)
        wait_until(lambda: lines_of_a_call() == [])
        change(log_error=True, log_format="default")
        wait_until(lambda: lines_of_a_call() == ["E error"])
        server.stop()


def test_options_of_the_log(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    file = tmp_path / "server.log"
    options = ("--log-file", file, "--log-format", "ISO8601", "--log-level", "error", "--log-verbose-level", "1")
    with Triglot(tmp_path / "model", *free_ports(), *options) as server:
        (rest_port,) = server.stdout.wait_for(r"http://127\.0\.0\.1:(\d+)/v2").groups()
        status, found = Rest(int(rest_port)).get("/v2/logging")
        server.stop()
    assert (status, found) == (
        200,
        {
            "log_file": str(file),
            "log_info": False,
            "log_warning": False,
            "log_error": True,
            "log_verbose_level": 1,
            "log_format": "ISO8601",
        },
    )
    assert not server.stderr.text()
    (line,) = file.read_text().splitlines()
    assert re.fullmatch(r"\S+Z I kserve REST /v2/logging code=OK ms=\S+", line)


def free_ports() -> tuple[str, ...]:
    return (*FREE_PORTS, "--drain-delay", "0")


def test_a_log_file_that_cannot_be_written(tmp_path: Path) -> None:
    completed = run_triglot("serve", "--log-file", tmp_path / "nowhere" / "log")
    assert completed.returncode == 2
    assert (
        completed.stderr == f"triglot: log_file: cannot write {tmp_path}/nowhere/log: No such file or directory\n"
    )


def test_traces_that_have_no_file() -> None:
    for level in ("TIMESTAMPS", "tensors", "OFF,TENSORS"):
        completed = run_triglot("serve", "--trace-level", level)
        assert completed.returncode == 2
        assert completed.stderr.startswith("triglot: trace_level: ")
    completed = run_triglot("serve", "--trace-level", "TENSORS")
    assert completed.stderr == "triglot: trace_level: TENSORS needs a trace_file to write traces to\n"
