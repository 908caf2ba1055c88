"""Records as JSON: one line each, whatever text is in them, and the ids of the calls that are executed."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import weakref
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from triglot.core.call import Call
from triglot.core.current_calls import CURRENT_CALLS, RunningFor
from triglot.core.errors import Code
from triglot.core.operation import Permission
from triglot.telemetry.access_log import AccessLine
from triglot.telemetry.json_lines import JsonFormatter, utc_time
from triglot.telemetry.log_fields import MAX_IDS, MAX_TEXT, call_fields
from triglot.telemetry.log_handlers import MAX_LINE, MAX_TRACE

FORMATTER = JsonFormatter({"worker": 3})
ANY = st.text(st.characters())
"""Half pairs, too."""
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


def parsed(record: logging.LogRecord) -> dict[str, Any]:
    """The object; its line is one, and is UTF-8 that a strict reader takes."""
    line = FORMATTER.format(record)
    assert line.splitlines() == [line]
    assert line.isprintable()
    fields: dict[str, Any] = json.loads(line.encode())
    json.dumps(fields, ensure_ascii=False).encode()
    return fields


def record_of(message: object, *arguments: object, name: str = "m", error: BaseException | None = None) -> Any:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord(name, logging.WARNING, __file__, 1, message, arguments, info)


def call_of(request_id: str = "", headers: Mapping[str, str] = TRACED) -> Call:
    call = Call(read_metadata=headers.items)
    call.request_id, call.model_name, call.model_version = request_id, "m", 1
    return call


def strict(text: str) -> str:
    """What is left of it in UTF-8."""
    return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)


@given(ANY, ANY, ANY, ANY, ANY)
def test_any_text_is_in_its_field(message: str, name: str, request_id: str, model: str, client: str) -> None:
    call = call_of(request_id)
    call.model_name, call.permission = model, Permission(client)
    record = record_of("%s", message, name=name, error=ValueError(message))
    with RunningFor((call,)):
        fields = parsed(record)
    texts = {"message": message, "logger": name, "request_id": request_id, "model": model, "client": client}
    assert {key: fields.get(key, "") for key in texts} == {key: strict(text) for key, text in texts.items()}
    assert fields["exception"] == f"ValueError: {strict(message)}" or not message
    assert (fields["level"], fields["worker"], fields["trace_id"]) == ("WARNING", 3, TRACE)
    record.msg, record.args = AccessLine("p", "REST", message, call, Code.OK, 0.25, 1, 2), ()
    fields = parsed(record)
    assert (fields["method"], fields["model"] if model else "") == (strict(message), strict(model))


def test_the_time_is_utc_with_microseconds() -> None:
    assert utc_time(0.25) == "1970-01-01T00:00:00.250000Z"
    assert utc_time(1e9) == "2001-09-09T01:46:40.000000Z"


def test_long_texts_are_cut() -> None:
    call = call_of("i" * 10_000_000)
    call.model_name = "m" * 10_000_000
    error = ValueError("y" * 10_000_000 + "the end")
    record = record_of("x" * 10_000_000, name="n" * 10_000_000, error=error)
    record.stack_info = "s" * 10_000_000
    with RunningFor((call,)):
        fields = parsed(record)
    assert fields["message"] == f"{'x' * MAX_LINE}... (10000000 characters)"
    assert fields["exception"].endswith("the end")
    assert max(len(fields["exception"]), len(fields["stack"])) < MAX_TRACE + 100
    assert [len(fields[name]) for name in ("request_id", "model", "logger")] == [MAX_TEXT] * 3


def test_requests_of_a_batch_have_lists() -> None:
    calls = [call_of(f"id-{number}", TRACED if number % 2 else {}) for number in range(MAX_IDS + 9)]
    assert call_fields(calls) == {
        "batch_size": MAX_IDS + 9,
        "request_ids": [f"id-{number}" for number in range(MAX_IDS)],
        "trace_ids": [TRACE],
        "model": "m",
        "version": 1,
    }
    calls[0].permission = calls[1].permission = Permission("ann")
    assert call_fields(calls[:2])["client"] == "ann"
    calls[1].permission = Permission("bob")
    assert "client" not in call_fields(calls[:2])


def test_a_request_without_an_id_is_named_by_its_header() -> None:
    assert call_fields([call_of("", {"x-request-id": "h"})])["request_id"] == "h"
    assert call_fields([call_of("own", {"X-Request-Id": "h"})])["request_id"] == "own"
    assert call_fields([Call()]) == call_fields([]) == {}


def test_what_the_log_says_of_itself_is_about_no_request() -> None:
    with RunningFor((call_of("one"),)):
        assert "request_id" not in parsed(record_of("3 similar lines", name="triglot.log"))
        assert parsed(record_of("a line"))["request_id"] == "one"


async def test_a_task_that_is_left_running_works_for_no_request() -> None:
    """Its context has a copy of what was the case when it began."""
    finished, saw = asyncio.Event(), []

    async def background() -> None:
        saw.append(len(CURRENT_CALLS.get()))
        await finished.wait()
        saw.append(len(CURRENT_CALLS.get()))

    class Weak(Call):
        __slots__ = ("__weakref__",)

    call = Weak()
    kept = weakref.ref(call)
    with RunningFor((call,)):
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
    del call
    assert kept() is None, "the task keeps it"
    finished.set()
    await task
    assert saw == [1, 0]
    assert not CURRENT_CALLS.get()
    gc.collect()
