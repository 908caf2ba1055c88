"""The file for Compose on the page about Docker: what it starts, and how it asks whether that is ready."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import environments
from tests.process import FREE_PORTS, SECONDS, Triglot, write_model
from triglot.config.options import Config

PAGE = environments.ROOT / "docs" / "docker_systemd.md"


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    match = re.search(r'^```yaml title="compose\.yaml"\n(.*?)^```', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert match
    (service,) = yaml.safe_load(match[1])["services"].values()
    found: dict[str, Any] = service
    return found


def test_what_the_file_starts_is_healthy_while_it_serves(tmp_path: Path, service: dict[str, Any]) -> None:
    write_model(tmp_path / "one")
    [volume] = service["volumes"]
    _, models, mode = volume.split(":")
    assert mode == "ro"
    arguments = [str(tmp_path) if argument == models else argument for argument in service["command"]]
    kind, python, flag, code = service["healthcheck"]["test"]
    assert (kind, python, flag) == ("CMD", "python", "-c")

    def healthy(rest_port: int) -> bool:
        command = [environments.python("dev"), "-c", code.replace(":8000", f":{rest_port}")]
        return subprocess.run(command, capture_output=True, timeout=SECONDS, check=False).returncode == 0

    with Triglot(*arguments, *FREE_PORTS, environment=service["environment"]) as server:
        _, rest_port = server.ports()
        assert healthy(rest_port)
    assert not healthy(rest_port)


def test_containers_have_the_time_that_calls_in_flight_get(service: dict[str, Any]) -> None:
    assert int(service["stop_grace_period"].removesuffix("s")) > Config().drain_delay + 2 * Config().grace
