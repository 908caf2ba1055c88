"""A `triglot` process as a user starts it, what it says, and the few calls that tests of a process make.

Nothing here waits a fixed time: everything is waited for, with a deadline.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import grpc
import grpc_transport

from triglot.pb.kserve import inference_pb2 as pb

SECONDS = 60
"""How long anything may take; only a test that fails waits so long."""
FREE_PORTS = ("--grpc-port", "0", "--rest-port", "0")
LISTENING = re.compile(r"gRPC on 127\.0\.0\.1:(\d+) and REST on 127\.0\.0\.1:(\d+) in \d+\.\d\d s")
SERVICE = "/inference.GRPCInferenceService/"


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what would lead the server or its clients astray, and `extra`.

    Which transport the tests go through stays, so that the processes they start are like them.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in (grpc_transport.VARIABLE, grpc_transport.HTTP_VARIABLE)
        or not (name.lower().endswith("_proxy") or name.startswith(("TRIGLOT_", "PYTHON")))
    }
    return kept | extra


def triglot_command(
    arguments: tuple[str | Path, ...], before: str = "", python: str | Path = sys.executable
) -> list[str]:
    """`triglot ARGUMENTS`; `before` is code that runs first, in the same process."""
    if before:
        program = ["-c", f"{before}\nimport sys\nfrom triglot.cli.serve import main\nsys.exit(main())"]
    else:
        program = ["-m", "triglot"]
    return [str(python), *program, *map(str, arguments)]


def run_triglot(
    *arguments: str | Path, environment: Mapping[str, str] | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """`triglot ARGUMENTS`, to its end."""
    return subprocess.run(
        triglot_command(arguments, before),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=clean_environment(**(environment or {})),
        check=False,
    )


class Lines:
    """The text of a pipe, read by a thread so that the writer never waits."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._text = ""
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._pipe:
            with self._changed:
                self._text += line
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def text(self) -> str:
        """What was written so far."""
        with self._changed:
            return self._text

    def wait_for(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        """The first match, now or later. Raises `AssertionError` when the text ends without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or re.search(pattern, self._text) is not None, SECONDS)
            match = re.search(pattern, self._text)
        assert match is not None, f"no {pattern!r} in:\n{self._text}"
        return match

    def close(self) -> str:
        """All that was written; the writer is gone."""
        self._thread.join(SECONDS)
        self._pipe.close()
        return self._text


class Triglot:
    """`triglot serve ARGUMENTS`, or another command than `serve`, running in this or another environment's python.

    Killed at the end of the `with` block when it still runs then.
    """

    def __init__(
        self,
        *arguments: str | Path,
        command: str = "serve",
        environment: Mapping[str, str] | None = None,
        before: str = "",
        python: str | Path = sys.executable,
        folder: Path | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            triglot_command((command, *arguments), before, python),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**(environment or {})),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout = Lines(self._process.stdout)
        self.stderr = Lines(self._process.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self.stdout.close()
        self.stderr.close()

    def ports(self) -> tuple[int, int]:
        """The ports of gRPC and REST, as soon as the log says that they are open."""
        grpc_port, rest_port = self.stderr.wait_for(LISTENING).groups()
        return int(grpc_port), int(rest_port)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit status, and both texts complete."""
        status = self._process.wait(SECONDS)
        self.stdout.close()
        self.stderr.close()
        return status

    def stop(self) -> None:
        """SIGTERM, and a clean end."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 0, self.stderr.text()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None


@contextmanager
def grpc_channel(port: int) -> Iterator[grpc.Channel]:
    """A channel of its own connection: grpc shares those of equal channels otherwise."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def rpc(channel: grpc.Channel, method: str, reply: Any) -> Any:
    """The callable of a unary RPC; `method` alone means KServe's service."""
    return channel.unary_unary(
        method if "/" in method else SERVICE + method,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reply.FromString,
    )


def server_ready(channel: grpc.Channel) -> bool:
    """ServerReady."""
    reply: pb.ServerReadyResponse = rpc(channel, "ServerReady", pb.ServerReadyResponse)(
        pb.ServerReadyRequest(), timeout=SECONDS
    )
    return reply.ready


def infer_request(model: str, value: int = 7, shape: Sequence[int] = (1,)) -> pb.ModelInferRequest:
    """An inference of one INT32 element, the input `x` of the models that these tests write."""
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=shape)],
        raw_input_contents=[value.to_bytes(4, "little", signed=True)],
    )


def infer(channel: grpc.Channel, model: str, value: int = 7, shape: Sequence[int] = (1,)) -> int:
    """The one INT32 element of the answer."""
    call = rpc(channel, "ModelInfer", pb.ModelInferResponse)
    return answer_value(call(infer_request(model, value, shape), timeout=SECONDS))


def answer_value(response: pb.ModelInferResponse) -> int:
    """The one INT32 element of the first output."""
    return int.from_bytes(response.raw_output_contents[0], "little", signed=True)


@dataclass(frozen=True)
class Rest:
    """The REST interface at a port of this machine."""

    port: int
    host: str = "127.0.0.1"

    def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded JSON."""
        return self._call(urllib.request.Request(self._url(path)))

    def infer(self, model: str, value: int = 7) -> tuple[int, Any]:
        """As the function `infer`; the status and the whole answer."""
        tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [value]}
        return self.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and decoded JSON of the answer to a JSON body; None for an empty one."""
        return self._call(urllib.request.Request(self._url(path), json.dumps(body).encode()))

    def _url(self, path: str) -> str:
        return f"http://{self.host}:{self.port}{path}"

    def _call(self, request: urllib.request.Request) -> tuple[int, Any]:
        # No proxies: this is about this machine alone.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=SECONDS) as response:
                text = response.read()
                return response.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@contextmanager
def taken_port() -> Iterator[int]:
    """A port of this machine that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def unused_ports() -> tuple[int, int]:
    """Two ports that are free at the moment, none of those that the kernel gives to who asks for any (port 0)."""
    found: set[int] = set()
    while len(found) < 2:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    one, other = found
    return one, other


def is_listening(port: int) -> bool:
    """Whether a connection to the port is accepted."""
    try:
        with socket.create_connection(("127.0.0.1", port), SECONDS):
            return True
    except ConnectionError:  # Refused, or reset by one who is just about to close it.
        return False


IDENTITY = """
import triglot

class Identity(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""


def write_whole(file: Path, text: str) -> Path:
    """The file, replaced in one step: who looks meanwhile finds all of its text, or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.part")
    beside.write_text(text)
    return beside.rename(file)


def write_model(folder: Path, text: str = IDENTITY) -> Path:
    """A model folder; the path of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.py"
    file.write_text(text)
    return file
