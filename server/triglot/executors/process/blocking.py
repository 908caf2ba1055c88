"""Coroutines on a thread without an event loop: what they await there blocks, so they never suspend."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise RuntimeError("expected code that blocks, and it waits for an event loop")


Run = Callable[[Coroutine[Any, Any, Any]], Any]


def iterate(answers: AsyncGenerator[T, None], run: Run = run_blocking) -> Generator[T, None, None]:
    """What the generator yields, each step by `run`; closing this closes it."""
    try:
        while (answer := run(_next(answers))) is not None:
            yield answer
            del answer
    finally:
        run(_close(answers))


async def _next(answers: AsyncGenerator[T, None]) -> T | None:
    return await anext(answers, None)


async def _close(answers: AsyncGenerator[Any, None]) -> None:
    await answers.aclose()
