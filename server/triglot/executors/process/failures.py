"""Exceptions on their way between a process and the server: whatever a model raises, its process goes on."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triglot.core.cuda_errors import cuda_loss
from triglot.core.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MissingDependency,
    ModelLoadError,
    NotFound,
    ServingError,
    Unavailable,
    Unimplemented,
    is_serving_error,
    text_of,
)
from triglot.telemetry.log_handlers import PLACE

MAX_TRACE = 64 * 1024
"""Characters of a trace that reach the server's log."""
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


def description(error: BaseException) -> str:
    """What it says; its own code may fail to."""
    return text_of(error)[:MAX_TRACE]


def _trace(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))[-MAX_TRACE:]
    except BaseException:  # The chain of causes has code of its own, too.
        return f"{type(error).__name__}: {description(error)}"


def _place(error: BaseException) -> str:
    """The file and the line that have raised it."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    return f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}" if frames else ""


def error_fields(error: ServingError) -> dict[str, Any]:
    """An error that a client may read, to be handed over."""
    return {"code": int(error.code), "message": error.message, "retry_after": error.retry_after}


def error_of(fields: Mapping[str, Any]) -> ServingError:
    """The error again, of the class that its code usually has."""
    code = Code(fields["code"])
    return _CLASSES.get(code, ServingError)(fields["message"], code=code, retry_after=fields["retry_after"])


def failure_fields(error: BaseException) -> dict[str, Any]:
    """An exception: one of ours as it is, of any other what the server's log is to say; `lost`: it is the
    process's last one, and why."""
    lost = {"lost": f"lost CUDA ({why}) and was killed"} if (why := cuda_loss(error)) else {}
    if is_serving_error(error):
        return error_fields(error) | lost
    text, trace = description(error), _trace(error)
    return {"kind": type(error).__name__, "text": text, "trace": trace, "place": _place(error)} | lost


def load_failure_fields(error: BaseException, file: Path) -> dict[str, Any]:
    """Why the model of this file cannot be loaded, in the words of a server that loads it itself."""
    text = description(error)
    if not isinstance(error, ModelLoadError):
        text = f"{file}: {type(error).__name__}: {text}"
    fields = {"message": text, "missing": isinstance(error, MissingDependency)}
    code = getattr(error, "code", None)
    if isinstance(error, ModelLoadError) and isinstance(code, Code):
        fields["code"] = int(code)
    cause = _own_error(error, file.parent)
    return fields if cause is None else fields | failure_fields(cause)


def _own_error(error: BaseException, folder: Path) -> BaseException | None:
    """What the model's own code has raised, and did not word for us: its trace from there on."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while isinstance(cause, ModelLoadError | ServingError):
        seen.add(id(cause))
        # Code may have made these go round in circles.
        cause = None if id(cause.__cause__) in seen else cause.__cause__
    trace = None if cause is None else cause.__traceback__
    while trace is not None and not Path(trace.tb_frame.f_code.co_filename).is_relative_to(folder):
        trace = trace.tb_next
    return None if cause is None or trace is None else cause.with_traceback(trace)


# --- in the server ---


class ModelFailure(Exception):
    """What a model's code has raised in its process; the trace there is its cause."""


class ModelTrace(Exception):
    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def error_from(fields: Mapping[str, Any]) -> Exception:
    """What the model's code has raised, by its own name, or the error for the client."""
    return cause_from(fields) or error_of(fields)


def load_error(fields: Mapping[str, Any]) -> ModelLoadError:
    """Why the process cannot load its model."""
    kind = MissingDependency if fields["missing"] else ModelLoadError
    error = kind(fields["message"], Code(fields.get("code", Code.UNKNOWN)))
    error.__cause__ = cause_from(fields)
    return error


def cause_from(fields: Mapping[str, Any]) -> Exception | None:
    """What the model's code has raised, by its own name; None where that was an error for the client."""
    if "kind" not in fields:
        return None
    failure: Exception = type(fields["kind"], (ModelFailure,), {PLACE: fields["place"]})(fields["text"])
    failure.__cause__ = ModelTrace(fields["trace"])
    return failure
