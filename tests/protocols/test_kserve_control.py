"""Models that clients load and unload, over KServe's gRPC and REST (spec 3.9, 5.7, 5.8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.protocols.control_clients import (
    EXPLICIT,
    FAILS,
    FINE,
    INVALID,
    UNLOADED,
    Explicit,
    Loads,
    Row,
    ask,
    control_of,
    load_failed,
    not_polled,
    not_ready,
    put,
    put_config,
    unknown,
    until_index,
)
from tests.protocols.kserve_served import serve_models
from tests.protocols.wire_bytes import field, varint_field
from triglot.core.errors import Code, ModelLoadError
from triglot.pb.grpc.health.v1 import health_pb2 as health


@pytest.fixture(params=["grpc", "rest"])
def explicit(request: pytest.FixtureRequest, tmp_path: Path) -> Explicit:
    return Explicit(request.param, tmp_path)


async def test_models_are_loaded_and_unloaded(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    put(tmp_path / "a" / "2", says=2)
    put(tmp_path / "b" / "1")
    async with explicit() as (served, control):
        assert await control.ready()
        assert await control.index() == [Row("a"), Row("b")]
        assert await control.index(ready=True) == []
        assert await ask(served, "a") == unknown("a", "is not found")
        assert not await control.ready("a")

        assert await control.load("a") == FINE
        both = [Row("a", "1", "READY"), Row("a", "2", "READY")]
        assert await control.index() == [*both, Row("b")]
        assert await control.index(ready=True) == both
        assert [await ask(served, "a", version) for version in ("", "1", "2")] == [2, 1, 2]
        assert await control.ready("a")
        assert await control.ready("a", "1")

        assert await control.unload("a") == FINE
        assert await ask(served, "a") == unknown("a")
        assert await ask(served, "a", "2") == not_ready("a", 2)
        assert not await control.ready("a")
        assert not await control.ready("a", "2")
        unloaded = [Row("a", version, "UNAVAILABLE", UNLOADED) for version in ("1", "2")]
        await until_index(control, *unloaded, Row("b"))
        assert await control.index(ready=True) == []
        assert await control.ready(), "with nothing to serve, everything is ready"
        assert await control.unload("a") == FINE

        # tritonclient always says whether dependents go, too; nothing depends on another model here.
        for value in (False, True):
            assert await control.load("a") == FINE
            assert await control.index() == [*both, Row("b")]
            assert await control.unload("a", unload_dependents=value) == FINE
            assert not await control.ready("a")


async def test_what_is_not_in_the_repository(explicit: Explicit, tmp_path: Path) -> None:
    async with explicit() as (served, control):
        assert await control.ready()
        assert await control.index() == []
        code, text = await control.load("a")
        assert code is Code.INTERNAL
        assert text.startswith("failed to load 'a', failed to poll from model repository: ")
        assert f"{tmp_path}: no models here" in text
        put(tmp_path / "a", says=7)
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 7
        assert await control.load("b") == not_polled("b", f"no model of this name in {tmp_path}")
        assert await control.unload("b") == FINE
        assert await control.index() == [Row("a", "1", "READY")]
        assert await ask(served, "b") == unknown("b", "is not found")


async def test_other_protocols_list_only_loaded_models(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        put(tmp_path / name)
    async with serve_models([tmp_path], **EXPLICIT, load_model="b") as served:
        control = control_of(served, "rest")
        assert await control.load("a") == await control.unload("a") == FINE
        _, _, reply = await served.rest.call("GET", "/v2/models")
        assert reply == b'{"models":["b"]}'
        _, _, reply = await served.grpc.call("/grpc.health.v1.Health/List", b"")
        statuses = health.HealthListResponse.FromString(reply).statuses
        serving = {name: statuses[name].status for name in ("a", "b", "c") if name in statuses}
        assert serving == {
            "a": health.HealthCheckResponse.NOT_SERVING,
            "b": health.HealthCheckResponse.SERVING,
        }


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_without_explicit_control(explicit: Explicit, mode: str, tmp_path: Path) -> None:
    put(tmp_path / "a", says=1)
    async with explicit(model_control_mode=mode) as (served, control):
        for name in ("a", "b", "../a"):
            for change in (control.load, control.unload):
                code, text = await change(name)
                assert code is Code.UNAVAILABLE
                assert text.startswith("explicit model load / unload is not allowed if polling is enabled")
        assert await ask(served, "a") == 1
        assert await control.index() == [Row("a", "1", "READY")]


async def test_repositories_that_are_named(tmp_path: Path) -> None:
    put(tmp_path / "a")
    refused = "'repository_name' specification is not supported"
    async with serve_models([tmp_path], **EXPLICIT) as served:
        for rpc in ("RepositoryModelLoad", "RepositoryModelUnload"):
            assert await served.grpc.call(rpc, field(1, "r") + field(2, "a")) == (Code.UNIMPLEMENTED, refused, b"")
            assert await served.grpc.call(rpc, b"") == (INVALID, "expected a model name, got none", b"")
        assert await served.grpc.call("RepositoryIndex", field(1, "r")) == (Code.UNIMPLEMENTED, refused, b"")
        for path in ("models/a/load", "models/a/unload", "index"):
            status, _, reply = await served.rest.call("POST", f"/v2/repository/r/{path}")
            assert (status, reply) == (501, b'{"error": "%s"}' % refused.encode())


async def test_kserves_clients_use_field_1_and_read_the_reply(tmp_path: Path) -> None:
    """Spec 0.15, 1.6: the request's field 1, and the reply's fields 1 and 2."""
    put(tmp_path / "a", says=3)
    async with serve_models([tmp_path], **EXPLICIT) as served:
        reply = field(1, "a") + varint_field(2, 1)
        assert await served.grpc.call("RepositoryModelLoad", field(1, "a")) == (*FINE, reply)
        assert await ask(served, "a") == 3
        assert await served.grpc.call("RepositoryModelUnload", field(1, "a")) == (*FINE, reply)
        assert await ask(served, "a") == unknown("a")


# --- loads that fail ---

UNLOADABLE = "it could not be loaded; the server's log says why"


async def test_a_load_that_fails(explicit: Explicit, tmp_path: Path) -> None:
    file = put(tmp_path / "a" / "1", text=FAILS)
    why = f"{file}:{len(FAILS.splitlines())}: OSError: no disk"
    async with explicit() as (served, control):
        assert await control.load("a") == load_failed("a", why)
        assert await control.index() == [Row("a", "1", "UNAVAILABLE", why)]
        assert await ask(served, "a") == unknown("a", f"has no available versions: {UNLOADABLE}")
        assert await ask(served, "a", "1") == (not_ready("a", 1)[0], f"{not_ready('a', 1)[1]}: {UNLOADABLE}")
        assert not await control.ready("a")
        assert not await control.ready(), "a model that failed is not ready"
        assert await control.unload("a") == FINE
        assert await control.index() == [Row("a", "1", "UNAVAILABLE", UNLOADED)]
        assert await control.ready()
        assert await control.load("a") == load_failed("a", why), "it is tried again"
        put(tmp_path / "a" / "1", says=1)
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 1
        assert await control.ready()

        put(tmp_path / "a" / "1", text=FAILS)
        assert await control.load("a") == load_failed("a", why)
        assert await ask(served, "a") == 1, "what serves is kept"
        assert await control.index() == [Row("a", "1", "READY", why)]
        assert await control.ready("a")
        put(tmp_path / "a" / "1", says=2)
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 2
        assert await control.index() == [Row("a", "1", "READY")]


async def test_a_configuration_file_that_is_wrong(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    put(tmp_path / "b")
    async with explicit(load_model="a") as (served, control):
        put_config(tmp_path / "a", "max_batch_size: -1")
        wrong = f"{tmp_path / 'a' / 'config.pbtxt'}: max_batch_size: expected at least 0, got -1"
        assert await control.load("a") == not_polled("a", wrong)
        assert await ask(served, "a") == 1, "what serves goes on"
        assert await control.load("b") == FINE, "another model is none the worse"
        assert await control.load("a", config="{}") == FINE, "what is given stands in place of the file"
        assert await control.unload("a") == FINE
        assert await control.load("a") == not_polled("a", wrong)


async def test_one_name_in_two_repositories(explicit: Explicit, tmp_path: Path) -> None:
    for repository in ("one", "two"):
        put(tmp_path / repository / "a")
    put(tmp_path / "two" / "b", says=2)
    async with explicit(tmp_path / "one", tmp_path / "two") as (served, control):
        code, text = await control.load("a")
        assert code is Code.INTERNAL
        both = " and ".join(str(tmp_path / root / "a" / "model.py") for root in ("one", "two"))
        twice = f"model 'a' appears in two or more repositories: {both}"
        assert twice in text
        assert await control.index() == [Row("a", "", "UNAVAILABLE", twice), Row("b")]
        assert await control.load("b") == FINE
        assert await ask(served, "b") == 2


async def test_a_repository_that_cannot_be_read(explicit: Explicit, tmp_path: Path) -> None:
    """A mount that went away: the serving version continues, and a load says what is the matter."""
    repository = tmp_path / "repository"
    put(repository / "a", says=1)
    async with explicit(repository, load_model="a") as (served, control):
        repository.rename(tmp_path / "elsewhere")
        assert await control.load("a") == not_polled("a", f"{repository}: no such file or folder")
        assert await ask(served, "a") == 1
        assert await control.index() == [Row("a", "1", "READY")]
        assert await control.unload("a") == FINE
        (tmp_path / "elsewhere").rename(repository)
        assert await control.load("a") == FINE


# --- at the start ---


async def test_models_that_cannot_be_read_keep_no_others_from_serving(explicit: Explicit, tmp_path: Path) -> None:
    for name in ("config", "code", "fine"):
        put(tmp_path / name / "1", says=3)
    put_config(tmp_path / "config", "this is { no configuration")
    put(tmp_path / "code" / "1", text="def (")
    options: dict[str, Any] = {"exit_on_load_error": False}
    for more in ({}, {"model_control_mode": "poll"}, EXPLICIT | {"load_model": "*"}):
        async with serve_models([tmp_path], **options, **more) as served:
            assert await ask(served, "fine") == 3
            states = {row.name: row.state for row in await control_of(served, explicit.interface).index()}
            # Of what nobody could read there is nothing to load.
            assert states.pop("config") == ("" if "load_model" in more else "UNAVAILABLE")
            assert states == {"code": "UNAVAILABLE", "fine": "READY"}


async def test_models_are_loaded_at_the_start(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        put(tmp_path / name)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a, c") as served:
        control = control_of(served, "grpc")
        assert await control.index() == [Row("a", "1", "READY"), Row("c", "1", "READY"), Row("b")]
        assert await control.load("b") == FINE
    async with serve_models([tmp_path], **EXPLICIT, load_model="*") as served:
        assert await control_of(served, "grpc").index() == [Row(name, "1", "READY") for name in "abc"]
    load = Loads()
    with pytest.raises(ModelLoadError) as caught:
        async with serve_models([tmp_path], load, **EXPLICIT, load_model="a,z"):
            pass
    assert str(caught.value) == not_polled("z", f"no model of this name in {tmp_path}")[1]
    assert load.begun == []
