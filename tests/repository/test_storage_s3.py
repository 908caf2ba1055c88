"""Models in S3, as a server has them: what is downloaded, and what a store's mistakes change."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import grpc.aio
import obstore
import pytest
from obstore.store import S3Store

from tests.process import FREE_PORTS, LISTENING, Triglot, run_triglot
from tests.repository.object_stores import Proxy, cut, moto, own_authority, refuse, request
from tests.repository.stored_models import POLL, SAYS, serving
from tests.waiting import until, until_found
from triglot.core.errors import ModelLoadError
from triglot.pb.tfserving import management_pb2
from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.source import NamedPath

SECRET = "wJalrXUtnFEMIsecret"
BUCKET = "models"


class Remote:
    """A bucket of its own behind a proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self._store = S3Store(
            BUCKET, config={"endpoint": f"http://127.0.0.1:{proxy.target}"}, client_options={"allow_http": True}
        )

    def put(self, path: str, content: str | bytes) -> None:
        """An object."""
        obstore.put(self._store, path, content.encode() if isinstance(content, str) else content)

    def put_model(self, folder: str, value: int, more: bytes = b"") -> None:
        """A version that answers `value`."""
        self.put(f"{folder}/value.txt", str(value))
        if more:
            self.put(f"{folder}/weights", more)
        self.put(f"{folder}/model.py", SAYS)

    def delete(self, path: str) -> None:
        """An object."""
        obstore.delete(self._store, path)


@pytest.fixture(scope="module")
def s3() -> Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture
def remote(s3: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Remote]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with Proxy(s3) as proxy:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        for name, value in environment(endpoint, tmp_path).items():
            monkeypatch.setenv(name, value)
        for command, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
            request(s3, command, path)
        yield Remote(proxy)


def environment(endpoint: str, folder: Path) -> dict[str, str]:
    """As an operator sets it."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "eu-central-1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


async def test_a_repository_is_served_and_the_second_start_downloads_nothing(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    remote.put_model("r/a/1", 1)
    remote.put_model("r/b", 2)
    remote.put("r/b/config.pbtxt", 'backend: "python"')
    remote.put("r/readme.md", "no model")
    async with serving("s3://models/r") as served:
        assert [await served.value(name) for name in "ab"] == [1, 2]
    assert remote.proxy.bytes_read == 2 * (len(SAYS) + 1) + len('backend: "python"')
    assert "s3://models/r: downloaded" in caplog.text
    remote.proxy.read.clear()
    async with serving("s3://models/r") as served:
        assert [await served.value(name) for name in "ab"] == [1, 2]
    assert not remote.proxy.read
    assert SECRET not in caplog.text


async def test_layouts(remote: Remote) -> None:
    """A model's folder, a version's file, TensorFlow Serving's layout, and a whole bucket."""
    remote.put_model("a/1", 1)
    remote.put_model("a/2", 2)
    remote.put_model("b", 3)
    for path, model, value in (
        ("s3://models/a", "a", 2),
        ("s3://models/b/", "b", 3),
        ("s3://models", "a", 2),
    ):
        async with serving(path) as served:
            assert await served.value(model) == value, path
    remote.proxy.read.clear()
    async with serving(models=[ModelSettings("m", Path("s3://models/a"))]) as served:
        assert await served.value("m") == 2


async def test_a_name_of_ones_own(remote: Remote) -> None:
    remote.put_model("export/1", 1)
    async with serving(NamedPath("m", Path("s3://models/export"))) as served:
        assert await served.value("m") == 1


async def test_environment_next_to_the_models(remote: Remote) -> None:
    """Triton's models may share one."""
    remote.put("r/environment/bin/python", "a program")
    remote.put("r/others/file", "of no model")
    for name in ("a", "b"):
        remote.put_model(f"r/{name}/1", 1)
        path = "$$TRITON_MODEL_DIRECTORY/../environment"
        parameters = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'
        remote.put(f"r/{name}/config.pbtxt", f'backend: "python" {parameters}')
    async with serving("s3://models/r", exit_on_load_error=False):
        assert "/models/r/environment/bin/python" in remote.proxy.read
        assert "/models/r/others/file" not in remote.proxy.read


