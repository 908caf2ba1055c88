"""The access file while it runs: what is written in place is never in force, what is renamed to it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc import StatusCode

from tests.access.access_clients import GuardedServer, guarded_server
from tests.access.access_files import anonymous, client, write
from tests.waiting import until
from triglot.access.control import AccessControl
from triglot.config.options import Config, ConfigError
from triglot.core.errors import ServingError
from triglot.core.operation import REST, Operation

ONE = client("one", ["one"], ["infer"], rate=1000.0, models='["identity_*"]')
FILE = client("a", ["a"], ["infer"]) + ONE
OTHER = "half_plus_two"


class Access:
    """An access file, and what its clients may do."""

    def __init__(self, folder: Path) -> None:
        self.file = write(folder / "access.toml", FILE)
        self.control = AccessControl(Config(access=str(self.file)))

    def looks_later(self, seconds: float = 3600) -> None:
        """As if the file had been left alone for so long."""
        now = time.time() - seconds
        os.utime(self.file, (now, now))
        for _ in range(3):
            self.control.renew()

    def models(self, token: str) -> list[str] | None:
        """Which of two models the token may use; None if it is unknown."""
        try:
            permission = self.control.permission(Operation.INFER, REST, [("x-api-key", token)], lambda: ())
        except ServingError:
            return None
        return [model for model in ("identity_fp32", OTHER) if permission.covers(model)]


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(tmp_path)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def cut(file: Path) -> None:
    os.truncate(file, FILE.rindex("models"))


def overwritten(file: Path) -> None:
    with file.open("r+") as opened:
        opened.write(FILE.replace('"a"', '"b"'))


def appended(file: Path) -> None:
    with file.open("a") as opened:
        opened.write(anonymous(["infer", "administer"]))


def replaced_by_nothing(file: Path) -> None:
    write(file)


def removed(file: Path) -> None:
    file.unlink()


def replaced_by_a_broken_file(file: Path) -> None:
    write(file, FILE[:-5])


KEPT: dict[str, Callable[[Path], None]] = {
    change.__name__: change
    for change in (emptied, cut, overwritten, appended, replaced_by_nothing, removed, replaced_by_a_broken_file)
}


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_changes_that_are_not_in_force(
    access: Access, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    change(access.file)
    for _ in range(3):
        access.control.renew()
    if access.file.exists():
        access.looks_later()
    assert (access.models("a"), access.models("one")) == (["identity_fp32", OTHER], ["identity_fp32"])
    assert access.models("b") is None
    assert caplog.text.count("the previous one stays in force") in (1, 2)
    # The next whole file is taken.
    write(access.file, client("b", ["b"], ["infer"]))
    access.control.renew()
    assert (access.models("a"), access.models("b")) == (None, ["identity_fp32", OTHER])
    assert "the new access file takes all rights from: a, one" in caplog.text


def test_new_file_counts_once_it_is_unchanged(access: Access) -> None:
    access.file.unlink()
    for text in (FILE[: FILE.rindex("models")], FILE.replace("[client.a]", "[client.c]")):
        access.file.write_text(text)
        access.control.renew()
        assert access.models("one") == ["identity_fp32"]
    access.looks_later()
    assert access.control.permission(Operation.INFER, REST, [("x-api-key", "a")], lambda: ()).client == "c"


def test_a_link_that_is_switched_as_kubernetes_does(access: Access, tmp_path: Path) -> None:
    folders = [tmp_path / "v1", tmp_path / "v2"]
    for folder, text in zip(folders, (FILE, ONE), strict=True):
        folder.mkdir()
        write(folder / "access.toml", text)
    (tmp_path / "data").symlink_to(folders[0])
    access.control = AccessControl(Config(access=str(tmp_path / "data" / "access.toml")))
    (tmp_path / "new").symlink_to(folders[1])
    (tmp_path / "new").rename(tmp_path / "data")
    access.control.renew()
    assert (access.models("a"), access.models("one")) == (None, ["identity_fp32"])


def test_an_empty_file_is_no_start(tmp_path: Path) -> None:
    file = write(tmp_path / "access.toml", "# nothing\n")
    with pytest.raises(ConfigError, match=r"expected .* or \[anonymous\], got nothing"):
        AccessControl(Config(access=str(file)))


@pytest.mark.parametrize(("grpc_transport", "http_transport"), [("h2", "h1"), ("aio", "aiohttp")])
async def test_over_the_transports(
    tmp_path: Path, grpc_transport: str, http_transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded_server(
        tmp_path, FILE, grpc_transport=grpc_transport, http_transport=http_transport
    ) as here:
        emptied(here.file)
        await until(lambda: "was changed in place" in caplog.text)
        assert await codes(here) == [StatusCode.OK, 200]
        write(here.file, ONE)
        await until(lambda: "takes all rights from: a" in caplog.text)
        assert await codes(here) == [StatusCode.UNAUTHENTICATED, 401]


async def codes(here: GuardedServer) -> list[object]:
    headers = {"x-api-key": "a"}
    return [await here.code(headers), (await here.status(headers))[0]]
