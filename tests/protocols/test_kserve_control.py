"""Models that clients load and unload, over KServe's gRPC and REST (spec 3.9, 5.7, 5.8)."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from control_clients import (
    EXPLICIT,
    FAILS,
    FINE,
    INVALID,
    UNLOADED,
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
from kserve_served import serve_models
from wire_bytes import field, varint_field

from triglot import Config
from triglot.config.options import ConfigError
from triglot.core.errors import Code, ModelLoadError
from triglot.pb.grpc.health.v1 import health_pb2 as health
from waiting import until


@pytest.fixture(params=["grpc", "rest"])
def interface(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- a model comes and goes ---


async def test_models_are_loaded_and_unloaded(interface: str, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    put(tmp_path / "a" / "2", says=2)
    put(tmp_path / "b" / "1")
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, interface)
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

        assert await control.load("a") == FINE
        assert await control.index() == [*both, Row("b")]


async def test_a_repository_that_is_empty_at_first(interface: str, tmp_path: Path) -> None:
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, interface)
        assert await control.ready()
        assert await control.index() == []
        code, text = await control.load("a")
        assert code is Code.INTERNAL
        assert text.startswith("failed to load 'a', failed to poll from model repository: ")
        assert f"{tmp_path}: no models here" in text
        put(tmp_path / "a", says=7)
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 7


async def test_what_is_not_in_the_repository(interface: str, tmp_path: Path) -> None:
    put(tmp_path / "a")
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, interface)
        assert await control.load("b") == not_polled("b", f"no model of this name in {tmp_path}")
        assert await control.unload("b") == FINE
        assert await control.index() == [Row("a")]
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


# --- what cannot be ---


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_without_explicit_control(interface: str, mode: str, tmp_path: Path) -> None:
    put(tmp_path / "a", says=1)
    async with serve_models([tmp_path], model_control_mode=mode) as served:
        control = control_of(served, interface)
        for name in ("a", "b", "../a"):
            for change in (control.load, control.unload):
                code, text = await change(name)
                assert code is Code.UNAVAILABLE
                assert text.startswith("explicit model load / unload is not allowed if polling is enabled")
        assert await ask(served, "a") == 1
        assert await control.index() == [Row("a", "1", "READY")]


@pytest.mark.parametrize("name", ["../a", "..", ".a", "a/b", "a b", "a\n", "ä", "a" * 129])
async def test_names_that_cannot_be(interface: str, name: str, tmp_path: Path) -> None:
    put(tmp_path / "repository" / "a")
    put(tmp_path / "a")
    async with serve_models([tmp_path / "repository"], **EXPLICIT) as served:
        control = control_of(served, interface)
        for change in (control.load, control.unload):
            code, text = await change(name)
            assert code is INVALID
            assert text.startswith(f"model name {name!r}: expected ")


POLL = "failed to load 'a', failed to poll from model repository"
NO_FILES = "models are loaded from the repository only; --allow-model-upload allows files in requests"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"confg": "{}"}, "unexpected parameter 'confg', expected 'config'"),
        ({"unload_dependents": True}, "unexpected parameter 'unload_dependents', expected 'config'"),
        ({"config": ""}, f"{POLL}: the configuration in the request to load model 'a': expected a JSON object"),
        ({"config": "[]"}, f"{POLL}: the configuration in the request to load model 'a': expected a JSON object"),
        (
            {"config": '{"name": "b"}'},
            f"{POLL}: the configuration in the request to load model 'a': name: expected 'a', got 'b'",
        ),
    ],
)
async def test_load_parameters_that_cannot_be(
    interface: str, parameters: dict[str, Any], text: str, tmp_path: Path
) -> None:
    put(tmp_path / "a")
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, interface)
        assert await control.load("a", **parameters) == (INVALID, text)
        assert await control.index() == [Row("a")]


def content(interface: str, text: str) -> Any:
    """A file's content as a parameter."""
    return text.encode() if interface == "grpc" else base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("path", ["1/model.py", "../../etc/passwd"])
@pytest.mark.parametrize("config", [{}, {"config": "{}"}])
async def test_files_are_refused_by_default(
    interface: str, path: str, config: dict[str, str], tmp_path: Path
) -> None:
    put(tmp_path / "a")
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, interface)
        outcome = await control.load("a", **{f"file:{path}": content(interface, "A")}, **config)
        assert outcome == (Code.INTERNAL, f"{POLL}: 'file:{path}': {NO_FILES}")
        assert await control.index() == [Row("a")]


SENT = """
import triglot

class Sent(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def infer(self, inputs):
        return {"y": inputs["x"] + NUMBER}
"""


@pytest.mark.parametrize("name", ["a", "new"])
async def test_a_model_is_sent(interface: str, name: str, tmp_path: Path) -> None:
    put(tmp_path / "a", says=7)
    async with serve_models([tmp_path], **EXPLICIT, allow_model_upload=True) as served:
        control = control_of(served, interface)
        files = {
            f"file:{number}/model.py": content(interface, SENT.replace("NUMBER", str(number)))
            for number in (10, 20)
        }
        config = '{"backend": "python", "version_policy": {"all": {}}}'
        assert await control.load(name, config=config, **files) == FINE
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


