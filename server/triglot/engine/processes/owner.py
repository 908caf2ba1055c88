"""What the server's ends of a conversation have of the process they talk with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import Code, MissingDependency, ModelLoadError, Unavailable
from triglot.core.log_handlers import PLACE
from triglot.engine.processes.channel import Channel
from triglot.engine.processes.failures import error_of
from triglot.engine.processes.page import Page
from triglot.engine.processes.remote_call import members_of


class NotBegun(Exception):
    """The process had ended before the call reached it."""


class ModelFailure(Exception):
    """What a model's code has raised in its process; the trace there is its cause."""


class ModelTrace(Exception):
    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Owner(Protocol):
    """A process. `lost` says why it cannot be called any more."""

    name: str
    lost: str

    @property
    def channel(self) -> Channel:
        """Where it listens."""

    @property
    def page(self) -> Page:
        """What it looks at by itself."""

    def why_gone(self) -> str:
        """Why it hung up."""

    def kill(self, why: str) -> None:
        """End it at once."""


class Calls(Protocol):
    """The calls that a process runs."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def run_seconds(self) -> float:
        """For how long it runs the oldest, of a stream since its last answer was taken; 0 while it runs none."""

    def tell_cancelled(self) -> None:
        """Have the model see it when calls are cancelled. On any thread."""

    def close(self) -> None:
        """The process has ended: nothing more comes of it."""


def unavailable(owner: Owner) -> Unavailable:
    """The error of a call whose process is gone."""
    return Unavailable(f"{owner.name}: the process that ran the request {owner.lost}")


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


def mark_cancelled(page: Page, number: int, call: Call) -> None:
    """Say which of a call and its members, whose numbers follow, are cancelled."""
    if call.cancelled:
        page.cancel(number)
    for other, member in enumerate(members_of(call) or (), number + 1):
        if member.cancelled:
            page.cancel(other)