async def test_only_wanted_versions_are_downloaded(remote: Remote) -> None:
    for version in (1, 2, 3):
        remote.put_model(f"t/{version}", version)
        remote.put_model(f"r/c/{version}", version)
    remote.put("r/c/config.pbtxt", 'backend: "python" version_policy { latest { num_versions: 2 } }')
    async with serving(models=[ModelSettings("m", Path("s3://models/t"))]) as served:
        assert await served.value("m") == 3
    async with serving("s3://models/r") as served:
        assert [await served.value("c", version) for version in (2, 3)] == [2, 3]
    read = {path.removeprefix("/models/") for path in remote.proxy.read}
    files = ("model.py", "value.txt")
    versions = {f"{folder}/{file}" for folder in ("t/3", "r/c/2", "r/c/3") for file in files}
    assert read == versions | {"r/c/config.pbtxt"}


async def test_explicit_control_downloads_what_is_asked_for(remote: Remote) -> None:
    for name in ("a", "b"):
        remote.put_model(f"r/{name}/1", 1)
    async with serving("s3://models/r", model_control_mode="explicit", load_model="a") as served:
        assert await served.index() == {"a/1": "READY", "b/": ""}
        assert not any("/b/" in path for path in remote.proxy.read)
        assert (await served.post("/v2/repository/models/b/load"))[0] == 200
        assert await served.value("b") == 1
        remote.put_model("r/b/2", 2)
        remote.put_model("r/c/1", 7)
        assert (await served.post("/v2/repository/models/b/load"))[0] == 200
        assert await served.value("b") == 2
        assert "c/" in await served.index()
        remote.proxy.answer = lambda handler: refuse(handler, 403)
        status, answer = await served.post("/v2/repository/models/c/load")
        assert status >= 400
        assert "s3://models/r: 403 Forbidden" in answer["error"]
        assert await served.value("b") == 2


async def test_polling_downloads_what_changed(remote: Remote) -> None:
    remote.put_model("r/a/1", 1, b"w" * 100)
    async with serving("s3://models/r", **POLL) as served:
        assert await served.value("a") == 1
        remote.proxy.read.clear()
        remote.put("r/a/1/value.txt", "7")
        await until_found(lambda: served.value("a"), lambda value: value == 7)
        assert remote.proxy.read == {"/models/r/a/1/value.txt": 1}
        remote.put_model("r/b/1", 2)
        await until_found(lambda: served.value("b"), lambda value: value == 2)
        for file in ("model.py", "value.txt"):
            remote.delete(f"r/b/1/{file}")
        await until_found(lambda: served.value("b"), lambda value: value != 2)
        assert await served.value("a") == 7


async def test_a_listing_without_news_is_all_that_a_poll_costs(remote: Remote) -> None:
    remote.put_model("r/a/1", 1)
    async with serving("s3://models/r", **POLL):
        remote.proxy.read.clear()
        remote.proxy.requests.clear()
        await until(lambda: len(remote.proxy.requests) > 5)
        assert all("list-type=2" in request for request in remote.proxy.requests)


async def test_the_latest_version_of_a_model_list_follows(remote: Remote) -> None:
    """The serving version continues until the next one is there."""
    remote.put_model("t/1", 1)
    async with serving(models=[ModelSettings("m", Path("s3://models/t"))], **POLL) as served:
        remote.put_model("t/2", 2)
        values = []

        async def value() -> int | str:
            values.append(await served.value("m"))
            return values[-1]

        await until_found(value, lambda value: value == 2)
        assert set(values) <= {1, 2}


