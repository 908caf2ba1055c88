"""Models whose files come in the load request (spec 3.9)."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.protocols.control_clients import FINE, INVALID, Explicit, Row, ask, put
from tests.waiting import until
from triglot import Config
from triglot.config.options import ConfigError
from triglot.core.errors import Code

POLL = "failed to load 'a', failed to poll from model repository"
NO_FILES = "models are loaded from the repository only; --allow-model-upload allows files in requests"
SENT = """
import triglot

class Sent(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def infer(self, inputs):
        return {"y": inputs["x"] + NUMBER}
"""
EVERY_VERSION = '{"backend": "python", "version_policy": {"all": {}}}'


@pytest.fixture(params=["grpc", "rest"])
def explicit(request: pytest.FixtureRequest, tmp_path: Path) -> Explicit:
    return Explicit(request.param, tmp_path)


def content(interface: str, text: str) -> Any:
    """A file's content as a parameter."""
    return text.encode() if interface == "grpc" else base64.b64encode(text.encode()).decode()


def adding(number: int) -> str:
    return SENT.replace("NUMBER", str(number))


def sent(interface: str, texts: Mapping[int, str]) -> dict[str, Any]:
    """The parameters that send versions' `model.py`."""
    return {f"file:{version}/model.py": content(interface, text) for version, text in texts.items()}


async def test_files_are_refused_by_default(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a")
    size = 2**20 + 1
    async with explicit() as (served, control):
        for path in ("1/model.py", "../../etc/passwd"):
            for config in ({}, {"config": "{}"}):
                outcome = await control.load("a", **{f"file:{path}": content(explicit.interface, "A")}, **config)
                assert outcome == (Code.INTERNAL, f"{POLL}: 'file:{path}': {NO_FILES}")
        assert await control.index() == [Row("a")]
        # Large requests are refused by what is the matter, without being read.
        too_large = f"the request has {size} bytes, the limit is {2**20}: {NO_FILES}"
        for verb in ("load", "unload"):
            code, text, _ = await served.grpc.call(f"RepositoryModel{verb.capitalize()}", bytes(size))
            assert (code, text) == (INVALID, too_large)
            status, _, reply = await served.rest.call("POST", f"/v2/repository/models/a/{verb}", b" " * size)
            assert (status, f"the request has {size} bytes".encode() in reply) == (400, True)


@pytest.mark.parametrize("name", ["a", "new"])
async def test_a_model_is_sent(explicit: Explicit, name: str, tmp_path: Path) -> None:
    put(tmp_path / "a", says=7)
    async with explicit(allow_model_upload=True) as (served, control):
        files = sent(explicit.interface, {10: adding(10), 20: adding(20)})
        assert await control.load(name, config=EVERY_VERSION, **files) == FINE
        assert [await ask(served, name, version, x=1) for version in ("10", "20", "")] == [11, 21, 21]
        folders = {version.files.folder for version in served.server.manager.registry.statuses(name)}
        assert all(folder is not None and folder.is_dir() for folder in folders)
        # Without files it is the repository's again.
        if name == "a":
            assert await control.load("a") == FINE
            assert await ask(served, "a") == 7
        else:
            code, text = await control.load("new")
            assert (code, text.partition(":")[0]) == (Code.INTERNAL, POLL.replace("'a'", "'new'"))
            assert await ask(served, "new", x=1) == 21
            assert await control.unload("new") == FINE
        await until(lambda: not any(folder is not None and folder.exists() for folder in folders))


PLACE = "expected file:VERSION/FILE"
REFUSED = [
    ("1/model.py", None, Code.INTERNAL, f"{POLL}: files require a 'config' parameter, got none"),
    ("../b/model.py", "{}", INVALID, f"parameter 'file:../b/model.py': {PLACE}"),
    ("/etc/passwd", "{}", INVALID, f"parameter 'file:/etc/passwd': {PLACE}"),
    ("1/../../x", "{}", INVALID, f"parameter 'file:1/../../x': {PLACE}"),
    ("model.py", "{}", INVALID, f"parameter 'file:model.py': {PLACE}"),
    ("1/model.xyz", '{"backend": "python"}', INVALID, f"{POLL}: "),
    ("1/model.py", '{"backend": "python"}', INVALID, "load failed for model 'a': version 1 is at UNAVAILABLE"),
]


async def test_files_that_cannot_be(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a", says=7)
    async with explicit(load_model="a", allow_model_upload=True) as (served, control):
        for path, config, code, text in REFUSED:
            file = {f"file:{path}": content(explicit.interface, "nothing")}
            outcome = await control.load("a", **file, **({} if config is None else {"config": config}))
            assert (outcome[0], outcome[1][: len(text)]) == (code, text)
            assert await ask(served, "a") == 7
        if explicit.interface == "rest":
            code, text = await control.load("a", **{"config": "{}", "file:1/model.py": "not base64!"})
            assert code is INVALID
            assert text.startswith("parameter 'file:1/model.py': expected base64")


async def test_a_version_that_is_sent_with_a_broken_one(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a")
    async with explicit(allow_model_upload=True) as (served, control):
        files = sent(explicit.interface, {1: adding(1), 2: "?"})
        code, text = await control.load("a", config=EVERY_VERSION, **files)
        assert (code, "version 2 is at UNAVAILABLE state" in text) == (INVALID, True)
        assert await ask(served, "a", "1", x=1) == 2
        (servable,) = served.server.manager.registry.in_memory("a")
        folder = served.server.manager.loaded(servable).files.folder
        assert folder is not None
        assert folder.is_dir()


async def test_a_file_may_be_larger_than_a_configuration(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a")
    async with explicit(allow_model_upload=True) as (served, control):
        files = sent(explicit.interface, {1: adding(1) + "#" * (2 * 1024 * 1024)})
        assert await control.load("a", config='{"backend": "python"}', **files) == FINE
        assert await ask(served, "a", x=1) == 2
        # Such requests may be as large as any; what configures the model may not.
        long = '{"parameters": {"p": {"string_value": "%s"}}}' % ("x" * 2**20)
        code, text = await control.load("a", config=long)
        assert (code, f"expected at most {2**20} characters, got {len(long)}" in text) == (INVALID, True)
        assert await ask(served, "a", x=1) == 2


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"workers": 2}, {"model_control_mode": "poll"}])
def test_where_no_model_may_be_sent(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^allow_model_upload: "):
        Config(**{"model_control_mode": "explicit", **options, "allow_model_upload": True})
