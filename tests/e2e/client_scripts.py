"""Client scripts: which checks each has, and what running it reports.

The names come from the scripts' source, so that tests can be collected without the clients' environments.
"""

from __future__ import annotations

import ast
import json
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import environments
from tests.e2e.server_process import ServerProcess
from tests.process import outcome, start_python

CLIENTS = Path(__file__).parent / "clients"
RUN_SECONDS = 300
PARAMETERS: dict[str, tuple[str, ...]] = runpy.run_path(str(CLIENTS / "checks.py"))["PARAMETERS"]


@dataclass(frozen=True)
class ClientScript:
    """A script of `clients/`, the environment that it needs, and the module of shared checks that it also runs."""

    environment: str
    file: str
    arguments: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.file.removesuffix(".py"), *self.arguments])

    def check_names(self) -> list[str]:
        """The name of every check that the script has to report."""
        return [name for file in (*self.shared, self.file) for name in _names_in(CLIENTS / file)]

    def run(self, server: ServerProcess, *more: str) -> Report:
        """Run it against the server, in its environment; `more` are its last arguments."""
        return self.run_with(server.grpc_address, server.rest_address, *self.arguments, *more)

    def run_with(self, *arguments: str) -> Report:
        """Run it in its environment."""
        python = environments.python(self.environment)
        done = outcome(start_python([str(CLIENTS / self.file), *arguments], python), RUN_SECONDS)
        return _report(done.stdout, done.stderr, f"exit status {done.returncode}")


@dataclass(frozen=True)
class Report:
    """What the checks of a script found: an empty text for one that held. `end` is how the script ended."""

    findings: dict[str, str]
    end: str

    def assert_held(self, name: str) -> None:
        """One check."""
        finding = self.findings.get(name, f"not reported: {self.end}")
        assert not finding, finding

    def assert_complete(self, script: ClientScript) -> None:
        """Every check is reported, in order, and the script has come to its end."""
        assert list(self.findings) == script.check_names(), self.end
        assert self.end.startswith("exit status 0\n"), self.end


ReportOf = Callable[[ClientScript], Report]
"""What a script found; with `functools.cache` it runs when it is first asked for."""


def script_tests(*scripts: ClientScript) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the tests of a module whose fixture `report` is a `ReportOf`: each check, and all are reported."""
    checks = [
        pytest.param(script, name, id=f"{script}-{name}") for script in scripts for name in script.check_names()
    ]

    @pytest.mark.parametrize(("script", "name"), checks)
    def test_check(script: ClientScript, name: str, report: ReportOf) -> None:
        report(script).assert_held(name)

    @pytest.mark.parametrize("script", scripts, ids=str)
    def test_every_check_is_reported_in_order(script: ClientScript, report: ReportOf) -> None:
        report(script).assert_complete(script)

    return test_check, test_every_check_is_reported_in_order


def _report(stdout: str, stderr: str, end: str) -> Report:
    results = [json.loads(line) for line in stdout.splitlines()]
    findings = {result["name"]: "" if result["ok"] else result["detail"] for result in results}
    assert len(findings) == len(results), "a check was reported twice"
    return Report(findings, f"{end}\n{stderr[-4000:]}")


def _names_in(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("check_"):
            name = node.name.removeprefix("check_")
            further = [argument.arg for argument in node.args.args[1:]]
            if further:
                yield from (f"{name}[{value}]" for value in PARAMETERS[further[0]])
            else:
                yield name
