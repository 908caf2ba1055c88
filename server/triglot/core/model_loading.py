"""Calls to models that are loaded on demand: a look-up raises `ModelNotLoaded`, and what it was for is run again.

Strategy: a look-up may be in a codec, on a thread, and cannot wait. It raises what `when_loaded`, around each step
of a call, catches; that loads the model, within the call's deadline, and takes the step again, while the model is
kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from triglot.core.call import Call
from triglot.core.errors import ModelNotLoaded
from triglot.core.operation import Operation

T = TypeVar("T")

LOADING: Final = frozenset((Operation.INFER, Operation.METADATA, Operation.MODEL_CONFIG))
"""Operations that load the model; to others one on disk is not available."""


async def when_loaded(call: Call, step: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Return what the coroutine function `step` returns; models that it lacks are loaded, and it is run again.

    Raise what it raises, `PermissionDenied` for a model that the client may not use, and `DeadlineExceeded`.
    """
    async with AsyncExitStack() as kept:
        while True:
            try:
                return await step(*arguments)
            except ModelNotLoaded as error:
                missing = error.with_traceback(None)
            if call.operation not in LOADING:
                raise missing.error
            call.permission.check_model(missing.name)
            await _load(kept, call, missing)


async def _load(kept: AsyncExitStack, call: Call, missing: ModelNotLoaded) -> None:
    try:
        async with asyncio.timeout(call.remaining) as limit:
            await kept.enter_async_context(missing.loading())
    except TimeoutError:
        if not limit.expired():
            raise
        raise call.overdue(f"while model '{missing.name}' was being loaded") from None
