"""A configuration file that is read again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import SECONDS
from triglot.cli import tfserving as tfserving_cli
from triglot.cli.tfserving import follow
from triglot.core.errors import FailedPrecondition, ServingError
from triglot.repository.config.settings import ModelSettings

CONFIG_FILE = "model_config_list { config { name: 'm' base_path: '/models/m' model_platform: 'tensorflow' } }"


class Applied:
    """Takes the models that are to be served; `errors` are what it raises, one after another."""

    def __init__(self, *errors: Exception | None) -> None:
        self.calls: asyncio.Queue[list[str]] = asyncio.Queue()
        self._errors = list(errors)

    async def reload(self, wanted: list[ModelSettings]) -> None:
        self.calls.put_nowait([model.name for model in wanted])
        if self._errors and (error := self._errors.pop(0)):
            raise error


class LogQueue(logging.Handler):
    """The texts that are logged, as they come."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.put_nowait(record.getMessage())


@pytest.fixture
def logged() -> Iterator[asyncio.Queue[str]]:
    handler = LogQueue()
    tfserving_cli.log.addHandler(handler)
    yield handler.texts
    tfserving_cli.log.removeHandler(handler)


async def test_the_file_is_applied_again_and_again(tmp_path: Path, logged: asyncio.Queue[str]) -> None:
    file = tmp_path / "models.config"
    file.write_text(CONFIG_FILE)
    applied = Applied()
    following = asyncio.create_task(follow(file, 0.001, applied.reload))
    async with asyncio.timeout(SECONDS):
        # What has not changed is applied, too.
        assert [await applied.calls.get() for _ in range(2)] == [["m"], ["m"]]
        file.write_text(CONFIG_FILE.replace("'m'", "'n'"))
        while await applied.calls.get() != ["n"]:
            pass
        file.write_text("model_config_list {")
        while not (await logged.get()).startswith(f"Invalid protobuf file: '{file}': 1:19 : "):
            pass
        while not applied.calls.empty():
            applied.calls.get_nowait()
        file.write_text(CONFIG_FILE)
        assert await applied.calls.get() == ["m"]
    following.cancel()


async def test_error_is_logged_once_and_the_file_is_still_followed(
    tmp_path: Path, logged: asyncio.Queue[str]
) -> None:
    refused, broken = FailedPrecondition("no such version"), RuntimeError("broken")
    applied = Applied(refused, refused, None, refused, broken, broken)
    file = tmp_path / "models.config"
    file.write_text(CONFIG_FILE)
    following = asyncio.create_task(follow(file, 0.001, applied.reload))
    async with asyncio.timeout(SECONDS):
        for _ in range(7):
            await applied.calls.get()
    following.cancel()
    texts = [logged.get_nowait() for _ in range(logged.qsize())]
    assert texts[:2] == [f"{file}: no such version; the models stay as they are"] * 2
    assert texts[2:] == [f"{file} could not be applied: RuntimeError: broken"]


async def test_models_that_fail_are_no_reason_to_say_that_nothing_has_changed(
    tmp_path: Path, logged: asyncio.Queue[str]
) -> None:
    """Their errors are logged where they are found."""
    file = tmp_path / "models.config"
    file.write_text(CONFIG_FILE)
    applied = Applied(ServingError("1 model(s) did not become available"), None)
    following = asyncio.create_task(follow(file, 0.001, applied.reload))
    async with asyncio.timeout(SECONDS):
        for _ in range(3):
            await applied.calls.get()
    following.cancel()
    assert logged.empty()
