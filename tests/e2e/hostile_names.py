"""Names that no model may have, and a server whose repository lies beside models that it must not open."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from tests.e2e.server_process import ServerProcess
from tests.process import IDENTITY, SECONDS, write_model
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import infer
from tests.protocol_clients.rest import Rest
from triglot.pb.kserve import inference_pb2 as kserve

OPENED = "open({!r}, 'w').close()\n"
"""In front of a model that must never be run."""
OUT_OF_IT = "../outside"
"""From the repository to a valid model beside it."""
NAMES = [
    "",
    ".",
    "..",
    "/",
    OUT_OF_IT,
    f"{OUT_OF_IT}/1",
    f"good/../{OUT_OF_IT}",
    f"good/../../{OUT_OF_IT}",
    "a/../good",
    "good/1",
    "good/",
    "/etc",
    "/etc/passwd",
    "{folder}/outside",
    "file://{folder}/outside",
    "%2e%2e%2foutside",
    "..%2foutside",
    "%252e%252e%252foutside",
    "..\\outside",
    "a\0b",
    "good\0",
    ".hidden",
    "x" * 129,
    "x" * 10_000,
    "good ",
    " good",
    "good\n",
    "good:1",
    "modèle",
    "\u202egood",
    "\uff0e\uff0e/outside",
    "*",
    "good*",
    "$(id)",
    "good;id",
]
VERSIONS = [
    "..",
    "../outside",
    ".",
    "-1",
    "+1",
    "01",
    "0x1",
    "1.0",
    "1e0",
    " 1",
    "1\0",
    "\uff11",
    "latest",
    "9" * 5000,
    "0" * 5000 + "1",
]
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@dataclass(frozen=True)
class ExposedServer:
    """A server in explicit mode, of a repository in a folder that has more."""

    server: ServerProcess
    folder: Path
    channel: grpc.Channel

    def name(self, text: str) -> str:
        """A hostile name, with the folder's path in it."""
        return text.replace("{folder}", str(self.folder))

    def refuses(self, method: str, request: Any, reply: Any) -> grpc.StatusCode:
        """The code that a unary RPC ends with, which says that the client is wrong."""
        with pytest.raises(grpc.RpcError) as caught:
            rpc(self.channel, method, reply)(request, timeout=SECONDS)
        code: grpc.StatusCode = caught.value.code()
        assert code in (INVALID, NOT_FOUND), (method, caught.value)
        assert caught.value.details()
        return code

    def http(self, verb: str, path: str, body: bytes = b"", headers: str = "") -> tuple[int, bytes]:
        """Status and body of a request whose path is sent as it is."""
        host, port = self.server.rest_address.split(":")
        head = (
            f"{verb} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}Content-Length: {len(body)}"
        )
        with socket.create_connection((host, int(port)), SECONDS) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head_of_answer, _, content = answer.partition(b"\r\n\r\n")
        return int(head_of_answer.split()[1]), content

    def check(self) -> None:
        """It serves what it served, and has opened nothing else."""
        assert infer(self.channel, "good", 7) == 7
        assert Rest(int(self.server.rest_address.rpartition(":")[2])).infer("good", 3)[0] == 200
        reply = rpc(self.channel, "RepositoryIndex", kserve.RepositoryIndexResponse)(
            kserve.RepositoryIndexRequest(ready=True), timeout=SECONDS
        )
        assert [(model.name, model.version) for model in reply.models] == [("good", "1")]
        assert [file.name for file in self.folder.glob("opened*")] == []


def write_models(folder: Path) -> Path:
    """A repository with the model `good`, models that leave it, and valid ones outside."""
    repository, outside = folder / "repository", folder / "outside"
    write_model(repository / "good" / "1")
    for number, place in enumerate((outside / "1", repository / ".hidden" / "1", repository / "x y" / "1")):
        write_model(place, OPENED.format(str(folder / f"opened-{number}")) + IDENTITY)
    write_model(repository / "configured" / "1")
    (repository / "configured" / "config.pbtxt").write_text(
        'default_model_filename: "../../../outside/1/model.py" backend: "python"'
    )
    (repository / "linked").symlink_to(outside)
    (repository / "in_part").mkdir()
    (repository / "in_part" / "1").symlink_to("../../outside/1")
    return repository


@contextmanager
def opened(folder: Path) -> Iterator[ExposedServer]:
    """The server, which serves `good`; at the end of the block it does so still."""
    arguments = (str(write_models(folder)), "--model-control-mode", "explicit", "--load-model", "good")
    with ServerProcess(*arguments) as server, grpc_channel(int(server.grpc_address.rpartition(":")[2])) as channel:
        exposed = ExposedServer(server, folder, channel)
        exposed.check()
        yield exposed
        exposed.check()


def the_same(name: str) -> list[str]:
    """The ways in which a name may stand in a path."""
    ways = [quote(name, safe="")]
    if name and name.isascii() and name.isprintable() and " " not in name:
        ways += [name, quote(ways[0], safe="")]
    return list(dict.fromkeys(ways))
