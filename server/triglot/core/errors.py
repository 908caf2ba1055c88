"""The error tree, with gRPC's status codes; only transports map them to their own statuses."""

from __future__ import annotations

import enum
import logging
import math
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

log = logging.getLogger(__name__)
E = TypeVar("E", bound=BaseException)

MAX_MESSAGE = 4096
"""Longest error text sent to a client, in characters."""
MAX_RETRY_AFTER = 1e6
"""Longest hint in seconds: clients read its milliseconds into 32 bits."""
RETRY_AFTER_SECONDS = 1.0
"""When to retry a request that was rejected because a limit was reached."""


class Code(enum.IntEnum):
    """gRPC's canonical status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class ServingError(Exception):
    """An error with a text that is safe to send to the client.

    `code` is the class's unless another is given. `retry_after` is the time in seconds after which a retry may
    succeed; 0 or less: unknown.
    """

    code: Code = Code.UNKNOWN
    is_refusal = False
    """Whether the client was refused the call: authentication, permissions or quotas."""

    def __init__(self, message: str, *, code: Code | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        # The text may quote input of any length from a client or a model; every protocol sends UTF-8.
        self.message = message[:MAX_MESSAGE].encode(errors="replace").decode()
        self.retry_after = retry_after


class ModelNotLoaded(Exception):
    """A model is on disk only: `loading` returns a context manager that loads and keeps it (see `model_loading`).

    No `ServingError`, which code on the way would map; where nothing loads the model, it is the `error`.
    """

    def __init__(self, name: str, error: ServingError, loading: Callable[[], Any]) -> None:
        super().__init__(f"model '{name}' is not loaded")
        self.name = name
        self.error = error
        self.loading = loading


class InvalidArgument(ServingError):
    """The request contradicts the protocol or the model's signature."""

    code = Code.INVALID_ARGUMENT


class NotFound(ServingError):
    """Something that the request names does not exist."""

    code = Code.NOT_FOUND


class ModelNotFound(NotFound):
    """No such model or version is known."""


class Unauthenticated(ServingError):
    """The client sent no credentials, or invalid ones."""

    code = Code.UNAUTHENTICATED
    is_refusal = True


class PermissionDenied(ServingError):
    """The client may not make this call."""

    code = Code.PERMISSION_DENIED
    is_refusal = True


class FailedPrecondition(ServingError):
    """The call is valid, but the server is not in the state that it requires."""

    code = Code.FAILED_PRECONDITION


class PayloadTooLarge(ServingError):
    """The message exceeds the server's size limit."""

    code = Code.RESOURCE_EXHAUSTED


class QueueFull(ServingError):
    """A limit on queued requests, or on their bytes, is reached: the model's or the server's."""

    code = Code.RESOURCE_EXHAUSTED


class QuotaExceeded(QueueFull):
    """The client exceeded its own limit on calls."""

    is_refusal = True


class UnreadResponses(ServingError):
    """The client does not read the responses, and more of them would exceed what is kept for it."""

    code = Code.RESOURCE_EXHAUSTED


def queue_full(what: str) -> QueueFull:
    """Return the error for a request beyond a limit; `what` describes the requests that fill it."""
    return QueueFull(f"Exceeds maximum queue size: {what}", retry_after=RETRY_AFTER_SECONDS)


class Unimplemented(ServingError):
    """The server or the model does not support the call."""

    code = Code.UNIMPLEMENTED


class Internal(ServingError):
    """The server or the model failed."""

    code = Code.INTERNAL


class Unavailable(ServingError):
    """Temporarily unavailable: loading, unloading or shutting down. The call is safe to repeat."""

    code = Code.UNAVAILABLE


class RestrictedCall(Unavailable):
    """The call lacks the header that its restricted group requires; Triton returns this status over gRPC."""

    is_refusal = True


class DeadlineExceeded(ServingError):
    """The deadline passed while the call was queued or running, or its queue timeout expired."""

    code = Code.DEADLINE_EXCEEDED


class Cancelled(ServingError):
    """The client cancelled the call or disconnected."""

    code = Code.CANCELLED


class ModelLoadError(Exception):
    """A model cannot be loaded; the text names the file and the reason, `code` the kind of failure."""

    def __init__(self, message: str, code: Code = Code.UNKNOWN) -> None:
        super().__init__(message)
        self.code = code