def denied(handler: BaseHTTPRequestHandler) -> bool:
    body = f"<Error><Code>AccessDenied</Code><Message>Not with {SECRET[:4]}?X-Amz-Signature=abc</Message></Error>"
    return refuse(handler, 403, body)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (denied, "s3://models/r: AccessDenied: Not with wJal?…"),
        (
            lambda handler: refuse(handler, 404, "<Error><Code>NoSuchBucket</Code><Message>x</Message></Error>"),
            "NoSuch",
        ),
    ],
    ids=["403", "404"],
)
async def test_a_listing_that_fails(
    remote: Remote, answer: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The serving version continues; the reason is in the index, and once in the log, until a listing succeeds."""
    remote.put_model("r/a/1", 1)
    async with serving("s3://models/r", **POLL) as served:
        remote.proxy.answer = answer
        found = await until_found(served.index, lambda index: text in index["a/1"])
        assert found["a/1"].startswith("READY")
        assert await served.value("a") == 1
        await until(lambda: text in caplog.text)
        remote.put_model("r/a/2", 2)
        count = len(remote.proxy.requests)
        await until(lambda: len(remote.proxy.requests) > count + 5)
        assert caplog.text.count(text) == 1
        remote.proxy.answer = lambda _: False
        await until_found(lambda: served.value("a"), lambda value: value == 2)
        assert await served.index() == {"a/1": "READY", "a/2": "READY"}


async def test_an_object_that_is_not_whole_is_not_seen(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    remote.put_model("r/a/1", 1)
    async with serving("s3://models/r", **POLL) as served:

        def cut_weights(handler: BaseHTTPRequestHandler) -> bool:
            return "weights" in handler.path and cut(handler)

        remote.proxy.answer = cut_weights
        remote.put_model("r/a/2", 2, b"w" * 1_000_000)
        found = await until_found(served.index, lambda index: "weights" in index["a/1"])
        assert "a/2" not in found
        assert await served.value("a") == 1
        remote.proxy.answer = lambda _: False
        await until_found(lambda: served.value("a"), lambda value: value == 2)
        assert await served.index() == {"a/1": "READY", "a/2": "READY"}


async def test_an_object_that_changes_while_it_is_downloaded(remote: Remote) -> None:
    """It is listed again: parts of two objects are never one file."""
    part = 16 << 20
    remote.put_model("r/a/1", 1, b"a" * (part + 5))
    changes = iter([2])

    def change(handler: BaseHTTPRequestHandler) -> bool:
        if "weights" in handler.path and handler.command == "GET" and next(changes, 0):
            remote.put("r/a/1/weights", b"b" * (part + 5))
        return False

    remote.proxy.answer = change
    async with serving("s3://models/r") as served:
        (version,) = served.server.manager.registry.versions()
        assert (version.files.file.parent / "weights").read_bytes() == b"b" * (part + 5)


async def test_a_half_uploaded_version_is_not_loaded(remote: Remote) -> None:
    """Objects come one by one; the listing has to be the same twice."""
    remote.put_model("r/a/1", 1)
    async with serving("s3://models/r", model_control_mode="poll", poll_interval=3600.0) as served:
        remote.put("r/a/2/model.py", SAYS)
        await served.server.manager.refresh()
        remote.put("r/a/2/value.txt", "2")
        await served.server.manager.refresh()
        assert await served.value("a") == 1
        assert "a/2" not in await served.index()

        async def refreshed() -> int | str:
            await served.server.manager.refresh()
            return await served.value("a")

        await until_found(refreshed, lambda value: value == 2)


async def test_a_version_that_does_not_load_leaves_the_old_one(remote: Remote) -> None:
    remote.put_model("r/a/1", 1)
    async with serving("s3://models/r", **POLL) as served:
        remote.put("r/a/1/value.txt", "none")
        found = await until_found(served.index, lambda index: "invalid literal" in index["a/1"])
        assert "READY" in found["a/1"]
        assert await served.value("a") == 1


async def test_requests_to_reload_name_urls_below_those_that_are_allowed(remote: Remote) -> None:
    """Over gRPC, with TensorFlow Serving's list of models."""
    remote.put_model("t/a/1", 1)
    remote.put_model("u/b/1", 2)
    options = {"allowed_model_roots": "s3://models/t, /", "protocols": "kserve,tfserving"}
    async with (
        serving(models=[], **options) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.server.grpc_port}") as channel,
    ):
        method = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
        reload = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)

        async def code(path: str, name: str = "a") -> str:
            request = management_pb2.ReloadConfigRequest(config={"model_config_list": {}})
            request.config.model_config_list.config.add(name=name, base_path=path, model_platform="tensorflow")
            try:
                await reload(request.SerializeToString())
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            return "OK"

        assert await code("s3://models/t/a") == "OK"
        assert await served.value("a") == 1
        for path in ("s3://models/u/b", "s3://models/t/../u/b", "s3://models/t2", "https://models/t/a.tar"):
            refused = await code(path)
            assert refused.startswith("PERMISSION_DENIED: model a: expected a base_path in one of the server's")
            assert f"got {path}; add" in refused
        assert "s3://models/t/none" in await code("s3://models/t/none", "none")


