"""The clients: how each is started, what it lacks, and the run of the table of cases through one of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import psutil
import pytest
from cryptography import x509

from tests import environments
from tests.e2e.foreign.cases import Case, Json
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS, clean_environment
from tests.transports.tls_server import Authority

PROGRAMS = Path(__file__).parent / "programs"
DESCRIPTORS = environments.ROOT / "server" / "triglot" / "pb" / "descriptors.binpb"
MODELS = Path(__file__).parent / "models"
SECONDS = 120
Command = Callable[[], tuple[list[str], dict[str, str]]]
"""Returns a command line and variables of its environment; skips the test where something is not installed."""


@dataclass(frozen=True)
class Connection:
    """What a client connects to: `address` is HOST:PORT or unix:PATH, and three are PEM files."""

    address: str
    ca: str = ""
    certificate: str = ""
    key: str = ""
    keepalive_ms: int = 0
    retries: bool = False


@dataclass(frozen=True)
class Limit:
    """A client cannot pass a case, or not `always`: why, and a text of what it does instead."""

    reason: str
    observed: str
    always: bool = True


@dataclass(frozen=True, eq=False)
class Client:
    """A client's program, and the cases that it cannot pass."""

    name: str
    command: Command
    limits: Mapping[str, Limit] = field(default_factory=dict)

    @contextmanager
    def calling(self, connection: Connection) -> Iterator[Callable[[Json], Json]]:
        """Run the program; what is yielded makes a call."""
        command, environment = self.command()
        process = subprocess.Popen(
            [*command, json.dumps(asdict(connection))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=clean_environment(**environment),
        )
        requests, results = process.stdin, process.stdout
        assert requests is not None
        assert results is not None

        def call(request: Json) -> Json:
            with suppress(BrokenPipeError):
                print(json.dumps(request), file=requests, flush=True)
            overdue = threading.Timer(SECONDS, process.kill)
            overdue.start()
            line = results.readline()
            overdue.cancel()
            no_result = {
                "code": "ENDED",
                "message": f"the program ended with status {process.poll()}",
                "responses": [],
            }
            result: Json = json.loads(line) if line else no_result
            return result | {"ports": ports(process.pid)}

        with process:
            try:
                yield call
                with suppress(BrokenPipeError):
                    requests.close()
                process.wait(SECONDS)
            finally:
                process.kill()


def ports(pid: int) -> list[int]:
    """Return the local ports of a process's open connections: each number is another connection."""
    return [
        found.laddr.port
        for found in psutil.net_connections("tcp")
        if found.pid == pid and found.laddr and found.status == psutil.CONN_ESTABLISHED
    ]


Outcomes = dict[str, list[Json]]
"""The results of each case's calls, by its name; a case is missing if the program ended in its calls."""


def run_cases(client: Client, connection: Connection, cases: list[Case]) -> Outcomes:
    """Make the calls of each case on one connection."""
    outcomes: Outcomes = {}
    with client.calling(connection) as call:
        for case in cases:
            outcomes[case.name] = [call(request) for request in case.calls]
    return outcomes


def check(client: Client, case: Case, results: list[Json]) -> None:
    """Raise `AssertionError` if a case's results are not as they have to be, or not as the client's limit says."""
    limit = client.limits.get(case.name)
    try:
        case.check(results)
    except AssertionError as error:
        if limit is None or limit.observed not in str(error):
            raise
    else:
        assert limit is None or not limit.always, f"{client.name} passes: {limit}"


# --- servers ---


@contextmanager
def connections(folder: Path) -> Iterator[dict[str, Connection]]:
    """Run the servers that the cases need; yields the connections by the names that `Case.over` has."""
    authority = Authority(folder)
    files = [f"--{name.replace('_', '-')}={file}" for name, file in authority.server(mutual=True).items()]
    certificate, key = folder / "client.pem", folder / "client.key"
    issued = authority.issue(x509.DNSName("client"))  # The key is PKCS#8, Netty reads no other.
    for file, content in zip((certificate, key), issued, strict=True):
        file.write_bytes(content)
    ca, socket = str(folder / "ca.pem"), folder / "grpc.sock"
    with ExitStack() as stack:

        def address(*arguments: str) -> str:
            loaded = "--load-model=identity_uint8,token_stream,steps,seen,failing"
            server = ServerProcess(
                str(PLAIN_MODELS), str(MODELS), "--model-control-mode=explicit", loaded, *arguments
            )
            return stack.enter_context(server).grpc_address

        plain = address(f"--grpc-socket={socket}", "--grpc-compression=gzip")
        yield {
            "plain": Connection(plain),
            "unix": Connection(f"unix:{socket}"),
            "keepalive": Connection(plain, keepalive_ms=10_000),
            "tls": Connection(address(*files[:2]), ca),
            "mtls": Connection(address(*files, "--tls-client-auth=required"), ca, str(certificate), str(key)),
            "aging": Connection(address("--max-connection-age=1")),
        }


# --- clients ---


def _python(environment: str, program: str, newest: tuple[int, int] | None = None) -> Command:
    """`newest`: the last version of Python for which the environment's packages have wheels."""

    def command() -> tuple[list[str], dict[str, str]]:
        if newest is not None and sys.version_info[:2] > newest:
            pytest.skip(f"{environment} needs Python {newest[0]}.{newest[1]} or older")
        python = sys.executable if environment == "dev" else str(environments.python(environment))
        return [python, str(PROGRAMS / program)], {}

    return command


def node(program: str) -> Command:
    @cache
    def command() -> tuple[list[str], dict[str, str]]:
        node, _ = _need("node", "nodejs npm"), _need("npm", "npm")
        if subprocess.run([node, "-e", "require('zlib').crc32('')"], capture_output=True, check=False).returncode:
            pytest.skip("node is older than 20.15: https://nodejs.org has newer ones")
        modules = environments.node_modules("foreign_node")
        return [node, str(PROGRAMS / program)], {"NODE_PATH": str(modules), "DESCRIPTORS": str(DESCRIPTORS)}

    return command


def _go() -> tuple[list[str], dict[str, str]]:
    folder = Path("/usr/share/gocode")
    go = _need("go", "golang-go golang-google-grpc-dev", folder / "src" / "google.golang.org" / "grpc")
    source = PROGRAMS / "grpc_go.go"
    build = [go, "build", "-o", source.stem, str(source)]
    built = environments.compiled(source, build, GO111MODULE="off", GOPATH=str(folder))
    return [str(built / source.stem)], {"GRPC_GO_RETRY": "on"}  # Until 1.40 retries are off.


@cache
def _ruby() -> tuple[list[str], dict[str, str]]:
    ruby = _need("ruby", "ruby ruby-grpc")
    if subprocess.run([ruby, "-e", 'require "grpc"'], capture_output=True, check=False).returncode:
        pytest.skip("the gem grpc is not installed: apt install ruby-grpc")
    return [ruby, str(PROGRAMS / "grpc_ruby.rb")], {}


def _cpp() -> tuple[list[str], dict[str, str]]:
    headers = [Path("/usr/include", name) for name in ("grpcpp/grpcpp.h", "nlohmann/json.hpp")]
    compiler = _need("g++", "g++ libgrpc++-dev nlohmann-json3-dev", *headers)
    source = PROGRAMS / "grpc_cpp.cpp"
    libraries = [f"-l{name}" for name in ("grpc++", "grpc", "gpr", "absl_strings", "absl_synchronization", "z")]
    built = environments.compiled(source, [compiler, "-std=c++17", "-o", source.stem, str(source), *libraries])
    return [str(built / source.stem)], {}


def _java() -> tuple[list[str], dict[str, str]]:
    jars = Path("/usr/share/java")
    parts = ("grpc-netty", "netty-handler", "netty-tcnative", "guava", "perfmark-api", "gson")
    libraries = ("grpc", "netty", "netty-tcnative", "guava", "perfmark", "google-gson")
    packages = " ".join(["default-jdk-headless", *(f"lib{library}-java" for library in libraries)])
    javac = _need("javac", packages, *(jars / f"{part}.jar" for part in parts))
    found = [jar for part in ("grpc-*", "netty-*", *parts[3:]) for jar in sorted(jars.glob(f"{part}.jar"))]
    path = ":".join(map(str, found))
    source = PROGRAMS / "grpc_java.java"
    # Netty has to have ALPN of OpenSSL, as Debian removed the JDK's, and finds it by another name than Debian's.
    (tls,) = Path("/usr/lib").glob("*/jni/libnetty-tcnative.so")
    build = 'javac -cp "$0" -d . "$1" && cp "$2" libnetty_tcnative.so'
    built = environments.compiled(source, ["sh", "-c", build, path, str(source), str(tls)])
    # The options are what makes a short program begin quickly.
    options = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Djava.library.path={built}"]
    return [str(Path(javac).parent / "java"), *options, "-cp", f"{built}:{path}", "GrpcJava"], {}


def _need(program: str, packages: str, *files: Path) -> str:
    """Return the path of a program; skips the test, naming Debian's packages, where it or a file is missing."""
    found = shutil.which(program)
    missing = [str(file) for file in files if not file.exists()]
    if found is None or missing:
        pytest.skip(f"{(missing or [program])[0]} is not installed: apt install {packages}")
    return found


TOO_LATE = "DEADLINE_EXCEEDED"
NOT_CLOSED = "'int_contents': [0]"
NO_EPOLL = Limit("Netty needs its native library for epoll, which Debian's lacks", "the required native library")
CLIENTS = [
    Client("grpcio", _python("dev", "grpc_client.py")),
    Client("grpcio 1.49", _python("foreign_grpcio_1_49", "grpc_client.py", (3, 11))),
    Client("grpcio 1.59", _python("foreign_grpcio_1_59", "grpc_client.py", (3, 12))),
    Client(
        "grpclib",
        _python("foreign_grpclib", "grpclib_client.py"),
        {
            "connection age": Limit(
                "it closes a connection at its GOAWAY, with the calls on it, and retries none",
                "StreamTerminatedError",
                always=False,
            ),
            "deflate": Limit("it has no compression", "the package has no compression"),
            "error with trailing metadata": Limit("it drops metadata called grpc-…", "'trailers': {}"),
            "gzip": Limit("it has no compression", "the package has no compression"),
            "leave in mid-stream": Limit("the end of its `async with` waits for the stream's end", NOT_CLOSED),
        },
    ),
    Client(
        "connectrpc",
        _python("foreign_connect", "connect_python.py"),
        {
            "bidirectional over unix": Limit("it connects to hosts", "the package has no Unix sockets"),
            "deflate": Limit("it has gzip, Brotli and Zstandard", "the package has no deflate"),
            "unary over unix": Limit("it connects to hosts", "the package has no Unix sockets"),
        },
    ),
    Client(
        "grpc-js",
        node("grpc_js.js"),
        {"leave in mid-stream": Limit("`break` in a `for await` does not cancel the call", NOT_CLOSED)},
    ),
    Client(
        "nice-grpc",
        node("nice_grpc.js"),
        {
            "long deadline": Limit(
                "nice-grpc-client-middleware-deadline sets a timer of Node, at most 2³¹ ms", TOO_LATE
            )
        },
    ),
    Client(
        "connect-node",
        node("connect_node.js"),
        {
            "connection age": Limit(
                "it may open a stream on a connection that ends, and does not retry what is refused",
                "REFUSED_STREAM",
                always=False,
            ),
            "deflate": Limit("it has gzip and Brotli", "the package has no deflate"),
            "long deadline": Limit("it sets a timer of Node, at most 2³¹ ms", TOO_LATE),
        },
    ),
    Client("grpc-go", _go, {"deflate": Limit("it has gzip", "Compressor is not installed")}),
    Client("grpc-ruby", _ruby),
    Client("grpc-c++", _cpp),
    Client(
        "grpc-java",
        _java,
        {
            "deflate": Limit("it has gzip", "Unable to find compressor"),
            "unary over unix": NO_EPOLL,
            "bidirectional over unix": NO_EPOLL,
        },
    ),
]
