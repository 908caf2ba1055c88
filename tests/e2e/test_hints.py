"""The sample commands that a started server prints work as they are pasted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest

from tests.e2e.server_process import ServerProcess
from tests.process import FREE_PORTS, PLAIN_MODELS, Triglot, clean_environment

SECONDS = 30
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture
def hints(server: ServerProcess) -> list[str]:
    """What the server printed."""
    return printed(server)


@pytest.fixture(scope="module")
def tfserving_hints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What `triglot tfserving` prints for a small model."""
    base_path = tmp_path_factory.mktemp("half")
    shutil.copytree(PLAIN_MODELS / "half_plus_three", base_path / "1")
    environment = {"TRIGLOT_HOST": "127.0.0.1", "TRIGLOT_GRPC_PORT": "0", "TRIGLOT_REST_PORT": "0"}
    arguments = (f"--model_base_path={base_path}", "--model_name=half")
    with Triglot(*arguments, command="tfserving", environment=environment) as server:
        yield printed(server)


def printed(server: Triglot) -> list[str]:
    server.stdout.wait_for(re.compile("^curl .*\n", re.MULTILINE))
    return server.stdout.text().splitlines()


def paste(command: str) -> str:
    """What the line prints."""
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pages(hints: list[str], tfserving_hints: list[str]) -> None:
    monitor, api, _, _ = hints
    for line in (monitor, api):
        assert paste(line) == ""
        asked = urllib.request.Request(line.split()[-1], headers={"accept": "text/html"})
        with urllib.request.urlopen(asked) as answer:
            assert "<title>" in answer.read().decode()
    assert len(tfserving_hints) == 1


def test_the_command_line(hints: list[str]) -> None:
    (output,) = json.loads(paste(hints[2]))["outputs"]
    assert output["data"] == [3.75]


@needs_curl
def test_curl(hints: list[str], tfserving_hints: list[str]) -> None:
    assert json.loads(paste(hints[3])) == {"y": [3.75]}
    assert "/v1/models/half:predict" in tfserving_hints[-1]
    assert json.loads(paste(tfserving_hints[-1])) == {"outputs": [3.75]}


@needs_curl
@pytest.mark.parametrize(
    ("model", "answer"), [("uppercase", {"upper": ["TEXT"]}), ("token_stream", {"token": ["text"]})]
)
def test_curl_of_texts_and_of_streams(model: str, answer: dict[str, object]) -> None:
    with Triglot(PLAIN_MODELS / model, *FREE_PORTS) as server:
        text = paste(printed(server)[-1])
    assert json.loads(text.removeprefix("data: ").split("\n\n")[0]) == answer
