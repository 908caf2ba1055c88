"""What users read, messages and documentation, uses the field's terms: a few phrases of a private dialect fail."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "server" / "triglot"
INSTEAD = {
    r"whoever|nobody|somebody|anybody|who (comes|leaves|waits|asks|sends|reaches)": "the client, the caller, …",
    r"(is|are|was|were|be) told|tells?( you)? (of|that)": "returns, reports, says",
    r"what (waits|comes|goes)": "queued requests, …",
    r"(come|comes|came|coming) again": "retry",
    r"(caller|client|who) (has )?(left|leaves|gone)": "disconnected, or: the request was cancelled",
    r"on (its|their) way": "in flight",
    r"at the latest": "within, or a deadline",
    r"(is|are) left out|leaves? out": "skipped, omitted",
    r"given up|gives up on": "cancelled, abandoned",
    r"(handed|hands?|handing) (over|back|to and fro)": "passed, sent, returned",
    r"signs? of life|without a word": "heartbeat, keepalive",
    r"goes on( with)?|go on( with)?": "continues, keeps serving",
    r"as many as (may be|there may be)": "the limit",
    r"(is|are) no (JSON|HTTP|folder|text|bool|array|object|list)": "is not …",
    r"(is|are) (there )?twice|comes twice": "duplicate",
    r"not \w+ any more|any more": "no longer",
    r"what nobody|said what": "invalid",
    r"(of|from) (us|ours)|theirs": "say whose",
    r"(two|rows of|its|the server's) doors?": "ports, services, routes",
}
DIALECT = {re.compile(rf"\b({phrase})\b", re.IGNORECASE): instead for phrase, instead in INSTEAD.items()}


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The literals of more than a word, docstrings aside, each with its line; {} stands for what is filled in."""
    tree = ast.parse(source)
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    aside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    aside |= {id(part) for node in joined for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) not in aside and len(text.split()) > 1:
            yield node.lineno, text


def prose(page: str) -> str:
    """A page without code, addresses of links, comments, and the table that the options' own texts make."""
    page = re.sub(r"<!-- options: begin.*?options: end -->|<!--.*?-->", "", page, flags=re.DOTALL)
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\s+", " ", re.sub(r"`[^`]*`|\]\([^)]*\)", "…", page))


def dialect(text: str) -> list[str]:
    """What is wrong with a text."""
    return [f"{m[0]!r}: say {instead!r}" for pattern, instead in DIALECT.items() for m in pattern.finditer(text)]


@pytest.mark.parametrize("text", ["whoever asks", "the caller left", "3 are on their way", "x is no JSON"])
def test_dialect_is_found(text: str) -> None:
    assert dialect(prose(text.replace(" ", "\n")))
    for literal in (repr(text), f"f{text + ': {at}'!r}"):
        [(line, message)] = messages(f"raise ValueError({literal})")
        assert line == 1
        assert dialect(message)


@pytest.mark.parametrize("text", ["`whoever`", "[a](told.md)", "```sh\necho is told\n```", "<!-- is told -->"])
def test_code_of_a_page_may_say_anything(text: str) -> None:
    assert dialect(prose(text)) == []


def test_messages_use_standard_terms() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.parent.name != "pb"]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {wrong} in {text!r}"
        for path in sorted(files)
        for line, text in messages(path.read_text("utf-8"))
        for wrong in dialect(text)
    ]
    assert not found, "\n".join(found)


def test_the_documentation_uses_standard_terms() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    # What was released is as it was, and contracts say what other programs say.
    read = [page for page in pages if page.name != "CHANGELOG.md" and "contracts" not in page.parts]
    found = [
        f"{page.relative_to(ROOT)}: {wrong}"
        for page in sorted(read)
        for wrong in dialect(prose(page.read_text("utf-8")))
    ]
    assert not found, "\n".join(found)
