"""What both clients share: the protocols' methods, the settings of a connection, and errors of gRPC."""

from __future__ import annotations

import codecs
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict

from triglot.client import wire
from triglot.client.balancer import RETRIED, Balancer, Endpoint, Retries
from triglot.client.shared_memory import SharedMemory
from triglot.client.wire import NO_TARGETS, Inputs, Outputs, Parameters, Query, Targets
from triglot.config.variables import CLIENT_PREFIX, TOKEN_VARIABLE
from triglot.core.errors import Code, Internal, ServingError, Unavailable, error_of

if TYPE_CHECKING:
    import grpc

SECONDS: Final = 60.0
LONGEST: Final = 99_999_999.0
"""The largest number of seconds that a call's metadata can say."""
HEALTH: Final = "/grpc.health.v1.Health/Check"
REGISTER: Final = "/inference.GRPCInferenceService/SystemSharedMemoryRegister"
UNREGISTER: Final = "/inference.GRPCInferenceService/SystemSharedMemoryUnregister"
CONTROL_SECONDS: Final = 5.0
"""Limit of a call that is no inference."""
SEQUENCE: Final = "sequence_id"
Token = str | Callable[[], str]
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol's methods, as gRPC paths, with their messages."""

    infer: str
    request: Callable[[Query], bytes]
    outputs: Callable[[bytes], Outputs]
    stream: str = ""
    """"": it has none."""


PROTOCOLS: Final[Mapping[str, Protocol]] = {
    "kserve": Protocol(
        "/inference.GRPCInferenceService/ModelInfer",
        wire.kserve_request,
        wire.kserve_outputs,
        "/inference.GRPCInferenceService/ModelStreamInfer",
    ),
    "tensorflow_serving": Protocol(
        "/tensorflow.serving.PredictionService/Predict", wire.predict_request, wire.predict_outputs
    ),
}
CHANNEL: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # By default, equal channels share a connection.
    ("grpc.enable_retries", 0),  # The client's own go to other servers.
    ("grpc.enable_http_proxy", 0),
    # By gRPC's own, a server that was restarted is called again up to two minutes later.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.min_reconnect_backoff_ms", 5000),  # Against its name: the time limit of an attempt to connect.
)


@dataclass(frozen=True, slots=True)
class Tls:
    """How servers are verified, and the client's own certificate; PEM files.

    `ca`: the certificates to trust; None for those of gRPC. `certificate`, `key`: for servers that ask for them.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("expected a certificate and its key, or neither")

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC's credentials. Raise `OSError` for a file that cannot be read."""
        import grpc  # noqa: PLC0415 - nothing else here needs it.

        files = (self.ca, self.key, self.certificate)
        pems = (None if file is None else file.read_bytes().removeprefix(codecs.BOM_UTF8) for file in files)
        return grpc.ssl_channel_credentials(*pems)


class Options(TypedDict, total=False):
    """How a client calls.

    `protocol`: "kserve" or "tensorflow_serving". `timeout`: limit of a call in seconds, its attempts together.
    `token`: sent as `authorization: Bearer`, or a function that returns it, called for each call. `headers`: sent
    with each call. `tls`: how to verify servers; None: no TLS. `retries`: see `Retries`.
    """

    protocol: str
    timeout: float
    token: Token
    headers: Mapping[str, str] | None
    tls: Tls | None
    retries: Retries


class CallOptions(TypedDict, total=False):
    """What a call may say beside model and inputs: see `Query`."""

    version: int | str
    signature: str
    outputs: Sequence[str] | Mapping[str, Any]
    parameters: Parameters
    request_id: str
    timeout: float | None
    headers: Mapping[str, str] | None


class Outcome(NamedTuple):
    """What became of a call that was sent to a server: a response, or an error."""

    endpoint: Endpoint
    error: ServingError | None
    response: bytes = b""


