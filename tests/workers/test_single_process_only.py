"""What only one process can do, and how it is said."""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path

import pytest

import triglot
from tests.gates import Gate
from tests.process import SECONDS, Triglot
from tests.protocol_clients.kserve import infer
from tests.workers.shared_ports import Workers
from triglot.config.options import ConfigError

MODELS = Path(__file__).parents[1] / "models_triton"


def test_a_server_in_a_program_is_one_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers: expected 1"):
        triglot.Server([tmp_path], triglot.Config(workers=2))


def test_sequences_with_workers_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "simple_sequence").symlink_to(MODELS / "simple_sequence")
    with Workers(tmp_path, "--allow-symlinks") as workers:
        logged = workers.stderr.text()
        assert logged.count("send all requests of a sequence over one connection") == 1
        assert "worker 1: simple_sequence" in logged
        workers.stop()


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    ports = ("--grpc-port", "0", "--rest-port", "0")
    with Triglot(tmp_path, "--workers", "2", *ports) as workers:
        gate.wait_until_it_waits("load")
        workers.signal(signal.SIGTERM)
        workers.stderr.wait_for("stopping; a second signal stops at once")
        workers.signal(signal.SIGTERM)
        assert workers.wait() in (0, 1, -signal.SIGTERM)  # By itself, too late to hear the second one, or by it.


def test_traces_of_each_worker_are_in_a_file_of_its_own(tmp_path: Path) -> None:
    models, file = tmp_path / "models", tmp_path / "traces.json"
    options = ("--trace-file", str(file), "--trace-level", "TIMESTAMPS", "--trace-rate", "1")
    with Workers(models, *options) as workers:
        workers.on_each(lambda channel: infer(channel, "who"))
        workers.stop()
    assert sorted(path.name for path in tmp_path.glob("traces*")) == ["traces-worker1.json", "traces-worker2.json"]


def test_a_worker_that_says_nothing_does_not_keep_the_others_numbers_back(tmp_path: Path) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]})
    with Workers(tmp_path) as workers:
        first, second = workers.pids()
        connection = http.client.HTTPConnection("127.0.0.1", workers.rest_port, timeout=SECONDS)
        workers.metrics()
        pid = 0
        while pid != second:
            connection.close()
            connection.request("POST", "/v2/models/who/infer", body)
            pid = json.load(connection.getresponse())["outputs"][0]["data"][0]
        os.kill(first, signal.SIGSTOP)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            os.kill(first, signal.SIGCONT)
            connection.close()
        assert 'triglot_worker_up{worker="1"} 0.0' in text
        assert 'triglot_worker_up{worker="2"} 1.0' in text
        assert 'nv_inference_count{model="who",version="1"}' in text
        assert "worker 1 (pid" in workers.stderr.wait_for(r"worker 1 .* did not report its metrics").group(0)
