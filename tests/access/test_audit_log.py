"""The audit log: what has a line, what the line says, and a file that is rotated, or cannot be written."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

import triglot
from tests.access.access_files import anonymous, client, write
from tests.process import FREE_PORTS, Triglot, run_triglot, write_model
from tests.protocol_clients.channel import SERVICE
from tests.protocol_clients.rest import Rest
from tests.served_models import Function, serving, twice
from tests.waiting import until, wait_until
from triglot.core.call import Call
from triglot.core.errors import Code, PermissionDenied, Unavailable
from triglot.pb.kserve import inference_pb2 as pb
from triglot.telemetry import audit_log
from triglot.telemetry.audit_log import MAX_ERROR, MAX_REFUSALS, MAX_WAITING_REFUSALS, WINDOW_SECONDS, AuditLog
from triglot.telemetry.file_writer import MAX_WAITING
from triglot.telemetry.log_fields import MAX_TEXT

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
TRANSPORTS = ("h2", "aio")
QUICK = (*FREE_PORTS, "--drain-delay", "0")
SETTINGS = "/v2/logging"


def lines(file: Path) -> list[dict[str, Any]]:
    """What the log says; each line is whole."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    assert TIME.fullmatch(line.pop("time"))
    return line


def line_of(**keys: str) -> dict[str, str]:
    usual = {"client": "", "peer": "127.0.0.1", "operation": "model-control", "model": "", "protocol": "kserve"}
    return usual | {"transport": "gRPC", "method": "", "outcome": "OK", "request_id": ""} | keys


