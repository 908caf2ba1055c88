"""Unmodified clients have a server process trace their requests and change its log."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.client_scripts import ClientScript, Report
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS

SCRIPT = ClientScript("tritonclient", "triton_settings.py")


class Run:
    """What the client script found, and the log of the server, which has ended."""

    def __init__(self, folder: Path) -> None:
        with ServerProcess(str(PLAIN_MODELS), "--trace-file", str(folder / "traces")) as server:
            self.report: Report = SCRIPT.run(server, str(folder))
        self.log = server.stderr.text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One for all tests."""
    return Run(tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize("name", SCRIPT.check_names())
def test_check(name: str, run: Run) -> None:
    run.report.assert_held(name)


def test_every_check_is_reported_in_order(run: Run) -> None:
    run.report.assert_complete(SCRIPT)


def test_the_log_has_a_line_for_each_request_while_it_is_wanted(run: Run) -> None:
    lines = re.findall(
        r"^\d{4}-\S+Z I kserve (GRPC ModelInfer|REST infer) model=half_plus_two", run.log, re.MULTILINE
    )
    assert lines == ["GRPC ModelInfer"] * 2 + ["REST infer"] * 2


def test_traces_are_written_when_the_server_ends(tmp_path: Path) -> None:
    file = tmp_path / "traces"
    options = (str(PLAIN_MODELS), "--trace-file", str(file), "--trace-level", "TIMESTAMPS", "--trace-rate", "2")
    with ServerProcess(*options):
        pass
    assert not file.exists(), "nothing was asked"
    with ServerProcess(*options) as server:
        report = ClientScript("tritonclient", "triton_http.py", ("http",), ("triton_common.py",)).run(server)
        assert report.end.startswith("exit status 0\n"), report.end
    heads = [record for record in json.loads(file.read_text()) if "model_name" in record]
    assert len(heads) > 10
    assert len({head["id"] for head in heads}) == len(heads)
