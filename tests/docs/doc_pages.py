"""Pages of the documentation as a reader runs them: each block of code, in order, in a folder of the page's own.

A block with a title is a file, and a `diff` with one changes it. One `triglot` command that serves is the page's
server from there on. Other shell blocks run in bash, and Python without a title with the server up. A text block
after one of these is what it prints. Configuration is parsed. `<!-- not run: REASON -->` before a block leaves it
out. A page of an example has its folder's files. Files of the project's own folders are those of a copy, which
then runs in place of the project.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import yaml
from google.protobuf import text_format

from tests import environments
from tests.process import Triglot, clean_environment, outcome, start_python
from tests.waiting import wait_until
from triglot.cli.main import command_line
from triglot.cli.serve import start
from triglot.pb.kserve import model_config_pb2

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for folder in (ROOT / "docs", EXAMPLES) for page in sorted(folder.rglob("*.md"))),
]
RUN_SECONDS = 120
INSTALLS = "installs packages"
"""Why blocks are not run that would change the environment of the tests."""
SERVES = ("serve", "tfserving", "grps")
WELL_KNOWN = ("8000", "8001", "8500", "8501")
"""Ports of the text, which are others where it is run."""
OTHER_LIBRARIES = {
    "tritonclient": "tritonclient",
    "kserve": "kserve",
    "mlserver": "mlserver",
    "tensorflow": "tensorflow",
    "tensorflow_serving": "tensorflow",
    "torch": "torch",
    "sklearn": "ml",
    "catboost": "ml",
    "lightgbm": "ml",
    "xgboost": "ml",
    "joblib": "ml",
}
"""The environment that has each library."""
PROJECT = ("codegen", "conftest.py", "docs", "protos", "pyproject.toml", "server", "tests")
"""What a copy of the project has."""
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_TITLE = re.compile(r'\btitle="([^"]+)"')
_ASSIGNMENT = re.compile(r"[A-Z_]+=")
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, and why it is `not_run`, if so. `line`: of its fence."""

    language: str
    title: str
    text: str
    line: int
    not_run: str = ""


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    blocks = []
    for match in _FENCE.finditer(page):
        indent, info = match["indent"], match["info"].strip()
        title = _TITLE.search(info)
        reason = _NOT_RUN.search(page[: match.start()].rstrip() + "\n")
        text = "".join(line.removeprefix(indent) for line in match["text"].splitlines(keepends=True))
        line = page.count("\n", 0, match.start()) + 1
        language = info.split()[0] if info else ""
        blocks.append(Block(language, title[1] if title else "", text, line, reason[1] if reason else ""))
    return blocks


