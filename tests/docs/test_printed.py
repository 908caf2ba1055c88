"""How what a page says is printed is compared with what is."""

from __future__ import annotations

import pytest

from tests.docs.doc_pages import assert_printed


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("a\nb\n", "\na\nb  \n"),
        ("a\n...\nd", "a\nb\nc\nd"),
        ("...\nb", "a\nb"),
        ("a\n...", "a\nb"),
        ("a\n...\nc\n...\ne", "a\nb\nc\nd\nc\ne"),
        ("...", ""),
        ("at …:8000 in … s", "at host:1234 in 1.5 s"),
    ],
)
def test_what_is_the_same(expected: str, printed: str) -> None:
    assert_printed(expected, printed, {"8000": "1234"})


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("a", "b"),
        ("a", "a\nb"),
        ("b", "a\nb"),
        ("a\n...\nc", "a\nb"),
        ("a…c", "ab"),
        ("ab…b", "ab"),
        ("a\n...\nb", "x\na\nb"),
    ],
)
def test_what_differs(expected: str, printed: str) -> None:
    with pytest.raises(AssertionError, match="expected:"):
        assert_printed(expected, printed, {})
