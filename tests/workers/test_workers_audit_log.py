"""The audit log of several workers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from shared_ports import Workers

from waiting import wait_until


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
