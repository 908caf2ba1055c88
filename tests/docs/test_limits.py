"""Each statement on a limit in docs/security.md and docs/operations.md has tests that show it: `limits.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.docs.doc_pages import ROOT
from triglot.access import issuers, jwks
from triglot.config import watched_file
from triglot.config.options import GIB, MIB, Config
from triglot.core import response_buffer
from triglot.protocols import wire
from triglot.telemetry import audit_log, log_fields, log_handlers
from triglot.transports import listening, text_room, unsent
from triglot.transports.aio import server as aio_server
from triglot.transports.http2.core import limits as http2
from triglot.transports.rest import decoding, exchange

KIB = 1024
TESTS_OF = tomllib.loads((ROOT / "tests" / "docs" / "limits.toml").read_text())
PAIRS = [
    (page, statement, test)
    for page, statements in TESTS_OF.items()
    for statement, tests in statements.items()
    for test in ([tests] if isinstance(tests, str) else tests)
]
_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(
    r"\b(?:\d[\d,]*|one|two|five|half a) (?:[KMG]iB|bytes|characters|s|seconds?|minutes?|levels|lines)\b"
)


def prose_of(page: str) -> str:
    """The page without its blocks of code, each run of whitespace as one space."""
    return " ".join(_CODE.sub("", (ROOT / page).read_text()).split())


@pytest.mark.parametrize("page", TESTS_OF)
def test_statements_are_in_the_page(page: str) -> None:
    prose = prose_of(page)
    assert [statement for statement in TESTS_OF[page] if statement not in prose] == []


def test_their_tests_exist() -> None:
    def exists(test: str) -> bool:
        file, _, name = test.partition("::")
        return re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE) is not None

    assert [test for _, _, test in PAIRS if not exists(test)] == []


def unstated(page: str) -> Iterator[str]:
    """Numbers of bytes or seconds that are in no statement, with the words around them."""
    prose = prose_of(page)
    stated = [
        range(at.start(), at.end())
        for statement in TESTS_OF[page]
        for at in re.finditer(re.escape(statement), prose)
    ]
    for number in _NUMBER.finditer(prose):
        if not any(number.start() in span for span in stated):
            yield prose[max(0, number.start() - 60) : number.end() + 20]


@pytest.mark.parametrize("page", TESTS_OF)
def test_every_number_of_bytes_or_seconds_is_in_a_statement(page: str) -> None:
    assert list(unstated(page)) == []


def test_numbers_that_other_tests_shorten() -> None:
    """Those tests would take minutes, or gigabytes: here is what the pages say."""
    assert watched_file.CHECK_SECONDS + watched_file.SETTLE_SECONDS < 2
    assert (jwks.REFRESH_SECONDS, jwks.RETRY_SECONDS, issuers.LEEWAY_SECONDS) == (300, 5, 30)
    assert (audit_log.MAX_REFUSALS, audit_log.WINDOW_SECONDS) == (600, 60)
    assert wire.MAX_FIELDS == 32_768
    assert exchange.TEXT_ON_LOOP == 32 * KIB
    assert listening.SPARE_FILES == 100
    assert (text_room.FREE_BYTES, text_room.MAX_WAIT_SECONDS) == (MIB, 120)
    assert (text_room.MIN_PROGRESS, text_room.CHECK_SECONDS) == (640 * KIB, 10)
    assert (decoding.MIN_RATE, decoding.GRACE_SECONDS, decoding.IDLE_SECONDS) == (240, 30, 120)
    assert unsent.STALL_SECONDS == http2.DEFAULTS.stall == 120
    assert (http2.DEFAULTS.min_read, http2.DEFAULTS.max_streams) == (4 * KIB, 1024)
    assert aio_server.MAX_OPEN_CALLS == 65_536
    assert (response_buffer.STREAM_BUFFER, response_buffer.PATIENCE_SECONDS) == (32, 0.5)
    assert (log_handlers.MAX_LINE, log_handlers.MAX_LINES, log_handlers.WINDOW_SECONDS) == (4096, 20, 60)
    assert log_fields.MAX_IDS == 32


def test_defaults_of_options() -> None:
    config = Config()
    assert (config.max_queue_size, config.max_queue_bytes, config.max_total_queue_size) == (1024, GIB, 8192)
    assert config.max_message_size == 2 * GIB - 1
    assert config.max_json_size == config.max_unread_bytes == 64 * MIB
    assert (config.max_sockets, config.max_connection_age, config.rest_keepalive_time) == (10_000, 300, 650)
    assert (config.drain_delay, config.grace, config.worker_timeout) == (5, 20, 15)
    assert config.drain_delay + config.grace < 30
