"""Models of the hub and in archives on web servers: stubs of both, with what they do wrong."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import ssl
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import pytest
import trustme

from tests.process import run_triglot
from tests.repository.object_stores import cut, refuse
from tests.repository.stored_models import POLL, SAYS, serving
from tests.waiting import until_found
from triglot.core.errors import ModelLoadError

LFS_BYTES = 1000
TOKEN = "hf_secret"


class Site:
    """A web server of files, with TLS or without; `answer` may answer a request in its place.

    `ranges`: whether it knows parts. `read`: the bytes of each path that were sent.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.read: dict[str, int] = {}
        self.answer: Callable[[BaseHTTPRequestHandler], bool] = lambda _: False
        self.authorizations: dict[str, str] = {}
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                site.get(self)

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass  # Clients may leave.

            def finish_request(self, request: Any, client_address: Any) -> None:
                if context is not None:
                    request = context.wrap_socket(request, server_side=True)
                with request:
                    Handler(request, client_address, self)

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        """One request."""
        self.authorizations[handler.path] = handler.headers.get("Authorization", "")
        if self.answer(handler):
            return
        content = self.files.get(unquote(handler.path))
        if content is None:
            refuse(handler, 404)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", "")) if self.ranges else None
        begin, end = (
            (0, len(content)) if wanted is None else (int(wanted[1]), min(int(wanted[2]) + 1, len(content)))
        )
        handler.send_response(200 if wanted is None else 206)
        if wanted is not None:
            handler.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        handler.send_header("Content-Length", str(end - begin))
        handler.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        handler.send_header("Last-Modified", "Thu, 26 Nov 2026 12:00:00 GMT")
        handler.end_headers()
        if end - begin > 1:  # Else somebody looks how large it is.
            self.read[handler.path] = self.read.get(handler.path, 0) + end - begin
        handler.wfile.write(content[begin:end])


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


# --- the hub ---


