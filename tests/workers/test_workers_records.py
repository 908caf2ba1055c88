"""Request records of several workers: each has files of its own."""

from __future__ import annotations

import signal
from pathlib import Path

from shared_ports import Workers

from protocol_clients.channel import grpc_channel
from protocol_clients.kserve import infer
from recorded import logs_in
from waiting import wait_until


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
