"""A gRPC client for the commands that call a running server."""

from __future__ import annotations

import argparse
import codecs
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triglot.config.options import GRPC_ADDRESS, OPTIONS, ConfigError
from triglot.config.variables import TOKEN_VARIABLE

if TYPE_CHECKING:
    import grpc


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
    with _channel(flags) as channel:
        yield Client(channel, service, protocol, flags, token)


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


@contextmanager
def _channel(flags: Mapping[str, Any]) -> Iterator[grpc.Channel]:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # Errors have the same information.
    import grpc  # noqa: PLC0415 - other commands do not need it.

    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
    ]
    ca, certificate, key = flags["tls_ca"], flags["tls_certificate"], flags["tls_key"]
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-certificate and --tls-key: expected both, or neither")
    if flags["tls"] or ca is not None or certificate is not None:
        credentials = grpc.ssl_channel_credentials(
            _read("--tls-ca", ca), _read("--tls-key", key), _read("--tls-certificate", certificate)
        )
        channel = grpc.secure_channel(flags["address"], credentials, options)
    else:
        channel = grpc.insecure_channel(flags["address"], options)
    with channel:
        yield channel


def _read(flag: str, file: Path | None) -> bytes | None:
    try:
        return None if file is None else file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ConfigError(f"{flag}: {file}: {error.strerror}") from None


class Client:
    """Calls a server's methods; converts their errors to `CallError`."""

    def __init__(
        self, channel: grpc.Channel, service: str, protocol: str, flags: Mapping[str, Any], token: str
    ) -> None:
        self._channel = channel
        self._service = service
        self._protocol = protocol
        self._address = flags["address"]
        self._address_flag = flags["address_flag"]
        self._timeout = flags["timeout"] or None
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def call(self, method: str, request: Any, response: Any) -> Any:
        """Call a unary method and return its response, a message of class `response`."""
        rpc = self._channel.unary_unary(
            f"/{self._service}/{method}", type(request).SerializeToString, response.FromString
        )
        with self._errors():
            return rpc(request, timeout=self._timeout, metadata=self._metadata)

    def stream(self, method: str, request: Any, response: Any) -> Iterator[Any]:
        """Yield the responses to one request, messages of class `response`."""
        rpc = self._channel.stream_stream(
            f"/{self._service}/{method}", type(request).SerializeToString, response.FromString
        )
        with self._errors():
            yield from rpc(iter([request]), timeout=self._timeout, metadata=self._metadata)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import grpc  # noqa: PLC0415

        try:
            yield
        except grpc.RpcError as error:
            code, text = error.code(), error.details() or ""
            if code is grpc.StatusCode.UNAVAILABLE and "http1.x server" in text:
                raise NoServer(
                    f"{self._address} speaks HTTP/1.1, as a REST port does: expected the server's gRPC port in "
                    f"{self._address_flag}, which is {OPTIONS['grpc_port'].default} by default"
                ) from None
            if code is grpc.StatusCode.UNAVAILABLE and re.search("failed to connect|resolving|DNS", text):
                raise NoServer(
                    f"no gRPC server answers at {self._address}: {text}; start one with `triglot serve`, or check "
                    f"{self._address_flag} and --tls"
                ) from None
            if code is grpc.StatusCode.UNIMPLEMENTED:
                text = f"the server at {self._address} does not have this method of {self._protocol}: {text}"
            if code is grpc.StatusCode.UNAUTHENTICATED:
                text = f"{text}; set {TOKEN_VARIABLE} or --token-file"
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                text = f"{text}; --timeout is {self._timeout:g} s"
            raise CallError(f"{text} ({code.name})", code.name) from None
