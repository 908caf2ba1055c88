"""Request records and the audit log of several workers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.protocol_clients.channel import grpc_channel
from tests.protocol_clients.kserve import infer
from tests.recorded import logs_in
from tests.waiting import wait_until
from tests.workers.shared_ports import Workers


def test_each_worker_has_files_of_its_own(tmp_path: Path) -> None:
    """A worker that takes the place of another one begins a new file; what is counted is the sum."""
    calls = 0
    with Workers(tmp_path / "models", "--request-log", str(tmp_path / "r")) as workers:

        def called(*names: str) -> bool:
            nonlocal calls
            calls += 1
            with grpc_channel(workers.grpc_port) as channel:
                infer(channel, "who")
            return all((tmp_path / f"{name}.tfrecord").exists() for name in names)

        wait_until(lambda: called("r-w1-00001", "r-w2-00001"))
        workers.signal(signal.SIGHUP)
        workers.stderr.wait_for("rolling restart: all workers are replaced")
        wait_until(lambda: called("r-w1-00002", "r-w2-00002"))
        written = 'triglot_request_records_total{model="who",outcome="written"}'
        wait_until(lambda: workers.metrics().get(written) == calls)
        workers.stop()
    first, second = (logs_in(tmp_path, f"r-w{number}") for number in (1, 2))
    assert len(first) + len(second) == calls
    pids = [{log.predict_log.response.outputs["y"].tensor_content for log in logs} for logs in (first, second)]
    assert [len(pid) for pid in pids] == [2, 2]
    assert not pids[0] & pids[1]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_all_workers_write_to_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    calls = 40
    with Workers(tmp_path / "models", "--audit-log", str(file)) as workers:
        for number in range(calls):
            if number == calls // 2:
                wait_until(lambda: len(lines(file)) == calls // 2)
                file.rename(tmp_path / "audit.1")
                workers.signal(signal.SIGHUP)
            assert workers.rest.post("/v2/logging", {})[0] == 200
        workers.stderr.wait_for("rolling restart: all workers are replaced")
        workers.stop()
    assert len(lines(tmp_path / "audit.1")) == len(lines(file)) == calls // 2
