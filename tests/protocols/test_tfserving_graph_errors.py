"""A graph's error without the place of the operation."""

from __future__ import annotations

import pytest

from triglot.protocols.tfserving.ai_platform import without_node
from triglot.protocols.tfserving.rest_examples import advice

INTEGER = "Data types don't match. Data type: int64 but expected type: float"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Divide by zero", "Divide by zero"),
        ("Integer division by zero\n\t [[{{node floordiv}}]]", "Integer division by zero"),
        (
            "assertion failed: [x must not be negative.]\n\t [[{{node Assert}}]]\n\t [[StatefulPartitionedCall]]",
            "assertion failed: [x must not be negative.]",
        ),
        (
            "2 root error(s) found.\n  (0) INVALID_ARGUMENT: no [[two]] rows\n\t [[{{node a}}]]\n\t [[b/_3]]\n"
            "  (1) INVALID_ARGUMENT: others\n\t [[{{node a}}]]\n0 successful operations.\n"
            "0 derived errors ignored.",
            "no [[two]] rows",
        ),
        ("a line\n\tand another", "a line\n\tand another"),
        ("", ""),
    ],
)
def test_text_without_node(text: str, plain: str) -> None:
    assert without_node(text) == plain


@pytest.mark.parametrize("name", ["x", "my feature", "größe", "a, Index: 1"])
def test_advice_names_the_feature(name: str) -> None:
    text = f"Name: <unknown>, Key: {name}, Index: 3.  {INTEGER}\n\t [[{{{{node ParseExample}}}}]]"
    assert advice(text) == f"; in JSON write {name}'s numbers with a point, 1.0 instead of 1"


@pytest.mark.parametrize(
    "text",
    ["", "Name: <unknown>, Key: x, Index: 0.  Data types don't match. Data type: float but expected type: int64"],
)
def test_no_advice_for_other_errors(text: str) -> None:
    assert advice(text) == ""
