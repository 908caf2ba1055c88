"""Where a client's list of models may lie: in the folders of the operator, as code in any other would run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import triglot
from tests.process import IDENTITY, write_model
from tests.waiting import until
from triglot.cli.tfserving import follow
from triglot.config.options import Config
from triglot.core.errors import PermissionDenied
from triglot.core.operation import EVERYTHING
from triglot.pb.tfserving import management_pb2
from triglot.repository.config.settings import ModelSettings

pytestmark = pytest.mark.both_transports

RELOAD = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
SECONDS = 20


class Here:
    """A server whose operator has named the folder `own/a`, and its client."""

    def __init__(self, server: triglot.Server, channel: grpc.aio.Channel, folder: Path) -> None:
        self.server, self.folder = server, folder
        self._reload = channel.unary_unary(RELOAD, request_serializer=bytes, response_deserializer=bytes)

    async def reload(self, models: Mapping[str, Any]) -> tuple[str, str]:
        """The code and the text of the reload of a list of models, by their base paths."""
        request = management_pb2.ReloadConfigRequest(config={"model_config_list": {}})
        for name, path in models.items():
            request.config.model_config_list.config.add(
                name=name, base_path=str(path), model_platform="tensorflow"
            )
        try:
            await self._reload(request.SerializeToString(), timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code().name, str(error.details())
        return "OK", ""

    @property
    def serving(self) -> set[str]:
        return {version.files.name for version in self.server.manager.registry.versions() if version.ready}

    @property
    def has_run(self) -> bool:
        """Whether the unnamed model was loaded."""
        return (self.folder / "ran").exists()


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[Here]:
    own, foreign = folder / "own", folder / "foreign"
    for name in ("a", "a/below", "b"):
        write_model(own / name / "1")
    write_model(foreign / "1", f"open({str(folder / 'ran')!r}, 'w').close()\n{IDENTITY}")
    (own / "a" / "link").symlink_to(foreign)
    (own / "a" / "inner").symlink_to(own / "a" / "below")
    config = Config(host="127.0.0.1", grpc_port=0, rest_port=-1, protocols="tfserving", grace=0, **options)
    async with (
        triglot.Server(models=[ModelSettings("a", own / "a")], config=config) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        yield Here(server, channel, folder)


@pytest.mark.parametrize(
    "path",
    [
        *("foreign", "own", "own/b", "own/a/../b", "own/a/../../foreign", "own/a/link", "own/a/below/../link"),
        *("own/a2", "own/none", ".", "own/a/link/../foreign", "own/a\0", "/", "/etc"),
    ],
)
async def test_file_outside_the_repository_is_refused_and_changes_nothing(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as here:
        asked = tmp_path / path
        code, text = await here.reload({"new": asked, "a": tmp_path / "own" / "a"})
        assert code == "PERMISSION_DENIED"
        for part in (str(asked), str(tmp_path / "own" / "a"), "--allowed_model_roots", "model new"):
            assert part in text
        code, _ = await here.reload({"a": tmp_path / "own" / "a" / "below", "new": f"file://{asked}"})
        assert code == "PERMISSION_DENIED"
        assert (here.serving, here.has_run) == ({"a"}, False)
        assert await here.reload({"other": tmp_path / "own" / "a"}) == ("OK", "")


async def test_what_lies_below_is_loaded(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        own = tmp_path / "own" / "a"
        assert await here.reload({"a": own, "below": own / "below", "inner": own / "inner"}) == ("OK", "")
        assert here.serving == {"a", "below", "inner"}
        assert await here.reload({}) == ("OK", "")
        assert await here.reload({"a": own}) == ("OK", "")


async def test_a_list_has_so_many_entries(tmp_path: Path) -> None:
    """Each model is one, and so is each of its versions and labels."""
    async with serving(tmp_path, max_requested_entries=3) as here:
        own = tmp_path / "own" / "a"
        code, text = await here.reload(dict.fromkeys("abcd", own))
        expected = "the configuration in the request: expected at most 3 entries in all lists and tables, got 4; "
        assert (code, text.startswith(expected), "MAX_REQUESTED_ENTRIES" in text) == (
            "INVALID_ARGUMENT",
            True,
            True,
        )
        assert here.serving == {"a"}
        assert await here.reload(dict.fromkeys("abc", own)) == ("OK", "")


@pytest.mark.parametrize("roots", ["{0}/own, {0}/foreign", "/", "{0}"])
async def test_an_option_allows_more(tmp_path: Path, roots: str) -> None:
    async with serving(tmp_path, allowed_model_roots=roots.format(tmp_path)) as here:
        models = {"b": tmp_path / "own" / "b", "foreign": tmp_path / "foreign"}
        assert await here.reload(models) == ("OK", "")
        assert (here.serving, here.has_run) == ({"b", "foreign"}, True)
    async with serving(tmp_path / "again", allowed_model_roots=str(tmp_path / "own")) as here:
        code, text = await here.reload({"foreign": tmp_path / "foreign"})
        assert (code, f"{tmp_path / 'own'})" in text) == ("PERMISSION_DENIED", True)


async def test_the_operators_file_is_not_confined_and_its_folders_are_allowed(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        foreign = {"a": tmp_path / "own" / "a", "foreign": tmp_path / "foreign"}
        assert (await here.reload(foreign))[0] == "PERMISSION_DENIED"
        file = tmp_path / "models.config"
        file.write_text(
            "model_config_list { config { name: 'foreign' model_platform: 'tensorflow' "
            f"base_path: '{tmp_path / 'foreign'}' }} }}"
        )
        following = asyncio.create_task(follow(file, 0.01, here.server.manager.follow))
        await until(lambda: here.serving == {"foreign"})
        following.cancel()
        assert await here.reload(foreign) == ("OK", "")
        assert here.serving == {"a", "foreign"}


async def test_a_server_that_was_started_with_an_empty_list(tmp_path: Path) -> None:
    write_model(tmp_path / "m" / "1")
    config = Config(grpc_port=0, rest_port=-1, protocols="tfserving")
    async with triglot.Server(models=[], config=config) as server:
        with pytest.raises(PermissionDenied, match=r"folders \(none\)"):
            await server.dataplane.reload(EVERYTHING, [ModelSettings("m", tmp_path / "m")])
