"""The one error tree, with gRPC's status numbers; only a transport turns them into its own terms."""

from __future__ import annotations

import enum
import logging
import uuid
from typing import TypeGuard, TypeVar

log = logging.getLogger(__name__)
E = TypeVar("E", bound=BaseException)

MAX_MESSAGE = 4096
"""Characters of a text that reach a client."""
RETRY_AFTER_SECONDS = 1.0
"""When to come again, where a request that comes too many is told so."""


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
    """An error with a text that the client may read.

    `code` is the class's own unless another is given. `retry_after` (seconds) tells the client when the same
    call has a chance again.
    """

    code: Code = Code.UNKNOWN
    is_refusal = False
    """Whether it says that the client may not make the call."""

    def __init__(self, message: str, *, code: Code | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        # A text may quote what a client or a model wrote, at any length; every protocol sends UTF-8.
        self.message = message[:MAX_MESSAGE].encode(errors="replace").decode()
        self.retry_after = retry_after


class InvalidArgument(ServingError):
    """The request contradicts the protocol or the model's signature."""

    code = Code.INVALID_ARGUMENT


class NotFound(ServingError):
    """Something that the request names does not exist."""

    code = Code.NOT_FOUND


class ModelNotFound(NotFound):
    """No such model or version is known."""


class Unauthenticated(ServingError):
    """The client has not said who it is, or in vain."""

    code = Code.UNAUTHENTICATED
    is_refusal = True


class PermissionDenied(ServingError):
    """The call is right, and not for this client to make."""

    code = Code.PERMISSION_DENIED
    is_refusal = True


class FailedPrecondition(ServingError):
    """The call is right, the state of the server is not."""

    code = Code.FAILED_PRECONDITION


class PayloadTooLarge(ServingError):
    """The message is larger than the server takes."""

    code = Code.RESOURCE_EXHAUSTED


class QueueFull(ServingError):
    """A bound on the requests that wait, or on their bytes, is reached: the model's or the server's."""

    code = Code.RESOURCE_EXHAUSTED


class QuotaExceeded(QueueFull):
    """The client makes more calls than it may."""

    is_refusal = True


def queue_full(what: str) -> QueueFull:
    """The error of a request that comes too many; `what` there is already."""
    return QueueFull(f"Exceeds maximum queue size: {what}", retry_after=RETRY_AFTER_SECONDS)


class Unimplemented(ServingError):
    """The server, or this model, does not offer the call."""

    code = Code.UNIMPLEMENTED


class Internal(ServingError):
    """The server or the model failed."""

    code = Code.INTERNAL


class Unavailable(ServingError):
    """Not now: loading, unloading or shutting down. The call is safe to repeat."""

    code = Code.UNAVAILABLE


class RestrictedCall(Unavailable):
    """The call lacks the header that a group of Triton's needs; this is what Triton answers over gRPC."""

    is_refusal = True


class DeadlineExceeded(ServingError):
    """The call's deadline passed while it waited or ran, or it waited longer than its queue's policy lets it."""

    code = Code.DEADLINE_EXCEEDED


class Cancelled(ServingError):
    """The caller went away."""

    code = Code.CANCELLED


class ModelLoadError(Exception):
    """A model cannot be loaded; the text says which file and why, `code` what kind of failure it is."""

    def __init__(self, message: str, code: Code = Code.UNKNOWN) -> None:
        super().__init__(message)
        self.code = code


class NeedsProcess(ModelLoadError):
    """The model's class says that its instances are processes, which load it themselves."""


class MissingDependency(ModelLoadError):
    """The library of a backend is not installed; the text names the `pip install` to run."""


def own_copy(error: ServingError) -> ServingError:
    """Another error that says the same, without the frames that this one came through.

    An exception belongs to one call: it collects the frames that it comes through, and its text is completed.
    """
    # Not the class's own `__new__`, which may ask for other arguments.
    copy = Exception.__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def without_frames(error: E) -> E:
    """The error itself, to be kept: its frames hold the request, and maybe what keeps the error."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def text_of(error: BaseException) -> str:
    """`str(error)`, or why there is none: the class may have code of its own for it."""
    try:
        return str(error)
    except BaseException as failure:
        return f"<its __str__ has raised {type(failure).__name__}>"


def is_serving_error(error: BaseException) -> TypeGuard[ServingError]:
    """Whether a client can be told it as it is: a model's own class may lack a text, or a failure's code."""
    if not isinstance(error, ServingError):
        return False
    try:
        code, text, hint = (getattr(error, name, None) for name in ("code", "message", "retry_after"))
    except Exception:  # The class has code of its own for them.
        return False
    is_failure = isinstance(code, Code) and code is not Code.OK
    return is_failure and isinstance(text, str) and (hint is None or _is_finite(hint))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")


def outcome(error: BaseException) -> Code:
    """The code that a client is told of an exception."""
    if is_serving_error(error):
        return error.code
    return Code.INTERNAL if isinstance(error, Exception) else Code.CANCELLED


def refusal_of(error: BaseException) -> str:
    """The text of a refusal; "" for other errors."""
    return error.message if isinstance(error, ServingError) and error.is_refusal else ""


def as_serving_error(error: BaseException, what: str) -> ServingError:
    """What a client is told of an exception: our own as they are, any other as INTERNAL with an id.

    The trace of the latter goes to the log under that id and never to the client.
    """
    if is_serving_error(error):
        return error
    number = uuid.uuid4().hex[:12]
    log.error("%s failed, error %s", what, number, exc_info=error)
    return Internal(f"{what} failed, error {number}; the server's log has the details")
