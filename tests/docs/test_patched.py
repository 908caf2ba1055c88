"""How a `diff` of a page changes a file."""

from __future__ import annotations

import pytest

from tests.docs.doc_pages import patched

TEXT = "a\n\nb\nc\nb\n"


@pytest.mark.parametrize(
    ("diff", "changed"),
    [
        ("-a\n+x\n", "x\n\nb\nc\nb\n"),
        (" c\n b\n+d\n", "a\n\nb\nc\nb\nd\n"),
        (" a\n\n-b\n c\n", "a\n\nc\nb\n"),
        ("+x\n a\n@@\n-c\n+y\n", "x\na\n\nb\ny\nb\n"),
    ],
)
def test_hunks_are_found_by_their_lines(diff: str, changed: str) -> None:
    assert patched(TEXT, diff) == changed


@pytest.mark.parametrize(("diff", "times"), [("-d\n+e\n", 0), ("-b\n", 2), ("-c\n+d\n@@\n-c\n", 0)])
def test_hunk_that_fits_never_or_twice_is_an_error(diff: str, times: int) -> None:
    with pytest.raises(AssertionError, match=f"found {times} times"):
        patched(TEXT, diff)