@dataclass(slots=True)
class Sending:
    """A call while it is sent, to one server or several. `method`: its path."""

    method: str
    message: bytes
    metadata: Metadata
    deadline: float
    """In seconds of the monotonic clock."""
    sequence: int = 0
    """A number of its sequence, whose calls change a state: they go to one server, and once. 0: none."""
    targets: Targets = field(default_factory=dict)
    tried: list[Endpoint] = field(default_factory=list)
    registered_again: bool = False

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return min(max(0.0, self.deadline - time.monotonic()), LONGEST)


class Settings:
    """What both clients are made of: servers, protocol, limits."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        protocol: str = "kserve",
        timeout: float = SECONDS,
        token: Token = "",
        headers: Mapping[str, str] | None = None,
        tls: Tls | None = None,
        retries: Retries | None = None,
    ) -> None:
        addresses = [servers] if isinstance(servers, str) else list(servers)
        for address in addresses:
            if not address.strip() or ("://" in address and not address.startswith("unix:")):
                raise ValueError(f"expected HOST:PORT of a server's gRPC port, got {address!r}")
        if not addresses:
            raise ValueError("expected the address of at least one server, got none")
        if protocol not in PROTOCOLS:
            raise ValueError(f"protocol: expected {' or '.join(PROTOCOLS)}, got {protocol!r}")
        self.protocol = PROTOCOLS[protocol]
        self.retries = retries or Retries()
        self.balancer = Balancer([Endpoint(address) for address in addresses], self.retries)
        self.credentials = None if tls is None else tls.credentials()
        self._timeout = timeout
        self._token = token
        self._headers = _lower(headers)
        self._regions: dict[str, SharedMemory] = {}

    def sending(self, model: str, inputs: Inputs, options: CallOptions) -> Sending:
        """Return a call to send.

        Raise `TypeError` for what the protocol cannot express, `ValueError` as `metadata`, and for an output's
        array that is not in shared memory.
        """
        query = Query(model=model, inputs=inputs, regions=self.regions(), **options)
        message = self.protocol.request(query)
        sending = self.sending_of(self.protocol.infer, message, query.timeout, query.headers)
        if sequence := query.parameters.get(SEQUENCE):
            sending.sequence = zlib.crc32(str(sequence).encode()) or 1
        sending.targets = query.targets()
        return sending

    def sending_of(
        self, method: str, message: bytes, timeout: float | None, headers: Mapping[str, str] | None
    ) -> Sending:
        """Return a call to send; None for the client's own timeout. Raise `ValueError` for a wrong value."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        if math.isnan(deadline):
            raise ValueError("timeout: expected seconds, got NaN")
        return Sending(method, message, (*self.metadata(), *_lower(headers)), deadline)

    def streaming(self, model: str, inputs: Inputs, options: CallOptions) -> Sending:
        """Return a stream to send. Raise as `sending`, and `TypeError` if the protocol has none."""
        if not self.protocol.stream:
            raise TypeError("TensorFlow Serving has no streams: expected protocol kserve")
        sending = self.sending(model, inputs, options)
        if sending.targets:
            raise TypeError("a stream's responses would overwrite each other: expected outputs without arrays")
        sending.method = self.protocol.stream
        return sending

    def metadata(self) -> Metadata:
        """Return what is sent with each call. Raise `ValueError` for a token that HTTP cannot carry."""
        token = self._token if isinstance(self._token, str) else self._token()
        if not token:
            return self._headers
        if re.fullmatch("[!-~]+", token) is None:
            raise ValueError("token: expected ASCII without spaces")
        return (*self._headers, ("authorization", f"Bearer {token}"))

    def begin(self, sending: Sending) -> Endpoint:
        """Return the server for an attempt, which counts as in flight there until `end`."""
        if sending.sequence:
            endpoint = self.balancer.begin_at(sending.sequence, time.monotonic())
        else:
            endpoint = self.balancer.begin(time.monotonic(), sending.tried)
        sending.tried.append(endpoint)
        return endpoint

    def end(self, endpoint: Endpoint, error: ServingError | None) -> None:
        """Note the outcome of an attempt."""
        self.balancer.end(endpoint, error, time.monotonic())

    @contextmanager
    def attempt(self, sending: Sending) -> Iterator[Endpoint]:
        """Choose the server for a stream, which is in flight there within the block, and note its outcome."""
        endpoint = self.begin(sending)
        try:
            yield endpoint
        except ServingError as error:
            self.end(endpoint, error)
            raise
        except GeneratorExit:  # Its reader went, who had answers.
            self.end(endpoint, None)
            raise
        except BaseException:
            self.balancer.cancel(endpoint, time.monotonic(), slow=False)
            raise
        self.end(endpoint, None)

    def hedge_after(self, sending: Sending) -> float | None:
        """Return the seconds without an answer after which a call also goes to another server; None: never."""
        if sending.sequence or sending.targets or len(self.balancer.endpoints) == 1:
            return None  # Two servers would write to the same memory.
        return self.retries.hedge_after

    def attempts(self, sending: Sending) -> Generator[Endpoint | float | None, Outcome | None, bytes]:
        """Say what to do for a call, one step after the other, and return its response.

        A step is a server, to which the call is to be sent, or the longest time to wait for an outcome, in seconds
        (None: any); what is sent back then is an outcome, or None if there is none yet. Raise `ServingError`.
        Close it at the end of the call: what has no answer by then is not waited for.
        """
        hedge_after = self.hedge_after(sending)
        waiting = [self.begin(sending)]
        overtaken = None
        try:
            step: Endpoint | float | None = waiting[0]
            while True:
                outcome = yield step
                if outcome is not None:
                    if outcome.error is None and outcome.endpoint is not waiting[0]:
                        overtaken = waiting[0]
                    waiting.remove(outcome.endpoint)
                    self.end(outcome.endpoint, outcome.error)
                    if outcome.error is None:
                        return outcome.response
                    again = not waiting or outcome.error.code not in RETRIED
                    if again:
                        yield self._wait_after(outcome.error, sending)
                else:
                    again = step is hedge_after and self.balancer.may_hedge(time.monotonic(), sending.tried)
                if again:
                    step = self.begin(sending)
                    waiting.append(step)
                else:
                    step = hedge_after if len(waiting) == 1 else None
        finally:
            for endpoint in waiting:
                self.balancer.cancel(endpoint, time.monotonic(), slow=endpoint is overtaken)

    def _wait_after(self, error: ServingError, sending: Sending) -> float:
        """Return the seconds until the next attempt. Raise the error if there is none."""
        wait = self.balancer.wait(time.monotonic())
        if sending.sequence or wait >= sending.left() or not self.balancer.may_retry(error, len(sending.tried)):
            raise error
        return wait

    @contextmanager
    def region(self, size: int, prefix: str) -> Iterator[SharedMemory]:
        """Make a region for the arrays of calls within the block. Raise as `SharedMemory`, and `TypeError`."""
        if self.protocol is not PROTOCOLS["kserve"]:
            raise TypeError("TensorFlow Serving has no shared memory: expected protocol kserve")
        region = SharedMemory(size, prefix)
        self._regions[region.name] = region
        try:
            yield region
        finally:
            del self._regions[region.name]
            region.close()

    def regions(self) -> Collection[SharedMemory]:
        """Return the regions that calls may use now."""
        return tuple(self._regions.values()) if self._regions else ()

    def must_register(self, error: ServingError, sending: Sending) -> bool:
        """Whether a call, once, is to be sent again when the regions are registered: a server did not know one."""
        if sending.registered_again or not self._regions or "ble to find shared memory region" not in str(error):
            return False
        sending.registered_again = True
        return True


