"""What TensorFlow Serving's REST paths mean, the first time and repeated."""

from __future__ import annotations

import pytest

from triglot.protocols.tfserving.codec import ModelSpec
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
