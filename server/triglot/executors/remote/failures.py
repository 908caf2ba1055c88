"""Encodes exceptions for the frames between process and server: a process survives whatever its model raises."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triglot.core.errors import (
    Code,
    MissingDependency,
    ModelLoadError,
    ServingError,
    cuda_loss,
    error_fields,
    error_of,
    is_serving_error,
    text_of,
)
from triglot.executors.hosted import ModelFailure
from triglot.telemetry.log_handlers import PLACE

MAX_TRACE = 64 * 1024
"""Longest traceback, and longest text of an exception, that reaches the server's log, in characters."""


def description(error: BaseException) -> str:
    """Return the exception's text, or a substitute if the exception's own code fails."""
    return text_of(error)[:MAX_TRACE]


def _trace(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))[-MAX_TRACE:]
    except BaseException:  # Exceptions in the chain of causes may have failing code of their own, too.
        return f"{type(error).__name__}: {description(error)}"


def _place(error: BaseException) -> str:
    """Return "file:line" of the frame that raised the exception; "" without a traceback."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    return f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}" if frames else ""


def failure_fields(error: BaseException) -> dict[str, Any]:
    """Encode an exception: a `ServingError` as by `error_fields`, any other with what the server's log needs.

    The field `lost` is the reason to kill the process, if the exception means that its CUDA context is lost.
    """
    lost = {"lost": f"lost CUDA ({why}) and was killed"} if (why := cuda_loss(error)) else {}
    if is_serving_error(error):
        return error_fields(error) | lost
    text, trace = description(error), _trace(error)
    return {"kind": type(error).__name__, "text": text, "trace": trace, "place": _place(error)} | lost


def load_failure_fields(error: BaseException, file: Path) -> dict[str, Any]:
    """Encode why the model of this file cannot be loaded, with the text of a server that loads it in-process."""
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
    """Return the exception that the model's own code, in `folder`, raised, with its traceback from there on.

    That is `error` or, since the texts of `ModelLoadError` and `ServingError` are complete, the first other one of
    their causes; None if there is none, or if its traceback has no frame in `folder`.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while isinstance(cause, ModelLoadError | ServingError):
        seen.add(id(cause))
        # Code may have created a cycle of causes.
        cause = None if id(cause.__cause__) in seen else cause.__cause__
    trace = None if cause is None else cause.__traceback__
    while trace is not None and not Path(trace.tb_frame.f_code.co_filename).is_relative_to(folder):
        trace = trace.tb_next
    return None if cause is None or trace is None else cause.with_traceback(trace)


# --- in the server ---


class ModelTrace(Exception):
    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def error_from(fields: Mapping[str, Any]) -> Exception:
    """Decode `failure_fields`: returns a `ModelFailure` named as the model's exception, or a `ServingError`."""
    return cause_from(fields) or error_of(fields)


def load_error(fields: Mapping[str, Any]) -> ModelLoadError:
    """Decode `load_failure_fields`."""
    kind = MissingDependency if fields["missing"] else ModelLoadError
    error = kind(fields["message"], Code(fields.get("code", Code.UNKNOWN)))
    error.__cause__ = cause_from(fields)
    return error


def cause_from(fields: Mapping[str, Any]) -> Exception | None:
    """Return a `ModelFailure` with the class name of the model's exception; None if that was a `ServingError`."""
    if "kind" not in fields:
        return None
    failure: Exception = type(fields["kind"], (ModelFailure,), {PLACE: fields["place"]})(fields["text"])
    failure.__cause__ = ModelTrace(fields["trace"])
    return failure