def _lower(headers: Mapping[str, str] | None) -> Metadata:
    """Return headers as metadata. Raise `ValueError` for what HTTP/2 cannot carry."""
    for name, value in (headers or {}).items():
        if re.fullmatch("[0-9A-Za-z_.-]+", name) is None:
            raise ValueError(f"headers: expected names of ASCII letters, digits, '-', '_' and '.', got {name!r}")
        if not name.lower().endswith("-bin") and re.fullmatch("[ -~]*", value) is None:
            raise ValueError(f"headers: expected printable ASCII, got another character in the value of {name}")
    return tuple((name.lower(), value) for name, value in (headers or {}).items())


def from_environment() -> tuple[list[str], Options]:
    """Return the servers and options that environment variables give.

    TRIGLOT_CLIENT_SERVERS (addresses with commas), TRIGLOT_CLIENT_PROTOCOL, TRIGLOT_CLIENT_TIMEOUT in seconds,
    TRIGLOT_CLIENT_TLS_CA, TRIGLOT_CLIENT_TLS_CERTIFICATE and TRIGLOT_CLIENT_TLS_KEY (PEM files), TRIGLOT_TOKEN.
    Raise `ValueError` for one that is wrong or unknown.
    """
    found = {
        name.removeprefix(CLIENT_PREFIX): text
        for name, text in os.environ.items()
        if name.startswith(CLIENT_PREFIX)
    }
    servers = [address.strip() for address in found.pop("SERVERS", "").split(",") if address.strip()]
    if not servers:
        raise ValueError(f"{CLIENT_PREFIX}SERVERS: expected addresses of gRPC servers, such as 127.0.0.1:8001")
    options: Options = {"token": os.environ.get(TOKEN_VARIABLE, "")}
    if text := found.pop("TIMEOUT", ""):
        try:
            options["timeout"] = float(text)
        except ValueError:
            raise ValueError(f"{CLIENT_PREFIX}TIMEOUT: expected seconds, got {text!r}") from None
    if text := found.pop("PROTOCOL", ""):
        options["protocol"] = text
    paths = (found.pop(name, "") for name in ("TLS_CA", "TLS_CERTIFICATE", "TLS_KEY"))
    files = [Path(path) if path else None for path in paths]
    if any(files):
        options["tls"] = Tls(*files)
    if found:
        raise ValueError(f"unknown variable {CLIENT_PREFIX}{next(iter(found))}")
    return servers, options