@pytest.mark.parametrize(
    ("path", "config", "code", "text"),
    [
        ("1/model.py", None, Code.INTERNAL, f"{POLL}: files require a 'config' parameter, got none"),
        ("../b/model.py", "{}", INVALID, "parameter 'file:../b/model.py': expected file:VERSION/FILE"),
        ("/etc/passwd", "{}", INVALID, "parameter 'file:/etc/passwd': expected file:VERSION/FILE"),
        ("1/../../x", "{}", INVALID, "parameter 'file:1/../../x': expected file:VERSION/FILE"),
        ("model.py", "{}", INVALID, "parameter 'file:model.py': expected file:VERSION/FILE"),
        ("1/model.xyz", '{"backend": "python"}', INVALID, f"{POLL}: "),
        ("1/model.py", '{"backend": "python"}', INVALID, "load failed for model 'a': version 1 is at UNAVAILABLE"),
    ],
)
async def test_files_that_cannot_be(
    interface: str, path: str, config: str | None, code: Code, text: str, tmp_path: Path
) -> None:
    put(tmp_path / "a", says=7)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a", allow_model_upload=True) as served:
        control = control_of(served, interface)
        configured = {} if config is None else {"config": config}
        outcome = await control.load("a", **{f"file:{path}": content(interface, "nothing")}, **configured)
        assert outcome[0] is code
        assert outcome[1].startswith(text)
        assert await ask(served, "a") == 7


async def test_a_version_that_is_sent_with_a_broken_one(interface: str, tmp_path: Path) -> None:
    put(tmp_path / "a")
    async with serve_models([tmp_path], **EXPLICIT, allow_model_upload=True) as served:
        sent = {
            "file:1/model.py": content(interface, SENT.replace("NUMBER", "1")),
            "file:2/model.py": content(interface, "?"),
        }
        config = '{"backend": "python", "version_policy": {"all": {}}}'
        code, text = await control_of(served, interface).load("a", config=config, **sent)
        assert (code, "version 2 is at UNAVAILABLE state" in text) == (INVALID, True)
        assert await ask(served, "a", "1", x=1) == 2
        (servable,) = served.server.manager.registry.in_memory("a")
        folder = served.server.manager.loaded(servable).files.folder
        assert folder is not None
        assert folder.is_dir()


async def test_a_file_that_is_no_base64(tmp_path: Path) -> None:
    put(tmp_path / "a")
    async with serve_models([tmp_path], **EXPLICIT, allow_model_upload=True) as served:
        code, text = await control_of(served, "rest").load(
            "a", **{"config": "{}", "file:1/model.py": "not base64!"}
        )
        assert code is INVALID
        assert text.startswith("parameter 'file:1/model.py': expected base64")


async def test_a_file_may_be_larger_than_a_configuration(interface: str, tmp_path: Path) -> None:
    put(tmp_path / "a")
    large = SENT.replace("NUMBER", "1") + "#" * (2 * 1024 * 1024)
    async with serve_models([tmp_path], **EXPLICIT, allow_model_upload=True) as served:
        control = control_of(served, interface)
        files = {"file:1/model.py": content(interface, large)}
        assert await control.load("a", config='{"backend": "python"}', **files) == FINE
        assert await ask(served, "a", x=1) == 2


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"workers": 2}, {"model_control_mode": "poll"}])
def test_where_no_model_may_be_sent(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^allow_model_upload: "):
        Config(**{"model_control_mode": "explicit", **options, "allow_model_upload": True})


@pytest.mark.parametrize("value", [True, 1, None, b"{}"])
async def test_parameters_of_another_kind(interface: str, value: Any, tmp_path: Path) -> None:
    put(tmp_path / "a")
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, interface)
        if interface == "rest" and (value is None or isinstance(value, bytes)):
            return  # JSON has no bytes, and null is no value.
        code, text = await control.load("a", config=value)
        assert code is INVALID
        assert text.startswith("parameter 'config'")
        if value is not True:
            code, text = await control.unload("a", unload_dependents=value)
            assert code is INVALID
            assert text.startswith("parameter 'unload_dependents'")
        assert await control.index() == [Row("a")]


async def test_dependents_may_be_named(interface: str, tmp_path: Path) -> None:
    """tritonclient always does; no model depends on another here."""
    put(tmp_path / "a")
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        control = control_of(served, interface)
        for value in (False, True):
            assert await control.load("a") == FINE
            assert await control.unload("a", unload_dependents=value) == FINE
            assert not await control.ready("a")
        assert await control.unload("a", dependents=True) == (
            INVALID,
            "unexpected parameter 'dependents', expected 'unload_dependents'",
        )


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