class Client:
    def __init__(self, server: triglot.Server, session: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.session = session
        self._channel = channel

    async def call(self, method: str, message: Any, *metadata: tuple[str, str]) -> grpc.StatusCode:
        try:
            await self._channel.unary_unary(SERVICE + method)(message.SerializeToString(), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def post(self, path: str, body: object, **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(path, json=body, headers=named) as answer:
            return answer.status


@asynccontextmanager
async def audited(file: Path, **options: Any) -> AsyncIterator[Client]:
    def refuse(_: Any) -> Any:
        raise PermissionDenied("not for you")

    models: dict[str, triglot.Model] = {"twice": Function(twice), "refuses": Function(refuse)}
    async with (
        serving(models, audit_log=str(file), **options) as it,
        aiohttp.ClientSession(f"http://127.0.0.1:{it.server.rest_port}") as session,
        grpc.aio.insecure_channel(f"127.0.0.1:{it.server.grpc_port}") as channel,
    ):
        yield Client(it.server, session, channel)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_administrative_calls(tmp_path: Path, transport: str) -> None:
    file = tmp_path / "audit"
    http = {"h2": "h1", "aio": "aiohttp"}[transport]
    async with audited(file, grpc_transport=transport, http_transport=http) as here:
        request = pb.RepositoryModelLoadRequest(model_name="none")
        found = await here.call("RepositoryModelLoad", request, ("x-request-id", "abc"))
        assert found is not grpc.StatusCode.OK
        await here.call("LogSettings", pb.LogSettingsRequest())
        await here.call("TraceSetting", pb.TraceSettingRequest(model_name="twice"))
        await here.call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest())
        assert await here.post("/v2/repository/models/other/unload", {}, X_Request_Id="def") != 200
        assert await here.post("/v2/models/twice/trace/setting", {"trace_rate": "5"}) == 200
        assert await here.post("/grps/v1/health/online", {}) == 200
    load, log, trace, memory, unload, rest_trace, online = map(untimed, lines(file))
    assert load == line_of(
        method="RepositoryModelLoad", model="none", outcome=found.name, request_id="abc"
    )  # One that failed says only how.
    assert log == line_of(method="LogSettings", operation="log-settings")
    assert trace == line_of(method="TraceSetting", operation="trace-settings", model="twice")
    assert memory == line_of(
        method="SystemSharedMemoryUnregister", operation="shared-memory-control", outcome="UNIMPLEMENTED"
    )
    assert unload.pop("outcome") != "OK"
    assert unload == {
        name: value
        for name, value in line_of(
            method="/v2/repository/models/{model}/unload", model="other", transport="REST", request_id="def"
        ).items()
        if name != "outcome"
    }
    assert (rest_trace["model"], rest_trace["operation"], rest_trace["transport"]) == (
        "twice",
        "trace-settings",
        "REST",
    )
    assert (online["protocol"], online["operation"]) == ("grps", "grps-state")


async def test_other_calls_have_no_line(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    async with audited(file) as here:
        tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
        assert await here.post("/v2/models/twice/infer", {"inputs": [tensor]}) == 200
        assert await here.post("/v2/models/none/infer", {"inputs": [tensor]}) == 404
        assert await here.call("ServerReady", pb.ServerReadyRequest()) is grpc.StatusCode.OK
        for path in (SETTINGS, "/v2/trace/setting", "/metrics", "/v2/models/twice"):
            async with here.session.get(path) as answer:
                assert answer.status == 200
    assert file.read_text() == ""
    assert stat.S_IMODE(file.stat().st_mode) & 0o007 == 0


async def test_refusals_have_a_line_with_their_text(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    async with audited(file) as here:
        tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
        body = {"inputs": [tensor], "id": "x" * 1000}
        origin = "https://evil.example"
        assert await here.post("/v2/models/twice/infer", body, Origin=origin) == 403
        assert await here.post("/v2/models/refuses/infer", body) == 403
        stream = here.server.grpc_port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stream}") as channel:
            call = channel.stream_stream(SERVICE + "ModelStreamInfer")
            request = pb.ModelInferRequest(model_name="refuses", id="7", raw_input_contents=[b"\0\0\0\0"])
            request.inputs.add(name="x", datatype="INT32", shape=[1])
            assert len([response async for response in call(iter([request.SerializeToString()]))]) == 1
    origin_line, model_line, stream_line = map(untimed, lines(file))
    infer = {"operation": "infer", "transport": "REST", "outcome": "PERMISSION_DENIED"}
    assert origin in origin_line.pop("error")
    assert origin_line == line_of(method="infer", model="twice", **infer)
    assert model_line["error"] == "not for you"
    assert model_line["request_id"] == "x" * MAX_TEXT
    assert stream_line["error"] == "not for you"
    assert (stream_line["method"], stream_line["request_id"], stream_line["peer"]) == (
        "ModelStreamInfer",
        "7",
        "127.0.0.1",
    )


async def test_without_the_option_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with serving({"twice": Function(twice)}) as it:
        url = f"http://127.0.0.1:{it.server.rest_port}{SETTINGS}"
        async with aiohttp.ClientSession() as session, session.post(url, json={}) as answer:
            assert answer.status == 200
        assert it.server.telemetry.observers == []
    assert not [*tmp_path.iterdir()]  # noqa: ASYNC240 - quick enough for a loop


BOSS = client("boss", ["secret-of-boss"], ["administer", "infer"], rate=1)
FRIEND = client("friend", ["secret-of-friend"], ["infer"])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_who_was_refused(tmp_path: Path, transport: str) -> None:
    file = tmp_path / "audit"
    access = write(tmp_path / "access.toml", BOSS, FRIEND)
    http = {"h2": "h1", "aio": "aiohttp"}[transport]
    options = {"access": str(access), "grpc_transport": transport, "http_transport": http}
    load, friend = pb.RepositoryModelLoadRequest(model_name="twice"), "Bearer secret-of-friend"
    async with audited(file, **options) as here:
        for token in ("", "Bearer secret-of-nobody", friend):
            await here.call("RepositoryModelLoad", load, *([("authorization", token)] if token else []))
            headers = {"Authorization": token} if token else {}
            await here.post("/v2/repository/models/twice/load", {}, **headers)
        await here.call("LogSettings", pb.LogSettingsRequest(), ("x-api-key", "secret-of-boss"))
        found = await here.call("LogSettings", pb.LogSettingsRequest(), ("x-api-key", "secret-of-boss"))
        assert found is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with grpc.aio.insecure_channel(f"127.0.0.1:{here.server.grpc_port}") as channel:
            stream = channel.stream_stream(SERVICE + "ModelStreamInfer")
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                assert [response async for response in stream(iter(()))]
    found_lines = list(map(untimed, lines(file)))
    assert [(line["client"], line["transport"], line["outcome"], line["method"]) for line in found_lines] == [
        ("", "gRPC", "UNAUTHENTICATED", "RepositoryModelLoad"),
        ("", "REST", "UNAUTHENTICATED", "/v2/repository/models/{model}/load"),
        ("", "gRPC", "UNAUTHENTICATED", "RepositoryModelLoad"),
        ("", "REST", "UNAUTHENTICATED", "/v2/repository/models/{model}/load"),
        ("friend", "gRPC", "PERMISSION_DENIED", "RepositoryModelLoad"),
        ("friend", "REST", "PERMISSION_DENIED", "/v2/repository/models/{model}/load"),
        ("boss", "gRPC", "OK", "LogSettings"),
        ("boss", "gRPC", "RESOURCE_EXHAUSTED", "LogSettings"),
        ("", "gRPC", "UNAUTHENTICATED", "ModelStreamInfer"),
    ]
    assert {line["peer"] for line in found_lines} == {"127.0.0.1"}
    assert [line for line in found_lines if ("error" in line) == (line["outcome"] == "OK")] == []
    assert found_lines[4]["error"] == "client 'friend' may not use model-control"
    assert "secret" not in file.read_text()


def reset_after(port: int, sent: bytes) -> None:
    """Send this, and reset the connection at once."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(sent)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("transports", [("h2", "h1"), ("aio", "aiohttp")], ids=["h2", "aio"])
@pytest.mark.parametrize("token", ["secret-of-boss", "wrong"])
def test_the_address_of_a_client_that_resets_its_connection(
    tmp_path: Path, transports: tuple[str, str], token: str, loop: str
) -> None:
    """That of accept: the system no longer knows it when the request is read."""
    file, bodies = tmp_path / "audit", [b'{"log_verbose_level":%d}' % level for level in range(1, 9)]
    boss = client("boss", ["secret-of-boss"], ["administer"])
    access = write(tmp_path / "access.toml", boss, anonymous(["health"]))
    write_model(tmp_path / "models" / "m")
    options = ("--access", access, "--audit-log", file, "--event-loop", loop)
    over = ("--grpc-transport", transports[0], "--http-transport", transports[1])
    with Triglot(tmp_path / "models", *QUICK, *options, *over) as server:
        _, port = server.ports()
        for body in bodies:
            head = f"POST {SETTINGS} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {token}\r\n"
            reset_after(port, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert Rest(port).post(SETTINGS, {})[0] == 401
        wait_until(lambda: lines(file))
        server.stop()
    assert {line["peer"] for line in lines(file)} == {"127.0.0.1"}


async def test_a_flood_of_refusals_hides_no_administrative_call(tmp_path: Path) -> None:
    file, now = tmp_path / "audit", [1000.0]
    audit = AuditLog(file, lambda: now[0])
    for number in range(3 * MAX_REFUSALS):
        a_line(audit, number, "denied " * 100_000)
        if number == 2 * MAX_REFUSALS:
            a_line(audit, 7_000_000)
    now[0] += WINDOW_SECONDS + 1
    a_line(audit, 8_000_000, "denied")
    audit.close()
    found = lines(file)
    assert [line["request_id"] for line in found if "error" not in line] == ["7000000"]
    assert len(found) == MAX_REFUSALS + 2
    assert (found[-1]["request_id"], found[-1]["omitted"]) == ("8000000", 2 * MAX_REFUSALS)
    assert max(len(line.get("error", "")) for line in found) <= MAX_ERROR
    assert audit.lost == {"limit": 2 * MAX_REFUSALS}


async def test_refusals_leave_half_of_the_queue_of_a_slow_disk(tmp_path: Path) -> None:
    times = count(0, WINDOW_SECONDS + 1)
    os.mkfifo(tmp_path / "pipe")
    audit = AuditLog(tmp_path / "pipe", lambda: next(times))
    file = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(file, bytes(65536))
    a_line(audit, 0, "denied")
    await until(lambda: audit.waiting == 0)
    for number in range(MAX_WAITING):
        a_line(audit, number, "denied")
    assert audit.waiting == MAX_WAITING_REFUSALS
    a_line(audit)
    assert audit.waiting == MAX_WAITING_REFUSALS + 1
    reading = asyncio.create_task(asyncio.to_thread(_read_lines, file, 65536, MAX_WAITING_REFUSALS + 2))
    await asyncio.to_thread(audit.close)
    assert "error" not in json.loads((await reading)[-1])
    os.close(file)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_flood_over_the_transports(tmp_path: Path, transport: str) -> None:
    file, http = tmp_path / "audit", {"h2": "h1", "aio": "aiohttp"}[transport]
    access = write(tmp_path / "access.toml", BOSS, anonymous(["inspect"]))
    options = {"access": str(access), "grpc_transport": transport, "http_transport": http}
    async with audited(file, **options) as here:
        load = pb.RepositoryModelLoadRequest(model_name="twice")
        for _ in range(MAX_REFUSALS // 2 + 5):
            assert await here.call("RepositoryModelLoad", load) is grpc.StatusCode.UNAUTHENTICATED
            assert await here.post("/v2/repository/models/twice/load", {}) == 401
        await here.call("LogSettings", pb.LogSettingsRequest(), ("x-api-key", "secret-of-boss"))
        async with here.session.get("/metrics") as answer:
            text = await answer.text()
    found = lines(file)
    assert [line["outcome"] for line in found[MAX_REFUSALS:]] == ["OK"]
    assert 'triglot_audit_lines_lost_total{reason="limit"} 10.0' in text
    assert 'triglot_audit_lines_lost_total{reason="disk"} 0.0' in text
    assert {line["model"] for line in found if line["transport"] == "REST"} == {"twice"}


VERBOSE = {"log_verbose_level": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_administrative_calls_that_need_a_line(tmp_path: Path, transport: str) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file, http = folder / "audit", {"h2": "h1", "aio": "aiohttp"}[transport]
    options = {"audit_required": True, "grpc_transport": transport, "http_transport": http}
    request = pb.LogSettingsRequest()
    request.settings["log_verbose_level"].uint32_param = 1
    async with audited(file, **options) as here:
        file.unlink()
        folder.rmdir()
        assert await here.post(SETTINGS, VERBOSE) == 503
        assert await here.call("LogSettings", request) is grpc.StatusCode.UNAVAILABLE
        assert await here.post("/v2/repository/models/twice/unload", {}) == 503
        assert await here.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="m")) is (
            grpc.StatusCode.UNAVAILABLE
        )
        assert await here.post("/grps/v1/health/offline", {}) == 503
        async with here.session.get(SETTINGS) as answer:
            assert (await answer.json())["log_verbose_level"] == 0
        # What is no administrative call goes on.
        tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
        assert await here.post("/v2/models/twice/infer", {"inputs": [tensor]}) == 200
        folder.mkdir()
        assert await here.post(SETTINGS, VERBOSE) == 200
        assert await here.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="m")) is not (
            grpc.StatusCode.OK
        )
        async with here.session.get("/metrics") as answer:
            assert 'triglot_audit_lines_lost_total{reason="disk"} 10.0' in await answer.text()
    found = [(line["method"], line["model"], line["outcome"]) for line in lines(file)]
    assert found[:2] == [(SETTINGS, "", "BEGUN"), (SETTINGS, "", "OK")]
    assert found[2] == ("RepositoryModelLoad", "m", "BEGUN")
    assert found[3][:2] == ("RepositoryModelLoad", "m")


async def test_a_disk_that_hangs_refuses_calls_that_need_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "WRITE_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    audit = AuditLog(tmp_path / "pipe")
    file = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(file, bytes(65536))
    with pytest.raises(Unavailable, match="the disk is too slow"):
        await audit.precede(Call(), "kserve", "REST", "m")
    os.read(file, 65536)
    await audit.precede(Call(), "kserve", "REST", "m")
    audit.close()
    os.close(file)


async def test_a_line_that_is_needed_needs_a_file() -> None:
    with pytest.raises(triglot.ConfigError, match="audit_required: needs audit_log"):
        await triglot.Server([], triglot.Config(audit_required=True, grpc_port=0, rest_port=0)).start()


# --- the file ---


async def test_a_renamed_file_a_removed_folder_and_a_file_of_before(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file, old = folder / "audit", folder / "audit.1"
    file.write_text('{"cut')
    async with audited(file) as here:
        assert await here.post(SETTINGS, {}) == 200
        await until(lambda: file.read_text().endswith("}\n"))
        file.rename(old)
        assert await here.post(SETTINGS, {}) == 200
        await until(lambda: len(lines(file)) == 1)
        assert len(old.read_text().splitlines()) == 2
        file.unlink()
        old.unlink()
        folder.rmdir()
        assert await here.post(SETTINGS, {}) == 200
        (audit,) = here.server.telemetry.observers
        assert isinstance(audit, AuditLog)
        await until(lambda: audit.waiting == 0)
        folder.mkdir()
        assert await here.post(SETTINGS, {}) == 200
    assert len(lines(file)) == 1


async def test_a_file_that_cannot_be_written_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(triglot.ConfigError, match=r"audit_log: cannot write .*nowhere/audit: No such file"):
        async with audited(tmp_path / "nowhere" / "audit"):
            raise AssertionError("it has started")


def test_the_command_says_so_too(tmp_path: Path) -> None:
    completed = run_triglot("serve", *FREE_PORTS, "--audit-log", tmp_path)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert f"triglot: audit_log: cannot write {tmp_path}: Is a directory" in completed.stderr


def test_sighup_ends_no_server_and_the_next_line_is_in_a_new_file(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "m")
    file = tmp_path / "audit"
    with Triglot(tmp_path / "models", *QUICK, "--audit-log", file) as server:
        _, port = server.ports()
        assert Rest(port).post(SETTINGS, {})[0] == 200
        wait_until(lambda: len(lines(file)) == 1)
        file.rename(tmp_path / "audit.1")
        server.signal(signal.SIGHUP)
        assert Rest(port).post(SETTINGS, {})[0] == 200
        wait_until(lambda: len(lines(file)) == 1)
        server.stop()
    assert len(lines(tmp_path / "audit.1")) == 1


def test_full_disk_fails_no_call_and_is_logged_once(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "m")
    file = tmp_path / "audit"
    with Triglot(tmp_path / "models", *QUICK, "--audit-log", file) as server:
        _, port = server.ports()
        assert Rest(port).post(SETTINGS, {})[0] == 200
        wait_until(lambda: len(lines(file)) == 1)
        hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (file.stat().st_size + 5, hard))
        for _ in range(3):
            assert Rest(port).post(SETTINGS, {})[0] == 200
        server.stderr.wait_for("lines of the audit log are lost: cannot write")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert Rest(port).post(SETTINGS, {})[0] == 200
        server.stop()
        assert server.stderr.text().count("are lost") == 1
    first, *cut, last = file.read_text().splitlines()
    assert json.loads(first)["outcome"] == json.loads(last)["outcome"] == "OK"
    assert [len(line) for line in cut if not line.endswith("}")] == [5]


def a_line(audit: AuditLog, number: int = 0, refusal: str = "") -> None:
    call = Call()
    call.request_id = str(number)
    audit.line("kserve", "REST", "m", call, Code.OK, refusal)


async def test_a_device_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog(Path("/dev/full"))
    for _ in range(3):
        a_line(audit)
        await until(lambda: audit.waiting == 0)
    audit.close()
    assert [text for text in caplog.messages if "lost" in text] == [
        "lines of the audit log are lost: cannot write /dev/full: [Errno 28] No space left on device"
    ]


async def test_a_disk_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No call waits for it, its queue is bounded, and what was not lost is written in order."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    audit = AuditLog(pipe)
    file = os.open(pipe, os.O_RDWR)
    room = b" " * 65536
    os.write(file, room)
    a_line(audit)
    await until(lambda: audit.waiting == 0)
    for number in range(MAX_WAITING + 10):
        a_line(audit, number)
    assert audit.waiting == MAX_WAITING
    assert sum("the disk is too slow" in text for text in caplog.messages) == 1
    closing = asyncio.create_task(asyncio.to_thread(audit.close))
    got = await asyncio.to_thread(_read_lines, file, len(room), 1 + MAX_WAITING)
    await closing
    os.close(file)
    assert [int(json.loads(line)["request_id"] or -1) for line in got] == [0, *range(MAX_WAITING)]


def _read_lines(file: int, skip: int, count: int) -> list[bytes]:
    text = b""
    while text[skip:].count(b"\n") < count:
        text += os.read(file, 65536)
    return text[skip:].splitlines()
