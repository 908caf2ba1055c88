"""What a client changes at one worker, all of them have changed when it has its answer."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.process import SECONDS, write_model
from tests.protocol_clients.channel import rpc
from tests.protocol_clients.kserve import infer
from tests.workers.shared_ports import TRANSPORTS, Workers, change, ready
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb

EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "who")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_models_are_loaded_and_unloaded_in_every_worker(tmp_path: Path, transport: str) -> None:
    write_model(tmp_path / "one")
    with Workers(tmp_path, *EXPLICIT, "--grpc-transport", transport) as workers:
        first, second = workers.pids()
        with workers.at(first) as channel:
            change(channel, "Load", "one")
        assert workers.on_each(lambda channel: infer(channel, "one", 5)) == [5, 5]
        with workers.at(second) as channel:
            change(channel, "Unload", "one")
        assert workers.on_each(lambda channel: ready(channel, "one")) == [False, False]
        status, _ = workers.rest.post("/v2/repository/models/one/load", {})
        assert status == 200
        assert workers.on_each(lambda channel: infer(channel, "one", 6)) == [6, 6]
        workers.stop()


def test_a_model_that_cannot_be_loaded_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    with Workers(tmp_path, *EXPLICIT) as workers:
        for worker in workers.pids():
            with workers.at(worker) as channel:
                with pytest.raises(grpc.RpcError) as caught:
                    change(channel, "Load", "nowhere")
                assert "nowhere" in caught.value.details()
                assert caught.value.code() is grpc.StatusCode.INTERNAL
        with workers.at(workers.pids()[0]) as channel:
            change(channel, "Load", "one")
        write_model(tmp_path / "one", "import nothing_of_that_name\n")
        with workers.at(workers.pids()[1]) as channel, pytest.raises(grpc.RpcError) as caught:
            change(channel, "Load", "one")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        # What was served before still is.
        assert workers.on_each(lambda channel: infer(channel, "one", 5)) == [5, 5]


ONE_FAILS = """
import os
import triglot

