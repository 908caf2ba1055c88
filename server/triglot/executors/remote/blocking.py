"""Runs coroutines on a thread without an event loop; whatever they await there blocks, so they never suspend."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine, and return its result. Raises what it raises, and `RuntimeError` if it suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    with suppress(RuntimeError):  # What it does at its end would wait, too.
        work.close()
    raise RuntimeError("expected code that blocks, and it waits for an event loop")


Run = Callable[[Coroutine[Any, Any, Any]], Any]


def iterate(answers: AsyncGenerator[T, None], run: Run = run_blocking) -> Generator[T, None, None]:
    """Yield the generator's items, each step run by `run`; closing this generator closes that one."""
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
