"""The demo models take what a client may send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

import triglot
from triglot import testing

DEMO = Path(triglot.__file__).parent / "demo"


@pytest.mark.parametrize(
    ("text", "upper"), [("grüße", "GRÜSSE"), (["a", "b"], ["A", "B"]), ([["a"], ["b"]], [["A"], ["B"]])]
)
async def test_texts_of_any_shape_are_put_in_capitals(text: Any, upper: Any) -> None:
    """TensorFlow Serving's clients choose the shape."""
    async with (
        testing.serve(DEMO / "uppercase") as server,
        aiohttp.ClientSession(server.url) as session,
        session.post("/v1/models/uppercase:predict", json={"inputs": {"text": text}}) as answer,
    ):
        assert (answer.status, await answer.json()) == (200, {"outputs": upper})
