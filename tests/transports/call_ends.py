"""How a gRPC call ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc.aio


@dataclass(frozen=True)
class Seen:
    """A call's end. Texts of a client's own library are not compared."""

    code: str
    details: str | None = ""
    answers: tuple[bytes, ...] = ()
    trailing: tuple[tuple[str, str | bytes], ...] = ()


async def seen(call: Any, *, with_details: bool = True) -> Seen:
    """How the call ends."""
    answers: list[bytes] = []
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall | grpc.aio.StreamUnaryCall):
            answers.append(await call)
        else:
            async for response in call:
                answers.append(response)  # noqa: PERF401 - what came before an error counts.
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    assert tuple(await call.initial_metadata()) == ()
    code, trailing = (await call.code()).name, tuple(await call.trailing_metadata())
    return Seen(code, await call.details() if with_details else None, tuple(answers), trailing)