async def test_empty_store(remote: Remote) -> None:
    with pytest.raises(ModelLoadError, match=r"^s3://models/none: no such file or folder$"):
        async with serving("s3://models/none"):
            pass
    with pytest.raises(
        ModelLoadError, match=r"^s3://buckets/r: NoSuchBucket: The specified bucket does not exist$"
    ):
        async with serving("s3://buckets/r"):
            pass
    remote.put("r/a/readme.md", "")
    with pytest.raises(ModelLoadError, match=r"^s3://models/r: no models here; expected NAME/"):
        async with serving("s3://models/r"):
            pass


async def test_the_cache(remote: Remote, tmp_path: Path) -> None:
    """Objects are read-only; one that was written to is downloaded again; snapshots go with the server."""
    remote.put_model("r/a/1", 1)
    async with serving("s3://models/r") as served:
        (version,) = served.server.manager.registry.versions()
        file = version.files.file
        assert not file.is_symlink()
        assert stat.S_IMODE(file.stat().st_mode) == 0o444
        objects = list((tmp_path / "cache" / "triglot" / "objects").iterdir())
        assert {stored.stat().st_size for stored in objects} == {1, len(SAYS)}
        (value,) = (stored for stored in objects if stored.stat().st_size == 1)
        value.chmod(0o644)
        value.write_text("9")
    assert not list((tmp_path / "cache" / "triglot" / "servers").iterdir())
    remote.proxy.read.clear()
    async with serving("s3://models/r") as served:
        assert await served.value("a") == 1
    assert remote.proxy.read == {"/models/r/a/1/value.txt": 1}


async def test_unused_objects_are_evicted_from_a_full_cache(remote: Remote, tmp_path: Path) -> None:
    for name in ("a", "b"):
        remote.put_model(f"r/{name}/1", 1, name.encode() * 1000)
    bound = 2 * (len(SAYS) + 1) + 1500
    async with serving("s3://models/r/a", storage_cache_bytes=bound):
        pass
    async with serving("s3://models/r/b", storage_cache_bytes=bound) as served:
        assert await served.value("b") == 1
    objects = (tmp_path / "cache" / "triglot" / "objects").iterdir()
    assert sum(stored.stat().st_size for stored in objects) <= bound
    remote.proxy.read.clear()
    async with serving("s3://models/r/b", storage_cache_bytes=bound):
        assert not remote.proxy.read