class Hub(Site):
    """A hub with the private repository `me/models`; its files are in the revisions `main` and `v1`.

    It answers as the hub does: with digests of large files, which lie on another server.
    """

    def __init__(self, content: Site) -> None:
        super().__init__()
        self._content = content
        self.revisions: dict[str, dict[str, bytes]] = {}
        self.answer = self._api

    def _api(self, handler: BaseHTTPRequestHandler) -> bool:
        path, _, query = unquote(handler.path).partition("?")
        if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            return refuse(handler, 401)
        if match := re.fullmatch(r"/api/models/me/models/revision/(.+)", path):
            if match[1] not in self.revisions:
                return refuse(handler, 404)
            assert query == "blobs=true"
            return self._send(handler, match[1])
        if match := re.fullmatch(r"/me/models/resolve/(\w+)/(.+)", path):
            return self._resolve(handler, self._files(match[1])[match[2]])
        return refuse(handler, 404)

    def _commit(self, revision: str) -> str:
        return hashlib.sha1(repr(self.revisions[revision]).encode()).hexdigest()

    def _files(self, commit: str) -> Mapping[str, bytes]:
        return next(files for name, files in self.revisions.items() if self._commit(name) == commit)

    def _resolve(self, handler: BaseHTTPRequestHandler, content: bytes) -> bool:
        name = f"/{hashlib.sha1(content).hexdigest()}"
        self._content.files[name] = content
        handler.send_response(302)
        handler.send_header("Location", f"http://127.0.0.1:{self._content.port}{name}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    def _send(self, handler: BaseHTTPRequestHandler, revision: str) -> bool:
        siblings: list[dict[str, object]] = []
        for path, content in self.revisions[revision].items():
            entry = {"rfilename": path, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
            if len(content) >= LFS_BYTES:
                digest = hashlib.sha256(content).hexdigest()
                entry |= {"lfs": {"sha256": digest, "size": len(content), "pointerSize": 130}}
            siblings.append(entry)
        body = json.dumps({"id": "me/models", "sha": self._commit(revision), "siblings": siblings}).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True


@pytest.fixture
def content() -> Iterator[Site]:
    with Site() as site:
        yield site


@pytest.fixture
def hub(content: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(content) as site:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{site.port}")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield site


def model(value: int) -> dict[str, bytes]:
    weights = str(value).encode() * LFS_BYTES
    return {"a/1/value.txt": str(value).encode(), "a/1/weights": weights, "a/1/model.py": SAYS.encode()}


async def test_the_hub(hub: Hub, content: Site) -> None:
    hub.revisions = {"main": {"README.md": b"#", **model(1)}, "v1": model(2)}
    for url, value in (
        ("hf://me/models", 1),
        ("hf://me/models@v1", 2),
        ("hf://me/models/a", 1),
        ("hf://me/models@v1/a", 2),
    ):
        async with serving(url) as served:
            assert await served.value("a") == value, url
    hub.revisions["v2"] = plain(4)
    async with serving("hf://me/models@v2") as served:
        assert await served.value("models") == 4
    assert not any(content.authorizations.values()), "the token is for the hub alone"
    content.read.clear()
    async with serving("hf://me/models", **POLL) as served:
        assert not content.read
        hub.revisions["main"]["a/1/value.txt"] = b"3"
        await until_found(lambda: served.value("a"), lambda value: value == 3)
        assert sum(content.read.values()) == 0  # One byte, which nobody counts.


async def test_a_token_of_a_login(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.revisions = {"main": model(1)}
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ModelLoadError, match=r"^hf://me/models: 401 Unauthorized: no such repository"):
        async with serving("hf://me/models"):
            pass
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    async with serving("hf://me/models") as served:
        assert await served.value("a") == 1
    for url in ("hf://me/others", "hf://me/models@v9"):
        with pytest.raises(ModelLoadError, match=f"^{url}: 404 Not Found: no such repository or revision"):
            async with serving(url):
                pass


async def test_a_hub_that_fails(hub: Hub, content: Site, caplog: pytest.LogCaptureFixture) -> None:
    """What is cut is continued; what stays wrong leaves the model as it was."""
    hub.revisions = {"main": model(1)}
    cuts = iter([True])

    def cut_once(handler: BaseHTTPRequestHandler) -> bool:
        return next(cuts, False) and refuse(handler, 503)

    content.answer = cut_once
    async with serving("hf://me/models", **POLL) as served:
        assert await served.value("a") == 1
        content.answer = lambda handler: refuse(handler, 403)
        hub.revisions["main"] = model(2)
        found = await until_found(served.index, lambda index: "403 Forbidden" in index["a/1"])
        assert found["a/1"].startswith("READY hf://me/models: ")
        assert await served.value("a") == 1
        content.answer = lambda _: False
        await until_found(lambda: served.value("a"), lambda value: value == 2)
    assert TOKEN not in caplog.text


def test_without_the_library_of_the_hub() -> None:
    without = "import sys\nsys.modules['huggingface_hub'] = None"
    checked = run_triglot("check", "hf://me/models", before=without)
    assert checked.returncode == 1
    missing = "needs huggingface_hub, which is not installed; run: pip install huggingface_hub"
    assert f"hf://me/models: {missing}" in checked.stdout


# --- archives ---


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with Site(context) as site:
        yield site


def tar(files: Mapping[str, bytes], mode: str = "w:gz", link: str = "") -> bytes:
    """An archive; `link`: where a symbolic link in it leads."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        if link:
            entry = tarfile.TarInfo("link")
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            archive.addfile(entry)
    return packed.getvalue()


def zipped(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def plain(value: int) -> dict[str, bytes]:
    return {"value.txt": str(value).encode(), "model.py": SAYS.encode()}


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "whole"])
@pytest.mark.parametrize("kind", ["tar.gz", "tar", "tgz", "zip"])
async def test_archives(web: Site, kind: str, ranges: bool) -> None:
    """A model's files, or a repository; a signature of the URL is not said."""
    packs: Mapping[str, Callable[[Mapping[str, bytes]], bytes]] = {
        "zip": zipped,
        "tar": lambda files: tar(files, "w"),
    }
    pack = packs.get(kind, tar)
    web.ranges = ranges
    web.files = {f"/some/a.{kind}?sig=secret": pack(plain(1)), f"/all.{kind}": pack(model(2))}
    for path, value in ((f"some/a.{kind}?sig=secret", 1), (f"all.{kind}", 2)):
        for _ in range(2):
            async with serving(f"https://127.0.0.1:{web.port}/{path}") as served:
                assert await served.value("a") == value
    if ranges:
        assert web.read == {path: len(content) for path, content in web.files.items()}


async def test_an_archive_that_changes(web: Site) -> None:
    url = f"https://127.0.0.1:{web.port}/a.tar.gz?sig=secret"
    path = "/a.tar.gz?sig=secret"
    web.files[path] = tar(plain(1))
    async with serving(url, **POLL) as served:
        assert await served.value("a") == 1
        web.files[path] = tar(plain(2))
        await until_found(lambda: served.value("a"), lambda value: value == 2)
        web.files[path] = tar(plain(3))[:-20]
        found = await until_found(served.index, lambda index: "cannot be unpacked" in index["a/1"])
        assert "secret" not in found["a/1"]
        assert await served.value("a") == 2
        web.answer = lambda handler: refuse(handler, 404)
        await until_found(served.index, lambda index: "a.tar.gz: no such file or folder" in index["a/1"])
        assert await served.value("a") == 2


async def test_a_start_while_the_web_server_is_down(web: Site, caplog: pytest.LogCaptureFixture) -> None:
    web.files["/a.tar.gz"] = tar(plain(1))
    url = f"https://127.0.0.1:{web.port}/a.tar.gz"
    async with serving(url):
        pass
    web.answer = lambda handler: refuse(handler, 500)
    async with serving(url) as served:
        assert await served.value("a") == 1
    assert f"{url}: 500 Internal Server Error; starting with the models that are in the cache" in caplog.text


@pytest.mark.parametrize(
    "content",
    [tar({"../out/model.py": b""}), tar(plain(1), link="/etc/passwd"), zipped({"../out": b""}), b"no"],
    ids=["outside", "link", "zip", "damaged"],
)
async def test_archives_that_are_refused(web: Site, tmp_path: Path, content: bytes) -> None:
    name = "a.zip" if content[:2] == b"PK" else "a.tar.gz"
    web.files[f"/{name}?sig=secret"] = content
    with pytest.raises(ModelLoadError, match=r"^https://127.0.0.1:\d+/a[.a-z]+: the archive ") as caught:
        async with serving(f"https://127.0.0.1:{web.port}/{name}?sig=secret"):
            pass
    assert "secret" not in str(caught.value)
    assert not (await asyncio.to_thread(lambda: list(tmp_path.rglob("out"))))


async def test_a_web_server_that_fails(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    web.files["/a.tar.gz"] = tar(plain(1))
    url = f"https://127.0.0.1:{web.port}/a.tar.gz"

    def redirect(handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(302)
        handler.send_header("Location", "http://127.0.0.1:9/a.tar.gz")
        handler.end_headers()
        return True

    for answer, text in (
        (lambda handler: refuse(handler, 403), "403 Forbidden"),
        (cut, "changed while it was downloaded|IncompleteRead|got 100 bytes"),
        (redirect, "the server redirects to an address without TLS"),
    ):
        web.answer = answer
        with pytest.raises(ModelLoadError, match=text):
            async with serving(url):
                pass
    web.answer = lambda _: False
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(ModelLoadError, match="certificate verify failed"):
        async with serving(url):
            pass
