"""A Prometheus, of Debian's package, that scrapes servers and has the alert rules, and what it answers."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.deploy.shipped import ALERTS
from tests.process import SECONDS, clean_environment
from triglot.testing.process import Lines


class Prometheus:
    """Its HTTP API at `url`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer. Raise `AssertionError` with the answer that is an error."""
        async with self.session.get(f"{self.url}/api/v1/{path}", params=parameters) as response:
            answer = await response.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def query(self, expression: str) -> list[Any]:
        """What an expression has now."""
        result: list[Any] = (await self.ask("query", query=expression))["result"]
        return result


@asynccontextmanager
async def prometheus(
    program: str, folder: Path, ports: Sequence[int], interval: str = "1s"
) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes /metrics at these ports of this machine so often, as the job `triglot`."""
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": "triglot", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = _started(program, folder)
    assert process.stderr is not None
    log = Lines(process.stderr)
    try:
        port = (await asyncio.to_thread(log.wait_for, r'msg="Listening on" address=127\.0\.0\.1:(\d+)'))[1]
        await asyncio.to_thread(log.wait_for, "Server is ready to receive web requests")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS)) as session:
            yield Prometheus(session, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
        log.close()


def _started(program: str, folder: Path) -> subprocess.Popen[str]:
    """Its process, on a free port, with its data in the folder of its configuration."""
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--enable-feature=exemplar-storage",
    ]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=clean_environment()
    )
