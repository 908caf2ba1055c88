"""The event loop of model classes written for other servers: whatever their code raises, it continues."""

from __future__ import annotations

import asyncio
from concurrent import futures

import pytest

from triglot.backends.foreign_classes import CodeLoop

SECONDS = 20


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_exception_of_code_is_its_outcome_and_the_loop_continues(error: type[BaseException]) -> None:
    async def fail() -> None:
        raise error

    async def answer() -> int:
        await asyncio.sleep(0)
        return 3

    loop = CodeLoop("code")
    with pytest.raises(futures.CancelledError if error is asyncio.CancelledError else error):
        loop.submit(fail()).result(SECONDS)
    assert loop.submit(answer()).result(SECONDS) == 3
    loop.close()
