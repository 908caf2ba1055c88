"""The demo models take what a client may send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

import triglot

DEMO = Path(triglot.__file__).parent / "demo"


@pytest.mark.parametrize(
    ("text", "upper"), [("grüße", "GRÜSSE"), (["a", "b"], ["A", "B"]), ([["a"], ["b"]], [["A"], ["B"]])]
)
async def test_texts_of_any_shape_are_put_in_capitals(text: Any, upper: Any) -> None:
    """TensorFlow Serving's clients choose the shape."""
    config = triglot.Config(grpc_port=0, rest_port=0, drain_delay=0)
    async with triglot.Server([DEMO / "uppercase"], config) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.rest_port}/v1/models/uppercase:predict"
        async with session.post(url, json={"inputs": {"text": text}}) as answer:
            assert (answer.status, await answer.json()) == (200, {"outputs": upper})