class NeedsProcess(ModelLoadError):
    """The model's class requires instances in processes of their own, or actors, which load it themselves.

    `execution` is the class's attribute, and so is `ray` if that is "ray"; else None.
    """

    def __init__(self, message: str, execution: str, ray: Any) -> None:
        super().__init__(message)
        self.execution = execution
        self.ray = ray


class MissingDependency(ModelLoadError):
    """The library of a backend is not installed; the text names the `pip install` to run."""


def own_copy(error: ServingError) -> ServingError:
    """Return an equal error without a traceback.

    An exception belongs to one call: it collects the frames that it passes, and its text is completed on the way.
    """
    # Not the class's own `__new__`, which may require other arguments.
    copy = Exception.__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def without_frames(error: E) -> E:
    """Drop an error's traceback and context, to keep it: frames keep the request, or the error's owner, alive."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or a substitute if the class's own `__str__` raises."""
    try:
        return str(error)
    except BaseException as failure:
        return f"<its __str__ has raised {type(failure).__name__}>"


def is_serving_error(error: BaseException) -> TypeGuard[ServingError]:
    """Whether an error can be sent as it is: a model's own class may lack a text, or a failure's code."""
    if not isinstance(error, ServingError):
        return False
    try:
        code, text, hint = (getattr(error, name, None) for name in ("code", "message", "retry_after"))
    except Exception:  # The class defines them in code of its own.
        return False
    is_failure = isinstance(code, Code) and code is not Code.OK
    return is_failure and isinstance(text, str) and (hint is None or _is_finite(hint))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")


def retry_hint(error: ServingError, per_second: int) -> int | None:
    """Return after how long a retry may succeed, rounded up; None for an error without a hint.

    `per_second`: how many of its units are a second. Never 0: on "0" gRPC's C core gives up in place of a retry.
    """
    if error.retry_after is None or error.retry_after <= 0:
        return None
    return max(1, math.ceil(round(min(error.retry_after, MAX_RETRY_AFTER) * per_second, 6)))


def outcome(error: BaseException) -> Code:
    """Return the status code that a client gets for an exception."""
    if is_serving_error(error):
        return error.code
    return Code.INTERNAL if isinstance(error, Exception) else Code.CANCELLED


def refusal_of(error: BaseException) -> str:
    """Return the text of a refusal (`is_refusal`), "" for other errors."""
    return error.message if isinstance(error, ServingError) and error.is_refusal else ""


def as_serving_error(error: BaseException, what: str) -> ServingError:
    """Return what a client gets for an exception: a `ServingError` as it is, any other as INTERNAL with an id.

    The traceback of the latter is logged with that id and never sent.
    """
    if is_serving_error(error):
        return error
    if isinstance(error, ModelNotLoaded):
        return error.error
    number = uuid.uuid4().hex[:12]
    log.error("%s failed, error %s", what, number, exc_info=error)
    return Internal(f"{what} failed, error {number}; the server's log has the details")


_LOST = re.compile(
    r"^(?:[\w.]+: )?(?:CUDA error|cudaError\w+|CUDA_ERROR_\w+): ("
    r"device-side assert triggered|an illegal memory access was encountered|"
    r"an illegal instruction was encountered|misaligned address|invalid program counter|"
    r"operation not supported on global/shared address space|"
    r"hardware stack error|unspecified launch failure|the launch timed out and was terminated|"
    r"uncorrectable ECC error encountered|uncorrectable NVLink error detected during the execution)",
    re.MULTILINE,
)
"""The texts of `cudaGetErrorString` for sticky errors, which every later CUDA call returns as well."""


def cuda_loss(error: BaseException | None) -> str:
    """Return the CUDA error by which the process lost its GPUs, from an error or its causes; "" if it did not."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if found := _LOST.search(text_of(error)):
            return found[1]
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return ""


# --- errors between processes ---

_CLASSES: Mapping[Code, type[ServingError]] = {
    kind.code: kind
    for kind in (
        Cancelled,
        DeadlineExceeded,
        FailedPrecondition,
        Internal,
        InvalidArgument,
        NotFound,
        Unavailable,
        Unimplemented,
    )
}


def error_fields(error: ServingError) -> dict[str, Any]:
    """Encode an error whose text is safe for clients."""
    return {"code": int(error.code), "message": error.message, "retry_after": error.retry_after}


def error_of(fields: Mapping[str, Any]) -> ServingError:
    """Decode `error_fields`; returns an error of the class that usually has its code."""
    code = Code(fields["code"])
    return _CLASSES.get(code, ServingError)(fields["message"], code=code, retry_after=fields["retry_after"])
