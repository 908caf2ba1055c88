"""A client of grps with the classes that protoc makes, against a server process: one test per check."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import environments
from tests.e2e.client_scripts import CLIENTS, RUN_SECONDS, ClientScript, ReportOf, script_tests
from tests.e2e.server_process import ServerProcess
from tests.grps_toys import TOYS, grps_arguments
from tests.process import PLAIN_MODELS, clean_environment

SCRIPT = ClientScript("grps", "grps_stock.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportOf]:
    """What the script found."""
    with ServerProcess(*grps_arguments(TOYS, tmp_path_factory.mktemp("toys")), command="grps") as server:
        yield cache(lambda script: script.run(server))


test_check, test_every_check_is_reported_in_order = script_tests(SCRIPT)


@pytest.mark.parametrize("first", ["client", "server"])
def test_one_process(first: str, tmp_path: Path) -> None:
    """A client and a Triglot server live in one process, whichever comes first."""
    command = [str(environments.python("grps")), str(CLIENTS / "grps_one_process.py"), first]
    command += [str(PLAIN_MODELS / model) for model in ("uppercase", "token_stream")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env=clean_environment(TMPDIR=str(tmp_path)),
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
