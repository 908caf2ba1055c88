"""Over grpc.aio, a response that the client does not take, because of its size, leaves one line in the log."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import grpc.aio
import pytest

from triglot.transports.aio.server import _Rows
from triglot.transports.aio.unsent import UnsentAnswers
from triglot.transports.http2.core.limits import Limits

METHOD = "/inference.GRPCInferenceService/ModelInfer"


class Details:
    """Of a call."""

    method = METHOD


async def failed(error: Exception) -> None:
    """A call's task as grpc.aio runs it: it looks the handler up, and fails when it sends the response."""
    rows = _Rows({}, UnsentAnswers(Limits()), 1)
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def call() -> None:
        rows.service(Details)
        raise error

    task = asyncio.create_task(call())
    await asyncio.wait([task])
    await asyncio.sleep(0)
    del task
    gc.collect()
    assert reported == []


async def test_a_send_that_fails_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await failed(grpc.aio.InternalError('Failed "execute_batch"'))
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert METHOD in record.getMessage()


async def test_any_other_failure_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    await failed(ValueError("ours"))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.exc_info
