"""Python processes forked from a server process that has imported a library already.

For some programs, importing the library takes most of their time.

Each of them is like one started by `python ARGUMENTS`: a child of the process that starts it, with arguments,
environment, working directory, open files and signals of its own. Only the start of the interpreter and the import
are not repeated: a program with environment variables that are read then has to be started as a new process. At
its end, exit functions run and streams are flushed, but objects are not freed.

    python forked.py FD MODULE...   # the server: forks a process per request on this socket, until it is closed
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

LARGEST_REQUEST = 1 << 20
MOST_FILES = 250
TRIGLOT = tuple(
    f"triglot.{name}"
    for name in (
        "cli.main",
        "cli.serve",
        "cli.tfserving",
        "server",
        "transports.http2.server",
        "transports.http1.server",
        "backends.python",
        "executors.process.main",
    )
)
READ_LATE = ("TRIGLOT_", "OTEL_", "AIP_", "AOTI_", "AWS_", "COLUMNS", "PATH", "TMPDIR")
"""How variables begin that no library reads when it is imported."""
LIBRARIES = {
    "kserve": ("kserve",),
    "ml": ("sklearn.datasets", "sklearn.linear_model", "joblib", *TRIGLOT),
    "tensorflow": ("tensorflow", "tensorflow_serving.apis.prediction_service_pb2_grpc", *TRIGLOT),
    "torch": ("torch._dynamo", *TRIGLOT),
    "tritonclient": ("tritonclient.grpc.aio", "tritonclient.http"),
}
"""By environment: its modules that take long to import, and start no threads."""
BUILD_VARIABLE = "COMPILED_BUILD"
"""Names the folder of the compiled build that is tested, if it is (Makefile)."""
MODEL_PROCESS, WORKER = "from triglot.executors.process.main import main", "from triglot.__main__ import run"
"""Code in the programs that Triglot starts."""
SERVERS = (["-m", "triglot", "serve"], *(["-m", "bench.bare", kind] for kind in ("grpc", "rest", "rest-json")))
"""How the arguments of servers begin."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""
_PARAMETERS = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]


def compiled_build() -> dict[str, str]:
    """Return the variable by which a process of the tests finds the compiled build, if that is tested."""
    folder = os.environ.get(BUILD_VARIABLE)
    return {"PYTHONPATH": folder} if folder else {}


def modules_of(python: str | Path) -> tuple[str, ...]:
    """Return the modules to import before processes of this interpreter are forked; none if these are few."""
    return LIBRARIES.get(Path(python).parents[1].name, TRIGLOT if str(python) == sys.executable else ())


class ForkServer:
    """The server process, which forks programs for one other process. It ends when that ends."""

    _lock = threading.Lock()

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._requests = requests
        self._process = process

    def close(self) -> None:
        """End the process; its forks continue."""
        self._requests.close()
        if self._process is not None:
            self._process.wait()

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        files: Mapping[int, int],
        new_session: bool,
    ) -> int:
        """Return the pid of a new child of this process, which runs `python ARGUMENTS`.

        `files`: its open files, by their numbers there.
        """
        request = json.dumps([arguments, dict(environment), str(folder), list(files), new_session]).encode()
        with self._lock:
            # The program is an orphan at first; the system then gives it to this process.
            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._requests, [request], list(files.values()))
                pid = self._requests.recv(16)
            finally:
                ctypes.CDLL(None).prctl(_SUBREAPER, 0, 0, 0, 0)
        assert pid, "the process that forks others is gone"
        return int(pid)


def fork_server(python: str = sys.executable) -> ForkServer:
    """Return a server process that has imported this interpreter's `modules_of`; it is started on first use."""
    if python not in _servers:
        _servers[python] = _started(python)
    return _servers[python]


_servers: dict[str, ForkServer] = {}


