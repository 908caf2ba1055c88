"""What grps answers, call by call, for the toy models: our answers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.case_lines import Line
from tests.cases.grps_lines import FOLDER, ask, check, is_part, load
from tests.cases.grps_servers import Servers

pytestmark = pytest.mark.both_transports

FILES = (
    "health.jsonl",
    "http.jsonl",
    "tensors.jsonl",
    "models.jsonl",
    "streams.jsonl",
    "metadata.jsonl",
    "monitoring.jsonl",
    "grpc.jsonl",
    "dag.jsonl",
    "customized_http.jsonl",
    "header.jsonl",
    "limits.jsonl",
)
COUNT = 150
LINES = [line for file in FILES for line in load(file)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The toy project, served."""
    with Servers(tmp_path_factory.mktemp("toys")) as servers:
        yield servers


@pytest.mark.parametrize("line", [pytest.param(line, id=line["name"]) for line in LINES])
def test_toy_models(line: Line, servers: Servers) -> None:
    address = servers[line.get("server", "default")]
    check(line, ask(line, address.http_port, address.channel))


def test_no_case_is_lost() -> None:
    assert sorted(file.name for file in FOLDER.iterdir()) == sorted(FILES)
    assert len({line["name"] for line in LINES}) == len(LINES) == COUNT


@pytest.mark.parametrize(
    ("part", "answer", "expected"),
    [
        ({"a": 1}, {"a": 1.0000001, "b": 2}, True),
        ({"a": 1}, {"a": 1.001}, False),
        ({"a": 1}, {}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": {"$absent": True}}, {"b": 1}, True),
        ({"a": {"$absent": True}}, {"a": None}, False),
        ({"$contains": "b"}, "abc", True),
        ({"$contains": "d"}, "abc", False),
        ({"$prefix": "ab"}, "abc", True),
        ({"$prefix": "b"}, "abc", False),
        ([{"a": 1}, 2], [{"a": 1, "b": 2}, 2], True),
        ([1], [1, 2], False),
        ("1", 1, False),
    ],
)
def test_patterns(part: Any, answer: Any, expected: bool) -> None:
    assert is_part(part, answer) is expected