async def test_requests_that_are_too_large(tmp_path: Path) -> None:
    """A model's files would be: they are refused by what is the matter, without being read."""
    put(tmp_path / "a")
    size = 2**20 + 1
    async with serve_models([tmp_path], **EXPLICIT) as served:
        for rpc in ("RepositoryModelLoad", "RepositoryModelUnload"):
            code, text, _ = await served.grpc.call(rpc, bytes(size))
            assert (code, text) == (
                INVALID,
                f"the request has {size} bytes, the limit is {2**20}: {NO_FILES}",
            )
        for verb in ("load", "unload"):
            status, _, reply = await served.rest.call("POST", f"/v2/repository/models/a/{verb}", b" " * size)
            assert status == 400
            assert f"the request has {size} bytes".encode() in reply


# --- loads that fail ---

UNLOADABLE = "it could not be loaded; the server's log says why"


async def test_a_load_that_fails(interface: str, tmp_path: Path) -> None:
    file = put(tmp_path / "a" / "1", text=FAILS)
    why = f"{file}:{len(FAILS.splitlines())}: OSError: no disk"
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, interface)
        assert await control.load("a") == load_failed("a", why)
        assert await control.index() == [Row("a", "1", "UNAVAILABLE", why)]
        assert await ask(served, "a") == unknown("a", f"has no available versions: {UNLOADABLE}")
        assert await ask(served, "a", "1") == (not_ready("a", 1)[0], f"{not_ready('a', 1)[1]}: {UNLOADABLE}")
        assert not await control.ready("a")
        assert not await control.ready(), "a model that failed is not ready"
        assert await control.load("a") == load_failed("a", why), "it is tried again"
        put(tmp_path / "a" / "1", says=5)
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 5
        assert await control.ready()


async def test_a_failed_model_that_is_unloaded(interface: str, tmp_path: Path) -> None:
    put(tmp_path / "a", text=FAILS)
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, interface)
        assert (await control.load("a"))[0] is INVALID
        assert await control.unload("a") == FINE
        assert await control.index() == [Row("a", "1", "UNAVAILABLE", UNLOADED)]
        assert await control.ready()


async def test_a_load_again_that_fails_keeps_what_serves(interface: str, tmp_path: Path) -> None:
    file = put(tmp_path / "a", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        control = control_of(served, interface)
        put(tmp_path / "a", text=FAILS)
        why = f"{file}:{len(FAILS.splitlines())}: OSError: no disk"
        assert await control.load("a") == load_failed("a", why)
        assert await ask(served, "a") == 1
        assert await control.index() == [Row("a", "1", "READY", why)]
        assert await control.ready("a")
        put(tmp_path / "a", says=2)
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 2
        assert await control.index() == [Row("a", "1", "READY")]


async def test_a_configuration_file_that_is_wrong(interface: str, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    put(tmp_path / "b")
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        control = control_of(served, interface)
        put_config(tmp_path / "a", "max_batch_size: -1")
        wrong = f"{tmp_path / 'a' / 'config.pbtxt'}: max_batch_size: expected at least 0, got -1"
        assert await control.load("a") == not_polled("a", wrong)
        assert await ask(served, "a") == 1, "what serves goes on"
        assert await control.load("b") == FINE, "another model is none the worse"
        assert await control.load("a", config="{}") == FINE, "what is given stands in place of the file"
        assert await control.unload("a") == FINE
        assert await control.load("a") == not_polled("a", wrong)


async def test_one_name_in_two_repositories(interface: str, tmp_path: Path) -> None:
    for repository in ("one", "two"):
        put(tmp_path / repository / "a")
    put(tmp_path / "two" / "b", says=2)
    async with serve_models([tmp_path / "one", tmp_path / "two"], **EXPLICIT) as served:
        control = control_of(served, interface)
        code, text = await control.load("a")
        assert code is Code.INTERNAL
        both = " and ".join(str(tmp_path / root / "a" / "model.py") for root in ("one", "two"))
        twice = f"model 'a' appears in two or more repositories: {both}"
        assert twice in text
        assert await control.index() == [Row("a", "", "UNAVAILABLE", twice), Row("b")]
        assert await control.load("b") == FINE
        assert await ask(served, "b") == 2


# --- at the start ---


async def test_models_that_cannot_be_read_keep_no_others_from_serving(interface: str, tmp_path: Path) -> None:
    for name in ("config", "code", "fine"):
        put(tmp_path / name / "1", says=3)
    put_config(tmp_path / "config", "this is { no configuration")
    put(tmp_path / "code" / "1", text="def (")
    options: dict[str, Any] = {"exit_on_load_error": False}
    for more in ({}, {"model_control_mode": "poll"}, EXPLICIT | {"load_model": "*"}):
        async with serve_models([tmp_path], **options, **more) as served:
            assert await ask(served, "fine") == 3
            states = {row.name: row.state for row in await control_of(served, interface).index()}
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


async def test_missing_model_at_the_start(tmp_path: Path) -> None:
    put(tmp_path / "a")
    load = Loads()
    with pytest.raises(ModelLoadError) as caught:
        async with serve_models([tmp_path], load, **EXPLICIT, load_model="a,b"):
            pass
    assert str(caught.value) == not_polled("b", f"no model of this name in {tmp_path}")[1]
    assert load.begun == []