class Reader:
    """Runs the blocks of a page in `folder`; to be closed.

    `python`: an environment of its own that runs every block, those that install packages, too.
    """

    def __init__(self, folder: Path, python: Path | None = None) -> None:
        self._folder = folder
        self._own_python = python
        self._server = ExitStack()
        self._ports: dict[str, str] = {}
        self._printed: str | None = None
        self._changed: dict[str, str] = {}
        """The environment that has a changed project run."""

    def close(self) -> None:
        """End the server."""
        self._server.close()

    def read(self, block: Block) -> None:
        """Raise `AssertionError` for what does not do as the page says."""
        printed, self._printed = self._printed, None
        if block.not_run and not (self._own_python and block.not_run == INSTALLS):
            return
        if block.title:
            self._write(block)
        if block.language == "text":
            assert printed is not None, "a text block that follows no command"
            assert_printed(block.text, printed, self._ports)
        elif block.language in ("sh", "bash"):
            self._run_shell(block.text)
        elif block.language == "python":
            ast.parse(block.text)
            if not block.title:
                self._run_python(block.text)
        elif not (block.title and block.language in ("diff", "proto")):
            check_syntax(block.language, block.text)

    def _write(self, block: Block) -> None:
        if block.title.partition("/")[0] in PROJECT and not self._changed:
            self._copy_project()
        file = self._folder / block.title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(patched(file.read_text(), block.text) if block.language == "diff" else block.text)

    def _copy_project(self) -> None:
        for name in PROJECT:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self._folder / name)
            else:
                shutil.copy2(ROOT / name, self._folder)
        self._changed = {"PYTHONPATH": str(self._folder / "server")}

    def _run_shell(self, text: str) -> None:
        command = shlex.split(text, comments=True)
        variables = dict(word.split("=", 1) for word in takewhile(_ASSIGNMENT.match, command))
        command = command[len(variables) :]
        if command[:1] == ["triglot"] and command[1:2] and command[1] in SERVES:
            self._serve(command[1], command[2:], variables)
        elif command[:1] == ["python"] and command[1:] and self._is_own_script(command[1]):
            self._run_python((self._folder / command[1]).read_text())
        else:
            if command[:2] == ["triglot", "replay"]:  # The server writes records while a reader reads on.
                wait_until((self._folder / command[2]).exists)
            self._printed = _printed(
                subprocess.Popen(
                    ["bash", "-ec", self._ported(text)],
                    cwd=self._folder,
                    # A package that a block installed would be there for all other tests.
                    env=clean_environment(
                        **self._variables(), **({} if self._own_python else {"PIP_NO_INDEX": "1"})
                    ),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def _serve(self, command: str, arguments: list[str], variables: dict[str, str]) -> None:
        self._server.close()
        python = self._own_python or environments.python(self._environment_of_models())
        environment = QUICK | self._changed | variables
        server = Triglot(*arguments, command=command, python=python, environment=environment, folder=self._folder)
        self._server.enter_context(server)
        self._server.callback(_end, server)
        grpc, rest = server.ports()
        self._ports = dict(zip(WELL_KNOWN, map(str, (rest, grpc, grpc, rest)), strict=True))

    def _environment_of_models(self) -> str:
        """The one that has what the models of the folder need."""
        own = [folder for folder in self._folder.iterdir() if folder.name not in PROJECT]
        files = [file for folder in own for file in (folder, *folder.rglob("*"))]
        kinds, names = {file.suffix for file in files}, {file.name for file in files}
        if "saved_model.pb" in names:
            return "tensorflow"
        if kinds & {".pt", ".pt2"}:
            return "torch"
        return "ml" if kinds & {".joblib", ".pkl", ".bst", ".ubj"} else "dev"

    def _is_own_script(self, name: str) -> bool:
        """Whether it is a page's script, not a program of the project."""
        return name.partition("/")[0] not in PROJECT and (self._folder / name).is_file()

    def _run_python(self, text: str) -> None:
        """Run it in the environment that has what it imports."""
        imported = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(text))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        other = next((OTHER_LIBRARIES[name] for name in sorted(imported) if name in OTHER_LIBRARIES), "dev")
        python, code = self._own_python or environments.python(other), self._ported(text)
        self._printed = _printed(start_python(["-c", code], python, self._variables(), self._folder))

    def _ported(self, text: str) -> str:
        for known, port in self._ports.items():
            text = re.sub(rf"(?<=:){known}\b", port, text)
            if known == "8001":  # Of gRPC, where no other one is named.
                text = re.sub(
                    r"triglot (infer|models|traffic)(?= |$)",
                    rf"triglot \1 --url 127.0.0.1:{port}",
                    text,
                    flags=re.MULTILINE,
                )
        return text

    def _variables(self) -> dict[str, str]:
        if self._own_python is not None:  # Before its first block, the system's Python.
            return {"PATH": f"{self._own_python.parent}:/usr/bin:/bin"}
        scripts = Path(sys.executable).parent
        return {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", **self._changed}


def _end(server: Triglot) -> None:
    """Let the server end itself: killed, it would leave the processes that its models have started."""
    if server.runs:
        server.signal(signal.SIGTERM)
        try:
            server.wait()
        except subprocess.TimeoutExpired:  # A call that never ends holds it.
            server.signal(signal.SIGKILL)
            raise


def _printed(process: subprocess.Popen[str]) -> str:
    done = outcome(process, RUN_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


QUICK = {
    "TRIGLOT_HOST": "127.0.0.1",
    "TRIGLOT_GRPC_PORT": "0",
    "TRIGLOT_REST_PORT": "0",
    "TRIGLOT_DRAIN_DELAY": "0",
}


def patched(text: str, diff: str) -> str:
    """A text with the changes of a diff: its hunks, `@@` between them, are found by their lines alone."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = [" \n" if line == "\n" else line for line in hunk.splitlines(keepends=True)]
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"found {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text


def assert_printed(expected: str, printed: str, ports: dict[str, str]) -> None:
    """`...` as a line stands for any lines, `…` for any text of a line; ports are those of the text."""
    for known, port in ports.items():
        printed = re.sub(rf"(?<=:){port}\b", known, printed)
    lines = [line.rstrip() for line in printed.strip().splitlines()]
    runs = _runs([line.rstrip() for line in expected.strip().splitlines()])
    at = 0
    for number, run in enumerate(runs):
        # The first run is at the beginning, the last one at the end, and those between are where they come first.
        starts = range(at, len(lines) - len(run) + 1)
        starts = starts[:1] if number == 0 else starts[-1:] if number == len(runs) - 1 else starts
        found = (start for start in starts if all(map(_is_like, run, lines[start : start + len(run)])))
        start = next(found, None)
        assert start is not None, f"expected:\n{expected}\nprinted:\n{printed}"
        at = start + len(run)
    assert at == len(lines) or not runs[-1], f"expected:\n{expected}\nprinted:\n{printed}"


def _runs(lines: list[str]) -> list[list[str]]:
    """What stands between lines of three dots."""
    runs: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == "...":
            runs.append([])
        else:
            runs[-1].append(line)
    return runs


def _is_like(expected: str, line: str) -> bool:
    head, *parts = expected.split("…")
    if not parts:
        return line == expected
    *parts, tail = parts
    if not line.startswith(head) or not line.endswith(tail) or len(line) < len(head) + len(tail):
        return False
    rest = line[len(head) : len(line) - len(tail)]
    for part in parts:
        _, found, rest = rest.partition(part)
        if part and not found:
            return False
    return True


def check_syntax(language: str, text: str) -> None:
    """Whether it can be read as what it says it is."""
    if language == "toml":
        tomllib.loads(text)
    elif language == "json":
        json.loads(text)
    elif language == "pbtxt":
        text_format.Parse(text, model_config_pb2.ModelConfig())
    elif language == "ini":
        unit = configparser.ConfigParser(interpolation=None)
        unit.read_string(text.replace("\\\n", ""))
        _, _, arguments = unit["Service"]["ExecStart"].partition("triglot ")
        check_options(arguments.split())
    elif language == "yaml":
        for document in yaml.safe_load_all(text):
            if "services" in document:  # Of Compose, whose image starts with `triglot serve`.
                for service in document["services"].values():
                    check_options(["serve", *service["command"]])
            else:
                for container in document["spec"]["containers"]:
                    check_options(container["args"])
    else:
        raise AssertionError(f"a block of {language!r}: expected sh, python, text, toml, json, pbtxt, ini or yaml")


def check_options(words: list[str]) -> None:
    """Whether `triglot serve` takes what a unit of systemd, or a pod, starts it with."""
    flags = vars(command_line().parse_args(words))
    assert flags.pop("command") == "serve"
    start(flags, [], {})


def links_of(page: str) -> Iterator[str]:
    """The targets of its links, without those in code."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page))
    yield from (match[1] for match in re.finditer(r"\]\(([^)\s]+)\)", text))


def blocks_below(page: str, anchor: str) -> list[Block]:
    """The blocks between the heading that links call so and the next one."""
    lines = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page).splitlines()
    headings = [number for number, line in enumerate(lines, start=1) if line.startswith("#")]
    start = next(number for number in headings if anchor in anchors_of(lines[number - 1]))
    end = next((number for number in headings if number > start), len(lines) + 1)
    return [block for block in blocks_of(page) if start < block.line < end]


def anchors_of(page: str) -> set[str]:
    """What headings of a page are called in links, as GitHub calls them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