def serving_error(error: grpc.RpcError) -> ServingError:
    """Return the `ServingError` for an error of gRPC, with when the server wants to be called again."""
    code = Code(error.code().value[0])
    pushback = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms", "")
    seconds = None
    if pushback:
        # Whatever is no number means, as to gRPC's own clients, that it is not to be tried again.
        seconds = int(pushback) / 1000 if re.fullmatch("[0-9]{1,9}", pushback) else -1.0
    return error_of({"code": code, "message": error.details() or code.name, "retry_after": seconds})


def is_absent(error: ServingError) -> bool:
    """Whether an answer to a question of health says that no server is ready there."""
    return error.code in (Code.NOT_FOUND, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)


def is_answer(code: grpc.StatusCode) -> bool:
    """Whether a health check had an answer; a server without gRPC's health protocol answers, too."""
    return code.name not in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def no_answer(endpoint: Endpoint) -> ServingError:
    """Return the error of a call to a server that does not answer health checks."""
    return Unavailable(f"{endpoint.address} answered neither the call nor a health check")


def registration_error(error: ServingError, endpoint: Endpoint) -> ServingError | None:
    """Return the error to raise for one of a registration; None for a server that has the region, or is absent."""
    if is_absent(error) or error.code is Code.ALREADY_EXISTS:
        return None
    text = f"{endpoint.address}: {error}"
    if "open shared memory" in text:
        text += "; expected a server of this machine and user, with the same /dev/shm"
    return error_of({"code": error.code, "message": text, "retry_after": None})


def outputs_of(read: Callable[..., Outputs], message: bytes, targets: Targets = NO_TARGETS) -> Outputs:
    """Return a response's arrays. Raise `ServingError` for a message that cannot be read."""
    try:
        return read(message, targets) if targets else read(message)
    except wire.StreamError as error:
        raise ServingError(str(error)) from None
    except Exception as error:  # Fields of another message may be of any kind.
        raise Internal(f"the response cannot be read: {error}") from error
