"""What TensorFlow Serving's REST paths mean, the first time and repeated; and what errors of a graph say."""

from __future__ import annotations

import pytest

from triglot.protocols.tfserving.ai_platform import without_node
from triglot.protocols.tfserving.codec import ModelSpec
from triglot.protocols.tfserving.rest_examples import advice
from triglot.protocols.tfserving.routes import MAX_CACHED, VersionTooLarge, model_of_path, parse_call

LONG = "m" * MAX_CACHED
TOO_LARGE = "9" * 20


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/v1/models/m:predict", ("predict", ModelSpec("m"))),
        ("/V1/Models/m/versions/007:classify", ("classify", ModelSpec("m", 7))),
        ("/v1/models/a%20b/labels/new%2f:regress", ("regress", ModelSpec("a b", None, "new/"))),
        (f"/v1/models/{LONG}:predict", ("predict", ModelSpec(LONG))),
        ("/v1/models/m:PREDICT", None),
        (f"/v1/models/m/versions/{TOO_LARGE}:PREDICT", None),
        ("/v1/models/m", None),
        ("/v2/models/m:predict", None),
    ],
)
def test_calls(path: str, call: tuple[str, ModelSpec] | None, *, again: bool) -> None:
    if again:
        parse_call(path)
    assert parse_call(path) == call


def test_too_large_version_is_an_error_each_time() -> None:
    for _ in range(2):
        with pytest.raises(VersionTooLarge, match=f"Failed to parse version: {TOO_LARGE}"):
            parse_call(f"/v1/models/m/versions/{TOO_LARGE}:predict")


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1/models/m:predict", "m"),
        ("/v1/models/m%3An/metadata", "m:n"),
        (f"/v1/models/{LONG}/what/ever", LONG),
        ("/v1/models/", ""),
        ("/v2/models/m", ""),
    ],
)
def test_models(path: str, model: str) -> None:
    assert model_of_path(path) == model_of_path(path) == model


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
