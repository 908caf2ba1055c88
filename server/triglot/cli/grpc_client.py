"""A gRPC client for the commands that call a running server."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triglot.config.options import GRPC_ADDRESS, OPTIONS, ConfigError
from triglot.config.variables import TOKEN_VARIABLE
from triglot.core.errors import Code, ServingError

if TYPE_CHECKING:
    from triglot import client

FOREVER = 365.0 * 24 * 3600
"""The deadline of calls with `--timeout 0`, in seconds."""


class CallError(Exception):
    """Raised when a call fails; the text says what to do. `code`: name of the server's gRPC status, or ""."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class NoServer(CallError):
    """Raised when no server responds at the address."""


def add_connection(parser: argparse.ArgumentParser, address: str, what: str) -> None:
    """Add the flags for the server, with `address` as the first, and for its calls, described by `what`."""
    add = parser.add_argument
    add(
        address,
        dest="address",
        default=GRPC_ADDRESS,
        metavar="HOST:PORT",
        help=f"the server's gRPC address (default: {GRPC_ADDRESS})",
    )
    parser.set_defaults(address_flag=address)
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help=f"deadline of {what} (default: 60)")
    add("--tls", action="store_true", help="connect with TLS")
    add("--tls-ca", type=Path, metavar="FILE", help="PEM file of the CA certificates to trust; implies --tls")
    add(
        "--tls-certificate",
        type=Path,
        metavar="FILE",
        help="PEM file of the client's certificate chain, with --tls-key; implies --tls",
    )
    add("--tls-key", type=Path, metavar="FILE", help="PEM file of the client certificate's private key")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the token for a server with access control (default: the variable {TOKEN_VARIABLE})",
    )


@contextmanager
def connected(flags: Mapping[str, Any], service: str, protocol: str) -> Iterator[Client]:
    """Connect a client of a `protocol`'s service, with the flags of `add_connection`. Raise `ConfigError`."""
    if "://" in flags["address"] and not flags["address"].startswith("unix:"):
        raise ConfigError(
            f"{flags['address_flag']}: expected HOST:PORT of the server's gRPC port, which is "
            f"{OPTIONS['grpc_port'].default} by default, got {flags['address']!r}"
        )
    token = _token(flags["token_file"])
    files = {flag: flags[flag[2:].replace("-", "_")] for flag in ("--tls-ca", "--tls-certificate", "--tls-key")}
    if (files["--tls-certificate"] is None) != (files["--tls-key"] is None):
        raise ConfigError("--tls-certificate and --tls-key: expected both, or neither")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # Errors have the same information.
    from triglot.client import Client as Arrays  # noqa: PLC0415 - other commands do not need gRPC.
    from triglot.client import Retries, Tls  # noqa: PLC0415

    try:
        arrays = Arrays(
            flags["address"],
            timeout=flags["timeout"] or FOREVER,
            token=token,
            tls=Tls(*files.values()) if flags["tls"] or any(files.values()) else None,
            retries=Retries(attempts=1),
        )
    except OSError as error:
        flag = next(flag for flag, file in files.items() if str(file) == str(error.filename))
        raise ConfigError(f"{flag}: {error.filename}: {error.strerror}") from None
    with arrays:
        yield Client(arrays, service, protocol, flags)


def _token(file: Path | None) -> str:
    """Return the token or "". It is not a flag: other users of the machine can read a process's arguments."""
    if file is None:
        source, text = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE, "")
    else:
        source = f"--token-file: {file}"
        try:
            text = file.read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise ConfigError(f"{source}: {error.strerror}") from None
    token = text.strip()
    if re.fullmatch("[!-~]+", token) is None and (token or file is not None):
        raise ConfigError(f"{source}: expected a token, ASCII without spaces")
    return token


class Client:
    """Calls a server's methods; converts their errors to `CallError`. `arrays`: the client of numpy arrays."""

    def __init__(self, arrays: client.Client, service: str, protocol: str, flags: Mapping[str, Any]) -> None:
        self.arrays = arrays
        self._service = service
        self._protocol = protocol
        self._address = flags["address"]
        self._address_flag = flags["address_flag"]
        self._timeout = flags["timeout"]

    def call(self, method: str, request: Any, response: Any) -> Any:
        """Call a unary method and return its response, a message of class `response`."""
        with self.errors():
            return response.FromString(self.arrays.call(f"/{self._service}/{method}", request.SerializeToString()))

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise `CallError` for an error of a call."""
        try:
            yield
        except ServingError as error:
            code, text = error.code, str(error)
            if code is Code.UNAVAILABLE and "http1.x server" in text:
                raise NoServer(
                    f"{self._address} speaks HTTP/1.1, as a REST port does: expected the server's gRPC port in "
                    f"{self._address_flag}, which is {OPTIONS['grpc_port'].default} by default"
                ) from None
            if code is Code.UNAVAILABLE and re.search("failed to connect|resolving|DNS", text):
                raise NoServer(
                    f"no gRPC server answers at {self._address}: {text}; start one with `triglot serve`, or check "
                    f"{self._address_flag} and --tls"
                ) from None
            if code is Code.UNIMPLEMENTED:
                text = f"the server at {self._address} does not have this method of {self._protocol}: {text}"
            if code is Code.UNAUTHENTICATED:
                text = f"{text}; set {TOKEN_VARIABLE} or --token-file"
            if code is Code.DEADLINE_EXCEEDED:
                text = f"{text}; --timeout is {self._timeout:g} s"
            raise CallError(f"{text} ({code.name})", code.name) from None
