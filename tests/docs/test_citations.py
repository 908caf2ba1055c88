"""Each `spec 2.1`, `tfs 4.3` or `grps 3.5` in the code leads to a heading of docs/contracts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.doc_pages import ROOT

CONTRACTS = {"spec": "kserve_v2", "tfs": "tensorflow_serving", "grps": "grps"}
"""The folder of the pages of each."""
FOLDERS = ("server", "tests", "bench", "codegen")
_SECTION = r"\d+(?:\.\d+)?(?!\.?\d)"
_GAP = r"\s+(?:\#\s*)?"
"""A citation may continue in the next line, of a comment too."""
_CITATION = re.compile(
    rf"\b(?P<contract>spec|tfs|grps){_GAP}(?P<sections>{_SECTION}(?:(?:,{_GAP}|[-–]|{_GAP}(?:to|and){_GAP}){_SECTION})*)"
)
_RANGE = re.compile(rf"({_SECTION})(?:[-–]|{_GAP}to{_GAP})({_SECTION})")
_HEADING = re.compile(r"^#+ (\d+(?:\.\d+)?) ", re.MULTILINE)


def sections_of(folder: Path) -> list[str]:
    """The numbers of its pages' headings."""
    return [number for page in folder.glob("*.md") for number in _HEADING.findall(page.read_text())]


def cited(code: str) -> Iterator[tuple[int, str, str]]:
    """The line, contract and number of every section that is cited; of a range, all that it has."""
    for match in _CITATION.finditer(code):
        line = code.count("\n", 0, match.start()) + 1
        numbers = re.findall(_SECTION, match["sections"])
        for first, last in _RANGE.findall(match["sections"]):
            numbers += _between(first, last)
        for number in dict.fromkeys(numbers):
            yield line, match["contract"], number


def _between(first: str, last: str) -> list[str]:
    chapter, _, start = first.rpartition(".")
    end = last.rpartition(".")[2]
    return [f"{chapter}.{number}".removeprefix(".") for number in range(int(start), int(end) + 1)]


def broken(folder: Path, sections: dict[str, list[str]]) -> list[str]:
    """The citations of a folder's Python files that lead nowhere, with file and line."""
    return [
        f"{file.relative_to(ROOT)}:{line}: {contract} {number}: no heading of {CONTRACTS[contract]}/*.md"
        for file in sorted(folder.rglob("*.py"))
        for line, contract, number in cited(file.read_text())
        if number not in sections[contract]
    ]


@pytest.fixture(scope="module")
def sections() -> dict[str, list[str]]:
    return {contract: sections_of(ROOT / "docs" / "contracts" / folder) for contract, folder in CONTRACTS.items()}


@pytest.mark.parametrize("name", FOLDERS)
def test_citations_lead_to_a_heading(name: str, sections: dict[str, list[str]]) -> None:
    assert not (found := broken(ROOT / name, sections)), "\n".join(found)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_number_occurs_once(contract: str, sections: dict[str, list[str]]) -> None:
    numbers = sections[contract]
    assert len(numbers) == len(set(numbers))


def test_what_is_a_citation() -> None:
    code = '''"""Of two (spec 2.1, 3.10).

    Ranges: tfs 3.1–3.3, and over lines (grps 5.1,
    7; grps
    11.4)."""
    # As there (spec
    # 0.15), not in grps 1.1.0, and not in a spec. The words of tfs 4.3.
    '''
    assert [(contract, number) for _, contract, number in cited(code)] == [
        ("spec", "2.1"),
        ("spec", "3.10"),
        ("tfs", "3.1"),
        ("tfs", "3.3"),
        ("tfs", "3.2"),
        ("grps", "5.1"),
        ("grps", "7"),
        ("grps", "11.4"),
        ("spec", "0.15"),
        ("tfs", "4.3"),
    ]
    assert [line for line, _, number in cited(code) if number == "11.4"] == [4]
