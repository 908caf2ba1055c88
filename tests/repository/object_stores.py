"""Object stores for tests: emulators of the clouds', and a proxy in front that counts, and makes mistakes."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import environments
from process import Lines, clean_environment

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