def _started(python: str) -> ForkServer:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= compiled_build()
        command = [python, __file__, str(theirs.fileno()), *modules_of(python)]
        return ForkServer(ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks servers, and what they start: processes of models, and workers."""

    own_server: ClassVar[staticmethod[[], ForkServer]] = staticmethod(fork_server)

    def _server(self, given: Mapping[str, Any]) -> ForkServer | None:
        command = [] if isinstance(given["args"], str) else list(given["args"])
        is_code = command[:2] == [sys.executable, "-c"]
        is_ours = is_code and any(code in command[2] for code in (MODEL_PROCESS, WORKER))
        is_server = command[:1] == [sys.executable] and command[1:4] in SERVERS and _is_as_new(given)
        return self.own_server() if is_ours or is_server else None

    def _execute_child(self, *values: Any) -> None:
        given = dict(zip(_PARAMETERS, values, strict=True))
        server = self._server(given)
        if server is None:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        streams = enumerate(given[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        files = {number: number if stream == -1 else stream for number, stream in streams}
        files |= {number: number for number in given["pass_fds"]}
        try:
            environment = os.environ if given["env"] is None else given["env"]
            folder = Path(given["cwd"] or Path.cwd())
            self.pid = server.fork(given["args"][1:], environment, folder, files, given["start_new_session"])
            self._child_created = True
        finally:
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]


class Forked(Popen):
    """A running process `python ARGUMENTS`.

    The arguments are `-m MODULE`, `-c CODE` or a script, followed by the program's own. The `modules_of` the
    interpreter are already imported in the process. `stdout` and `stderr` are pipes of text.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        python: str = sys.executable,
    ) -> None:
        super().__init__(
            [python, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            text=True,
            errors="replace",
        )

    def _server(self, given: Mapping[str, Any]) -> ForkServer:
        return fork_server(given["args"][0])


def _is_as_new(given: Mapping[str, Any]) -> bool:
    """Whether a forked program is like a new one: on the same cores, with variables that are read later."""
    variables = (given["env"] or os.environ).items()
    others = [name for name, value in variables if os.environ.get(name) != value]
    read_late = all(name.startswith((*READ_LATE, "HOME", "KUBERNETES_")) for name in others)
    return read_late and _cores() == CORES and given["preexec_fn"] is None


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if sys.platform == "linux" else set()


CORES = _cores()


@contextmanager
def as_new_programs() -> Iterator[None]:
    """For the block, the programs that Triglot starts in this process are started as for users, not forked."""
    popen, subprocess.Popen = subprocess.Popen, Popen.__bases__[0]  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        subprocess.Popen = popen  # type: ignore[misc]


def pytest_configure() -> None:
    """Fork the programs that Triglot starts in this process, unless coverage is measured: from their start on."""
    if "COVERAGE_PROCESS_CONFIG" not in os.environ:
        subprocess.Popen = Popen  # type: ignore[misc]


def pytest_unconfigure() -> None:
    """End the server processes of this one."""
    while _servers:
        _servers.popitem()[1].close()


def main() -> None:
    """Run the server process."""
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # Else each process would copy all these objects' memory at its first collection, and at its end.
    gc.enable()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)
    _end(None)


def _serve(requests: socket.socket) -> None:
    """Fork one program per request."""
    while True:
        request, files, *_ = socket.recv_fds(requests, LARGEST_REQUEST, MOST_FILES)
        if not request:
            return
        gate, opened = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            os.close(opened)
            os.read(gate, 1)
            os.close(gate)
            requests.send(str(os.getpid()).encode())
            requests.close()
            _run(request, files)
        os.close(gate)
        os.waitpid(between, 0)
        os.close(opened)  # Now the program is the child of the process that starts it.
        for file in files:
            os.close(file)


def _run(request: bytes, files: Sequence[int]) -> NoReturn:
    """Run `python ARGUMENTS` in this process."""
    arguments, environment, folder, numbers, new_session = json.loads(request)
    highest = max(numbers)
    program = " ".join(arguments[:2])
    if "triglot" in program and MODEL_PROCESS not in program:
        _fork_server_for_this(files, highest)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, highest + 1) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(numbers, moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.orig_argv[1:] = arguments
    try:
        _run_program(arguments, folder)
    except SystemExit as end:
        _end(end.code)
    _end(None)


def _run_program(arguments: list[str], folder: str) -> None:
    match arguments:
        case ["-m", module, *rest]:
            sys.path[0] = folder
            sys.argv[1:] = rest
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path[0] = ""
            sys.argv[:] = ["-c", *rest]
            main_module = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(main_module))
        case [script, *_]:
            sys.path[0] = str(Path(script).parent)
            sys.argv[:] = arguments
            runpy.run_path(script, run_name="__main__")


def _end(code: object) -> NoReturn:
    """End this process like `sys.exit(code)`, but leave all objects as they are.

    Python would free each of them, and so copy the memory that the process shares with the one it was forked from:
    most of the CPU time of a short program.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # Waits for the threads that are no daemons.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _fork_server_for_this(files: Sequence[int], highest: int) -> None:
    """Fork a server process for the programs that this one starts. `highest`: the largest number of its files."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        for file in files:
            os.close(file)
        _serve(theirs)
        os._exit(0)
    theirs.close()
    with ours:
        server = ForkServer(socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, highest + 1)))
    Popen.own_server = staticmethod(lambda: server)
    subprocess.Popen = Popen  # type: ignore[misc]


if __name__ == "__main__":
    main()
