"""What the programs of Python share: calls in, results out."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

BLOCK = 65_521


def pattern(size: int) -> bytes:
    """Return the bytes that `fill` of a request stands for."""
    block, x = bytearray(), 1
    for _ in range(BLOCK):
        x = (x * 1664525 + 1013904223) & 0xFFFFFFFF
        block.append(x >> 24)
    return (bytes(block) * math.ceil(size / BLOCK))[:size]


def request(described: dict[str, Any]) -> bytes:
    return base64.b64decode(described["head"]) + pattern(described.get("fill", 0))


def response(message: bytes, tail: int = 0) -> dict[str, Any]:
    cut = len(message) - tail
    return {"head": base64.b64encode(message[:cut]).decode(), "crc32": zlib.crc32(message[cut:])}


def pairs(call: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the call's metadata; values of `-bin` are bytes."""
    metadata = call.get("metadata", [])
    return [(name, base64.b64decode(value) if name.endswith("-bin") else value) for name, value in metadata]


def result(
    code: str, message: str, responses: list[Any], trailers: Iterable[tuple[str, Any]] | None = None
) -> dict[str, Any]:
    named = {name: text(value) for name, value in trailers or ()}
    return {"code": code, "message": message, "responses": responses, "trailers": named}


def text(value: str | bytes) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


async def repeat(make: Callable[[Any], Any], call: dict[str, Any]) -> dict[str, Any]:
    """Make a call again and again; returns the result of the first that failed, or of the last."""
    end = time.monotonic() + call.get("repeat_seconds", 0)
    codes: Counter[str] = Counter()
    shown = None
    while shown is None or time.monotonic() < end:
        made = make(call)
        last = await made if inspect.isawaitable(made) else made
        codes[last["code"]] += 1
        if shown is None or shown["code"] == "OK":
            shown = last
    return {**shown, "codes": codes}


async def run(make: Callable[[Any], Any]) -> None:
    """Make each call that stdin has with `make`, a function or a coroutine function, one after the other."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await repeat(make, json.loads(line))), flush=True)
