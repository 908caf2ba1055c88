"""Workers die, are replaced, and end: others answer meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.gates import Gate
from tests.process import SECONDS, Triglot, is_listening, run_triglot, taken_port, unused_ports, write_model
from tests.protocol_clients.channel import grpc_channel
from tests.protocol_clients.kserve import infer
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until
from tests.workers.shared_ports import TRANSPORTS, Workers
from tests.workers.steady_callers import calling


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_that_is_killed_is_replaced_while_others_answer(tmp_path: Path, transport: str) -> None:
    with Workers(tmp_path, "--grpc-transport", transport) as workers:
        first, second = workers.pids()
        with calling(workers.grpc_port, workers.count) as callers:
            os.kill(first, signal.SIGKILL)
            before = callers.answers[second]
            wait_until(lambda: callers.answers[second] > before + 20)
            workers.wait_for_serving(3)
            (new,) = set(workers.pids()) - {first, second}
            wait_until(lambda: callers.answers[new] > 0)
        # What had a connection to it has lost that, and nothing else is said of it.
        assert all("UNAVAILABLE" in error for error in callers.errors), callers.errors
        assert "was terminated by SIGKILL" in workers.stderr.text()
        workers.stop()


def have_been_replaced(workers: Workers, times: int) -> bool:
    return workers.stderr.text().count("I rolling restart: all workers are replaced\n") == times


def test_replacing_all_workers_refuses_no_call(tmp_path: Path) -> None:
    """Over h2: grpc.aio gives no time between the end of its port and that of its calls."""
    write_model(tmp_path / "one")
    options = ("--model-control-mode", "explicit", "--load-model", "who", "--grpc-transport", "h2")
    with Workers(tmp_path, *options) as workers:
        workers.rest.post("/v2/repository/models/one/load", {})
        with calling(workers.grpc_port, workers.count) as callers:
            for round_ in (1, 2):
                old = workers.pids()
                workers.signal(signal.SIGHUP)
                wait_until(partial(have_been_replaced, workers, round_))
                assert not set(old) & set(workers.pids())
                wait_until(lambda: all(callers.answers[pid] for pid in workers.pids()))
        assert callers.errors == []
        assert workers.on_each(lambda channel: infer(channel, "one", 5)) == [5, 5]
        workers.stop()


async def test_connections_of_rest_are_closed_with_an_answer_when_a_worker_is_replaced(tmp_path: Path) -> None:
    with Workers(tmp_path, drain_delay=SECONDS) as workers:
        url = f"http://127.0.0.1:{workers.rest_port}/v2/models/who/infer"
        body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]}
        seen: set[int] = set()
        async with aiohttp.ClientSession() as session:

            async def ask() -> None:
                async with session.post(url, json=body) as response:
                    assert response.status == 200
                    seen.add((await response.json())["outputs"][0]["data"][0])

            await ask()
            workers.signal(signal.SIGHUP)
            while not have_been_replaced(workers, 1):
                await ask()
            await ask()
        # Its connection was to one that is gone, and nobody was let down.
        assert len(seen) > 1


def test_calls_that_run_have_their_time_when_a_worker_is_replaced(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open("load")
    with Workers(tmp_path, "--grpc-transport", "h2") as workers:
        with grpc_channel(workers.grpc_port) as channel:
            answered: list[int] = []
            caller = threading.Thread(target=lambda: answered.append(infer(channel, "gate", 3)))
            caller.start()
            gate.wait_until_it_waits(3)
            workers.signal(signal.SIGHUP)
            workers.wait_for_serving(3)
            gate.open(3)
            caller.join(SECONDS)
            assert answered == [3]
        workers.stderr.wait_for("I rolling restart: all workers are replaced\n")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sigterm_lets_calls_of_all_workers_end(tmp_path: Path, transport: str) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open("load")
    with Workers(tmp_path, "--grpc-transport", transport) as workers:
        first, second = workers.pids()
        with workers.at(first) as first_client, workers.at(second) as other:
            answered: list[int] = []
            callers = [
                threading.Thread(target=lambda at=at, value=value: answered.append(infer(at, "gate", value)))
                for value, at in ((1, first_client), (2, other))
            ]
            for caller in callers:
                caller.start()
            for value in (1, 2):
                gate.wait_until_it_waits(value)
            workers.signal(signal.SIGTERM)
            wait_until(lambda: not is_listening(workers.grpc_port))
            for value in (1, 2):
                gate.open(value)
            for caller in callers:
                caller.join(SECONDS)
            assert sorted(answered) == [1, 2]
        assert workers.wait() == 0
        assert "Traceback" not in workers.stderr.text()


def test_workers_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        pids = workers.pids()
        workers.signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)))
        assert not is_listening(workers.grpc_port)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_model_that_cannot_be_loaded_ends_all_with_the_status_of_one_process(tmp_path: Path) -> None:
    write_model(tmp_path / "bad", "import nothing_of_that_name\n")
    ports = ("--grpc-port", "0", "--rest-port", "0")
    single_process = run_triglot("serve", tmp_path, *ports)
    completed = run_triglot("serve", tmp_path, "--workers", "2", *ports)
    assert completed.returncode == single_process.returncode == 1
    assert "nothing_of_that_name" in completed.stderr
    # Each worker says what one process says, and nobody more.
    assert completed.stderr.count("Traceback (most recent") <= 2 * single_process.stderr.count(
        "Traceback (most recent"
    )


def test_workers_killed_before_any_serves_are_retried_and_abandoned(tmp_path: Path) -> None:
    write_model(tmp_path / "crash", "import os\nos.kill(os.getpid(), 9)\n")
    completed = run_triglot("serve", tmp_path, "--workers", "2", "--grpc-port", "0", "--rest-port", "0")
    assert completed.returncode == 1
    assert "restarting in 0.5 s" in completed.stderr
    assert "was terminated by SIGKILL" in completed.stderr


def test_a_worker_that_cannot_come_again_is_tried_later_and_later(tmp_path: Path) -> None:
    options = ("--model-control-mode", "explicit", "--load-model", "who")
    write_model(tmp_path / "one")
    with Workers(tmp_path, *options) as workers:
        workers.rest.post("/v2/repository/models/one/load", {})
        file = write_model(tmp_path / "one", "import nothing_of_that_name\n")
        os.kill(workers.pids()[0], signal.SIGKILL)
        workers.stderr.wait_for("worker 1: restarting in 1.0 s")
        # The other serves all the while, both its models.
        with grpc_channel(workers.grpc_port) as channel:
            assert infer(channel, "one", 4) == 4
        write_model(file.parent)
        workers.wait_for_serving(3)
        assert workers.on_each(lambda channel: infer(channel, "one", 5)) == [5, 5]


def test_a_port_that_is_taken_is_an_error_at_once(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    with taken_port() as port:
        completed = run_triglot("serve", tmp_path, "--workers", "2", "--grpc-port", str(port), "--rest-port", "0")
        assert completed.returncode == 1
        assert f"cannot listen on 127.0.0.1 port {port}" in completed.stderr


def test_a_second_server_does_not_share_the_ports(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        ports = ("--grpc-port", str(workers.grpc_port), "--rest-port", str(workers.rest_port))
        for count in ("1", "2"):
            completed = run_triglot("serve", tmp_path, "--workers", count, *ports)
            assert completed.returncode == 1, completed.stderr
            assert f"cannot listen on 127.0.0.1 port {workers.grpc_port}" in completed.stderr


def test_one_port_for_everything_is_shared_too(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    port, _ = unused_ports()
    arguments = (tmp_path, "--workers", "2", "--grpc-port", str(port), "--rest-port", str(port))
    options = ("--grpc-transport", "h2", "--drain-delay", "0")
    with Triglot(*arguments, *options) as workers:
        workers.stderr.wait_for(rf"gRPC on 127\.0\.0\.1:{port} and REST on the same port")
        with grpc_channel(port) as channel:
            assert infer(channel, "one", 3) == 3
        assert Rest(port).infer("one", 4)[1]["outputs"][0]["data"] == [4]
        workers.stop()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--workers", "0"), "--workers: expected at least 1, got 0"),
        (("--workers", "2", "--grpc-socket", "/tmp/s"), "grpc_socket: needs workers 1"),
    ],
)
def test_options_that_cannot_be(options: tuple[str, ...], text: str) -> None:
    completed = run_triglot("serve", *options)
    assert completed.returncode == 2
    assert text in completed.stderr
