"""`triglot token`: what it prints is what the server takes."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from tests.process import run_triglot
from triglot.access.file import read_access
from triglot.core.operation import INSPECTION, Operation

TOKEN = re.compile(r"[A-Za-z0-9_-]{43}\n")


@pytest.mark.parametrize("name", ["search", "a.b@example-1"])
def test_a_token_and_the_lines_for_the_file(name: str) -> None:
    completed = run_triglot("token", name)
    assert completed.returncode == 0
    assert TOKEN.fullmatch(completed.stdout)
    token = completed.stdout.strip()
    assert token not in completed.stderr
    (client,) = read_access(Path("access.toml"), completed.stderr.encode()).clients
    assert (client.name, client.tokens) == (name, (hashlib.sha256(token.encode()).digest(),))
    assert client.operations == INSPECTION | {Operation.INFER}
    assert client.models == ("*",)


def test_operations_and_models() -> None:
    completed = run_triglot("token", "ops", "--operations", "health, model-control", "--models", "rank-*,other")
    (client,) = tomllib.loads(completed.stderr)["client"].values()
    assert (client["operations"], client["models"]) == (["health", "model-control"], ["rank-*", "other"])


def test_each_token_is_another() -> None:
    assert len({run_triglot("token", "search").stdout for _ in range(2)}) == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("a b",), "client.a b: a name has up to 64 letters"),
        (("",), "client.: a name has up to 64 letters"),
        (("x" * 65,), f"client.{'x' * 65}: a name has up to 64 letters"),
        (("]\nx",), "client.]"),
        (("a", "--operations", "infre"), "unknown operation 'infre', did you mean 'infer'?"),
        (("a", "--operations", ""), "client.a.operations: expected a list of texts"),
        (("a", "b"), "token: expected one NAME, got 'b', too"),
        (("a", "--models", "x,,y"), "client.a.models: expected a list of texts"),
    ],
)
def test_what_the_file_could_not_have(arguments: tuple[str, ...], problem: str) -> None:
    completed = run_triglot("token", *arguments)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.startswith("triglot: ")
    assert problem in completed.stderr


def test_help_says_how_it_is_used() -> None:
    completed = run_triglot("token", "--help")
    assert "access.toml" in completed.stdout
    assert "--operations" in completed.stdout