class Fickle(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def load(self, folder):
        (folder / "taken").mkdir()  # Raises where it is there already.

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""


def test_a_model_that_only_one_worker_can_load_is_unloaded_again(tmp_path: Path) -> None:
    write_model(tmp_path / "fickle", ONE_FAILS)
    with Workers(tmp_path, *EXPLICIT) as workers:
        with workers.at(workers.pids()[0]) as channel, pytest.raises(grpc.RpcError) as caught:
            change(channel, "Load", "fickle")
        details = caught.value.details()
        assert details.startswith("worker 2: load failed for model 'fickle'"), details
        assert workers.on_each(lambda channel: ready(channel, "fickle")) == [False, False]


CRASH = """
import os
os.abort()
"""


def test_a_model_whose_code_ends_the_process_ends_one_worker(tmp_path: Path) -> None:
    write_model(tmp_path / "crash", CRASH)
    with Workers(tmp_path, *EXPLICIT) as workers:
        first, second = workers.pids()
        with workers.at(first) as channel, pytest.raises(grpc.RpcError):
            change(channel, "Load", "crash")
        workers.wait_for_serving(3)
        assert second in workers.pids()
        assert len(workers.on_each(lambda channel: infer(channel, "who"))) == 2


def log_settings(channel: grpc.Channel, **settings: int) -> dict[str, Any]:
    request = pb.LogSettingsRequest()
    for key, value in settings.items():
        request.settings[key].uint32_param = value
    reply = rpc(channel, "LogSettings", pb.LogSettingsResponse)(request, timeout=SECONDS)
    return {key: value.uint32_param for key, value in reply.settings.items()}


def trace_settings(channel: grpc.Channel, model: str = "", **settings: str) -> dict[str, list[str]]:
    request = pb.TraceSettingRequest(model_name=model)
    for key, value in settings.items():
        request.settings[key].value.append(value)
    reply = rpc(channel, "TraceSetting", pb.TraceSettingResponse)(request, timeout=SECONDS)
    return {key: list(value.value) for key, value in reply.settings.items()}


def grps_ready(channel: grpc.Channel) -> int:
    call = rpc(channel, "/grps.protos.v1.GrpsService/CheckReadiness", grps_pb2.GrpsMessage)
    return int(call(grps_pb2.GrpsMessage(), timeout=SECONDS).status.code)


@contextmanager
def shared_memory() -> Iterator[str]:
    """The key of 64 bytes."""
    key = f"/triglot-{uuid.uuid4().hex}"
    path = Path("/dev/shm") / key[1:]
    path.write_bytes(bytes(64))
    try:
        yield key
    finally:
        path.unlink(missing_ok=True)


def regions(channel: grpc.Channel) -> list[str]:
    call = rpc(channel, "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusResponse)
    return sorted(call(pb.SystemSharedMemoryStatusRequest(), timeout=SECONDS).regions)


def test_settings_reach_all_and_a_worker_that_comes_later(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    write_model(tmp_path / "two")
    trace_file = tmp_path.parent / "traces.json"
    options = ("--shared-memory-prefix", "/", "--trace-file", str(trace_file))
    with shared_memory() as key, Workers(tmp_path, *EXPLICIT, "--load-model", "two", *options) as workers:
        first, second = workers.pids()

        def look(channel: grpc.Channel) -> tuple[object, ...]:
            return (
                log_settings(channel)["log_verbose_level"],
                trace_settings(channel)["trace_rate"],
                trace_settings(channel, "who")["trace_rate"],
                regions(channel),
                grps_ready(channel),
                ready(channel, "one"),
                ready(channel, "two"),
            )

        assert workers.on_each(look) == [(0, ["1000"], ["1000"], [], 503, False, True)] * 2
        with workers.at(first) as channel:
            log_settings(channel, log_verbose_level=1)
            trace_settings(channel, trace_rate="7")
            register = pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=64)
            call = rpc(channel, "SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterResponse)
            call(register, timeout=SECONDS)
            change(channel, "Load", "one")
        with workers.at(second) as channel:
            trace_settings(channel, "who", trace_rate="3")
            online = rpc(channel, "/grps.protos.v1.GrpsService/Online", grps_pb2.GrpsMessage)
            online(grps_pb2.GrpsMessage(), timeout=SECONDS)
            change(channel, "Unload", "two")
        changed = (1, ["7"], ["3"], ["r"], 200, True, False)
        assert workers.on_each(look) == [changed] * 2
        os.kill(first, 9)
        workers.wait_for_serving(3)
        assert workers.on_each(look) == [changed] * 2
        with workers.at(second) as channel:
            unregister = rpc(channel, "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterResponse)
            unregister(pb.SystemSharedMemoryUnregisterRequest(name="r"), timeout=SECONDS)
            offline = rpc(channel, "/grps.protos.v1.GrpsService/Offline", grps_pb2.GrpsMessage)
            offline(grps_pb2.GrpsMessage(), timeout=SECONDS)
        assert workers.on_each(regions) == [[], []]
        assert workers.on_each(grps_ready) == [503, 503]


def test_settings_by_rest_reach_all(tmp_path: Path) -> None:
    options = ("--shared-memory-prefix", "/", "--trace-file", str(tmp_path.parent / "traces.json"))
    with shared_memory() as key, Workers(tmp_path, *options) as workers:

        def look(channel: grpc.Channel) -> tuple[object, ...]:
            verbose = log_settings(channel)["log_verbose_level"]
            return verbose, trace_settings(channel)["trace_rate"], regions(channel), grps_ready(channel)

        assert workers.on_each(look) == [(0, ["1000"], [], 503)] * 2
        for path, body in (
            ("/v2/logging", {"log_verbose_level": 1}),
            ("/v2/trace/setting", {"trace_rate": "7"}),
            ("/v2/systemsharedmemory/region/r/register", {"key": key, "byte_size": 64}),
        ):
            status, answer = workers.rest.post(path, body)
            assert status == 200, answer
        assert workers.rest.get("/grps/v1/health/online")[0] == 200
        assert workers.on_each(look) == [(1, ["7"], ["r"], 200)] * 2
        assert workers.rest.post("/v2/systemsharedmemory/region/r/unregister", {})[0] == 200
        assert workers.rest.get("/grps/v1/health/offline")[0] == 200
        assert workers.on_each(look) == [(1, ["7"], [], 503)] * 2


def test_a_wrong_setting_is_refused_as_by_one_process(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        with workers.at(workers.pids()[1]) as channel, pytest.raises(grpc.RpcError) as caught:
            log_settings(channel, log_errors=1)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "unknown log setting 'log_errors'" in caught.value.details()


def test_a_repository_entry_that_was_unloaded_and_deleted_keeps_no_worker_from_coming(tmp_path: Path) -> None:
    model = write_model(tmp_path / "gone")
    with Workers(tmp_path, "--model-control-mode", "explicit", "--load-model", "who,gone") as workers:
        with workers.at(workers.pids()[0]) as channel:
            change(channel, "Unload", "gone")
        model.unlink()
        model.parent.rmdir()
        os.kill(workers.pids()[1], 9)
        workers.wait_for_serving(3)
        assert workers.on_each(lambda channel: ready(channel, "gone")) == [False, False]