async def test_no_folder_for_the_cache(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        async with serving("s3://models/r", storage_cache=str(tmp_path / "file" / "below")):
            pass


def test_check(remote: Remote, tmp_path: Path) -> None:
    """And without the library, which is an extra."""
    remote.put_model("r/a/1", 1)
    variables = environment(f"http://127.0.0.1:{remote.proxy.port}", tmp_path)
    checked = run_triglot("check", "s3://models/r", environment=variables)
    assert checked.returncode == 0, checked.stderr
    assert "READY" in checked.stdout
    assert SECRET not in checked.stdout + checked.stderr
    without = "import sys\nsys.modules['obstore'] = None"
    urls = ("s3://models/r", "gs://models/r", "az://models/r")
    checked = run_triglot("check", *urls, environment=variables, before=without)
    assert checked.returncode == 1
    for url in urls:
        missing = "needs obstore, which is not installed; run: pip install obstore"
        assert f"{url}: {missing}" in checked.stdout


def test_workers_download_once(remote: Remote, tmp_path: Path) -> None:
    remote.put_model("r/a/1", 1, b"w" * 1000)
    variables = environment(f"http://127.0.0.1:{remote.proxy.port}", tmp_path)
    with Triglot("s3://models/r", "--workers", "2", *FREE_PORTS, environment=variables) as triglot_process:
        triglot_process.stderr.wait_for(LISTENING)
        triglot_process.stop()
    assert remote.proxy.bytes_read == 1000 + 1 + len(SAYS)


async def test_a_large_object_comes_in_parts(remote: Remote) -> None:
    content = os.urandom((33 << 20) + 7)
    remote.put_model("r/a/1", 1, content)
    async with serving("s3://models/r") as served:
        (version,) = served.server.manager.registry.versions()
        assert (version.files.file.parent / "weights").read_bytes() == content
    assert sum("GET /models/r/a/1/weights" in request for request in remote.proxy.requests) == 3


async def test_objects_that_stand_for_folders(remote: Remote) -> None:
    """As consoles and other tools make them."""
    remote.put_model("r/a/1", 1)
    for folder in ("r", "r/a", "r/a/1", "r/empty"):
        request(remote.proxy.target, "PUT", f"/models/{folder}/")
    async with serving("s3://models/r") as served:
        assert await served.value("a") == 1
    remote.put("r/a/1/value.txt/below", "")
    with pytest.raises(ModelLoadError, match=r"^s3://models/r: a/1/value.txt is an object, and a folder of"):
        async with serving("s3://models/r"):
            pass


@pytest.mark.parametrize(
    ("keys", "skipped"),
    [
        (["r//other/1/model.py"], ["r//"]),
        (["r/a/1//weights", "r/b/.//x"], ["r/a/1//", "r/b/./"]),
        (["r/a/1/./x", "r/a/1/../x"], ["r/a/1/../"]),
        (["r/../r/c/1/model.py"], ["r/../"]),
        (["/r/a/1/value.txt", "r/a/1/weights/"], ["r/a/1/weights"]),
        (["r/a/1/value.txt/"], ["r/a/1/value.txt"]),
        (["r/a/"], ["r/a"]),
    ],
)
async def test_a_key_that_no_file_can_have_costs_itself_alone(
    remote: Remote, keys: list[str], skipped: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As `aws s3 cp x s3://models/r//other/...` makes them; aws s3 sync, and so KServe's storage, go past them."""
    remote.put_model("r/a/1", 1)
    for key in keys:
        request(remote.proxy.target, "PUT", f"/models/{key}", b"content")
    async with serving("s3://models/r", **POLL) as served:
        assert await served.value("a") == 1
        remote.put_model("r/a/2", 2)
        await until_found(lambda: served.value("a"), lambda value: value == 2)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    found = [text.partition(" is skipped: ")[0] for text in warnings if " is skipped: " in text]
    assert found == [f"s3://models/r: the object {key!r}" for key in skipped]


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("http://nowhere.invalid", "failed to lookup address information: "),
        (
            "https://localhost",
            "invalid certificate: UnknownIssuer; SSL_CERT_FILE names a file of other authorities",
        ),
        ("https://127.0.0.1", "invalid certificate: UnknownIssuer; SSL_CERT_FILE"),
    ],
)
def test_the_reason_of_a_failed_connection_is_in_the_error(
    remote: Remote, endpoint: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with own_authority(remote.proxy.target) as (port, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"{endpoint}:{port}" if endpoint.startswith("https") else endpoint)
        completed = run_triglot("check", "s3://models/r")
    assert re.search(f"s3://models/r: .* error sending request: {reason}", completed.stderr), completed.stderr


def test_an_authority_of_ones_own(remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.put_model("r/a/1", 1)
    with own_authority(remote.proxy.target) as (port, authority):
        authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{port}")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        completed = run_triglot("check", "s3://models/r")
    assert completed.returncode == 0, completed.stderr


async def test_store_that_is_not_up_yet(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    """With --wait-for-models; without, the error ends the server."""
    remote.put_model("r/a/1", 1)
    remote.proxy.answer = lambda handler: refuse(handler, 403)
    with pytest.raises(ModelLoadError, match="s3://models/r: 403 Forbidden"):
        async with serving("s3://models/r"):
            pass

    async def later() -> None:
        await until(lambda: "s3://models/r: 403 Forbidden; waiting for it" in caplog.text)
        remote.proxy.answer = lambda _: False

    waiting = asyncio.create_task(later())
    async with serving("s3://models/r", wait_for_models=True, **POLL) as served:
        assert await served.value("a") == 1
    await waiting


async def test_a_start_while_the_store_is_down(
    remote: Remote, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models that are in the cache serve; not those of another server, and not where access is denied."""
    remote.put_model("r/a/1", 1)

    def down(handler: BaseHTTPRequestHandler) -> bool:
        return refuse(handler, 503)

    remote.proxy.answer = down
    with pytest.raises(ModelLoadError, match=r"^s3://models/r: 503 Service Unavailable$"):
        async with serving("s3://models/r"):
            pass
    remote.proxy.answer = lambda _: False
    async with serving("s3://models/r"):
        pass
    remote.proxy.answer = down
    remote.put_model("r/a/2", 2)
    async with serving("s3://models/r", **POLL) as served:
        assert "503 Service Unavailable; starting with the models that are in the cache" in caplog.text
        assert await served.value("a") == 1
        remote.proxy.answer = lambda _: False
        await until_found(lambda: served.value("a"), lambda value: value == 2)
        assert await served.index() == {"a/1": "READY", "a/2": "READY"}
    remote.proxy.answer = denied
    with pytest.raises(ModelLoadError, match="AccessDenied"):
        async with serving("s3://models/r"):
            pass
    remote.proxy.answer = down
    with monkeypatch.context() as changed:
        changed.setenv("AWS_ENDPOINT_URL", f"http://localhost:{remote.proxy.port}")
        with pytest.raises(ModelLoadError, match="503"):
            async with serving("s3://models/r"):
                pass
    for file in (tmp_path / "cache" / "triglot" / "objects").iterdir():
        file.unlink()
    with pytest.raises(ModelLoadError, match=r"^s3://models/r: 503 Service Unavailable$"):
        async with serving("s3://models/r"):
            pass


async def test_snapshots_of_models_that_are_not_listed_any_more_go(remote: Remote, tmp_path: Path) -> None:
    for name in ("a", "b"):
        remote.put_model(f"t/{name}/1", 1)
    a, b = (ModelSettings(name, Path(f"s3://models/t/{name}")) for name in ("a", "b"))
    async with serving(models=[a, b]) as served:
        (servers,) = (tmp_path / "cache" / "triglot" / "servers").iterdir()
        assert len(list(servers.iterdir())) == 3
        await served.server.manager.reload([b])
        await until(lambda: served.server.manager.registry.names() == ["b"])
        assert await served.value("b") == 1
        await served.server.manager.reload([b])
        assert len(list(servers.iterdir())) == 2
        await served.server.manager.reload([a, b])
        assert [await served.value(name) for name in "ab"] == [1, 1]
