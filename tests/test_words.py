"""Messages, documentation, docstrings and names use the field's terms: phrases of a private dialect fail."""

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
ANYWHERE = {
    "told|tell|tells": "reports, returns, gets, logs, …",
    "said": "what it holds: message, parameters, config, …",
    "there|elsewhere|everywhere|nowhere": "missing, present, remote, round_trip, …",
    "beside|aside|apart": "separate, with, next_to, …",
    "goes|gone|went|took": "continues, removed, closed, cancelled, elapsed, …",
    "whoever|nobody|somebody|anybody": "client, caller, reader, waiter, or leave it out: unread, unused, …",
    "looking": "scanning, watching, …",
}
"""Words that no name has, and what names say instead."""
ALONE = {
    "one": "what it holds: request, model, connection, …",
    "ended": "has_ended, on_end, wait_ended, or what it holds",
    "counted|whole|alone": "what it holds: counts, total, is_complete, unbatched, …",
}
"""Words that are no names by themselves."""


def table(words: dict[str, str]) -> dict[str, str]:
    return {word: instead for together, instead in words.items() for word in together.split("|")}


PARTS, NAMES = table(ANYWHERE), table(ALONE)
PRONOUN = re.compile(r"(^|_)(the|a|an|any|each|every|next|last|other)_ones?$")


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The literals of more than a word but docstrings, each with its line; {} stands for what is filled in."""
    tree = ast.parse(source)
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in joined for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) not in skipped and len(text.split()) > 1:
            yield node.lineno, text


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings that document something, without the code in them, each with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str() as text)):
                yield node.lineno, re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "…", text))


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that a module gives to something, each with its line."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=str() as name)
                | ast.AsyncFunctionDef(name=str() as name)
                | ast.ClassDef(name=str() as name)
                | ast.arg(arg=str() as name)
                | ast.Name(id=str() as name, ctx=ast.Store())
                | ast.Attribute(attr=str() as name, ctx=ast.Store())
                | ast.alias(asname=str() as name)
                | ast.ExceptHandler(name=str() as name)
                | ast.MatchAs(name=str() as name)
                | ast.MatchStar(name=str() as name)
            ):
                yield node.lineno, name


def prose(page: str) -> str:
    """A page without code, addresses of links, comments, and the table that the options' own texts make."""
    page = re.sub(r"<!-- options: begin.*?options: end -->|<!--.*?-->", "", page, flags=re.DOTALL)
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\s+", " ", re.sub(r"`[^`]*`|\]\([^)]*\)", "…", page))


def dialect(text: str) -> list[str]:
    """What is wrong with a text."""
    return [f"{m[0]!r}: say {instead!r}" for pattern, instead in DIALECT.items() for m in pattern.finditer(text)]


def private(name: str) -> list[str]:
    """What is wrong with a name."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    found = [f"{word!r}: say {PARTS[word]!r}" for word in words if word in PARTS]
    if (bare := name.strip("_")) in NAMES:
        found.append(f"{bare!r}: say {NAMES[bare]!r}")
    if PRONOUN.search(name):
        found.append(f"{words[-1]!r}: say {NAMES['one']!r}")
    return found


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """The Python files below these folders but generated ones, by their path, with what is in them."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent.parent.name != "pb":
                yield str(path.relative_to(ROOT)), path.read_text("utf-8")


@pytest.mark.parametrize("text", ["whoever asks", "the caller left", "3 are on their way", "x is no JSON"])
def test_dialect_is_found(text: str) -> None:
    assert dialect(prose(text.replace(" ", "\n")))
    for literal in (repr(text), f"f{text + ': {at}'!r}"):
        [(line, message)] = messages(f"raise ValueError({literal})")
        assert line == 1
        assert dialect(message)
    [(line, document)] = docstrings(ast.parse(f'x = 1\n"""{text.replace(" ", chr(10))}"""'))
    assert line == 2
    assert dialect(document)


@pytest.mark.parametrize(
    "code",
    [
        "def test_client_is_told(): pass",
        "async def f(*, said=1): pass",
        "class GoneAway: pass",
        "[one for one in models]",
        "lambda one: 0",
        "self._ended = 1",
        "import socket as elsewhere",
        "with lock as the_one: pass",
        "for at, (x, took) in models: pass",
        "if (nobody := find()): pass",
    ],
)
def test_private_name_is_found(code: str) -> None:
    assert [line for line, name in names(ast.parse(f"import x\n{code}")) if private(name)] == [2]


@pytest.mark.parametrize(
    "name", ["has_ended", "on_end", "one_row", "ONE", "ENDED", "part", "retold", "is_counted"]
)
def test_standard_name_is_not_found(name: str) -> None:
    assert private(name) == []


@pytest.mark.parametrize("text", ["`whoever`", "[a](told.md)", "```sh\necho is told\n```", "<!-- is told -->"])
def test_code_of_a_page_may_say_anything(text: str) -> None:
    assert dialect(prose(text)) == []


def test_messages_use_standard_terms() -> None:
    found = [
        f"{file}:{line}: {wrong} in {text!r}"
        for file, source in sources("server/triglot")
        for line, text in messages(source)
        for wrong in dialect(text)
    ]
    assert not found, "\n".join(found)


def test_names_and_docstrings_use_standard_terms() -> None:
    found = []
    for file, source in sources("server", "tests", "bench", "codegen", "examples"):
        tree = ast.parse(source)
        stem = Path(file).stem
        found += [
            f"{file}:{line}: {wrong} in {text!r}" for line, text in docstrings(tree) for wrong in dialect(text)
        ]
        found += [
            f"{file}:{line}: {wrong} in {name}"
            for line, name in [(1, stem), *names(tree)]
            for wrong in private(name)
        ]
    assert not found, "\n".join(found)


def test_the_documentation_uses_standard_terms() -> None:
    pages = [page for folder in ("docs", "examples") for page in (ROOT / folder).rglob("*.md")]
    pages += ROOT.glob("*.md")
    # What was released is as it was, and contracts say what other programs say.
    read = [page for page in pages if page.name.lower() != "changelog.md" and "contracts" not in page.parts]
    found = [
        f"{page.relative_to(ROOT)}: {wrong}"
        for page in sorted(read)
        for wrong in dialect(prose(page.read_text("utf-8")))
    ]
    assert not found, "\n".join(found)
