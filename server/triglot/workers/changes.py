"""Makes a change that a client requests from one worker in all of them.

Strategy: the called worker goes first. If it rejects the change, no other worker is asked: so an invalid value,
or a model whose code ends the process, does no harm elsewhere. Then all others make the change, and the client
is answered once they have. If some fail, a model that was not served before is unloaded again; after any other
change, the workers that failed are replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakValueDictionary

from triglot.core.errors import Code, DeadlineExceeded, Internal, ServingError
from triglot.dataplane.control import LOAD_MODEL, RELOAD, UNLOAD_MODEL, Arguments
from triglot.workers.channel import ChannelClosed
from triglot.workers.record import Change, Key, Record, key_of

log = logging.getLogger(__name__)

CHANGE_SECONDS = 60.0
"""Limit on the time for a change; for loading models, it is added to the time limit of that."""
TAKES_EFFECT = {LOAD_MODEL: Code.INVALID_ARGUMENT, RELOAD: Code.UNKNOWN}
"""Errors after which the change still takes effect: a model is to be served that cannot be loaded."""


class Member(Protocol):
    """A worker that makes changes."""

    number: int

    async def ask(self, what: str, argument: Any = None) -> Any:
        """See `Channel.ask`."""


class Changes:
    """Makes changes in all workers, one at a time per subject; calls `replace` with a worker that failed to make
    one.

    `load_timeout`: limit on the seconds for loading a model; 0: none.
    """

    def __init__(self, replace: Callable[[Any], None], load_timeout: float) -> None:
        self.record = Record()
        self._replace = replace
        self._load_seconds = CHANGE_SECONDS + load_timeout if load_timeout else None
        self._members: list[Member] = []
        # Weak, because keys include model names, of which there is no limit: a change holds its lock.
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    def join(self, member: Member, revision: int) -> list[Change]:
        """Return the changes since a revision.

        If there are none, the worker takes part in all further changes.
        """
        missed = self.record.after(revision)
        if not missed and member not in self._members:
            self._members.append(member)
        return missed

    def leave(self, member: Member) -> None:
        """Exclude a worker from further changes."""
        if member in self._members:
            self._members.remove(member)

    async def make(self, origin: Member, name: str, arguments: Arguments) -> None:
        """Make a change in all workers. Raise `ServingError`."""
        async with self._locks.setdefault(key_of(name, arguments), asyncio.Lock()):
            await self._make(origin, name, arguments)

    async def _make(self, origin: Member, name: str, arguments: Arguments) -> None:
        results = {origin: await self._ask(origin, name, arguments)}
        first = results[origin]
        if isinstance(first, ChannelClosed):
            raise Internal(f"worker {origin.number} exited during the change; the other workers are unchanged")
        if isinstance(first, ServingError) and TAKES_EFFECT.get(name) is not first.code:
            raise first
        # Workers that joined meanwhile make the change too.
        while missing := [member for member in self._members if member not in results]:
            answers = await asyncio.gather(*(self._ask(member, name, arguments) for member in missing))
            results.update(zip(missing, answers, strict=True))
        failed = {member: error for member, error in results.items() if isinstance(error, ServingError)}
        done = {member: known for member, known in results.items() if not isinstance(known, Exception)}
        if not failed:
            # No worker needs to know of an unload of what none had; of such names there is no limit.
            if name != UNLOAD_MODEL or any(done.values()):
                self.record.note(name, arguments)
            return
        if not done:
            if name == RELOAD:
                self.record.note(name, arguments, succeeded=False)
            raise next(iter(failed.values()))
        await self._settle(name, arguments, failed, done)

    async def _settle(
        self, name: str, arguments: Arguments, failed: dict[Member, ServingError], done: dict[Member, Any]
    ) -> None:
        """Handle a change that some workers have made, and others have not: undo it, or replace the latter."""
        if name == LOAD_MODEL and not any(done.values()):
            undo = {"name": arguments["name"], "dependents": False}
            await asyncio.gather(*(self._ask(member, UNLOAD_MODEL, undo) for member in (*done, *failed)))
        else:
            self.record.note(name, arguments)
            for member in failed:
                self._replace(member)
        member, error = next(iter(failed.items()))
        log.error("%s: worker %d could not make the change: %s", name, member.number, error.message)
        raise ServingError(f"worker {member.number}: {error.message}", code=error.code)

    async def _ask(self, member: Member, name: str, arguments: Arguments) -> Any:
        """Return a worker's result, or the error."""
        seconds = self._load_seconds if name in TAKES_EFFECT else CHANGE_SECONDS
        try:
            async with asyncio.timeout(seconds):
                return await member.ask("act", [name, dict(arguments)])
        except TimeoutError:
            return DeadlineExceeded(f"the change did not finish within {seconds} s")
        except (ChannelClosed, ServingError) as error:
            return error


def models_changed(changes: Iterable[Change]) -> set[str]:
    """Return the models that were loaded or unloaded individually."""
    return {change.arguments["name"] for change in changes if change.name in (LOAD_MODEL, UNLOAD_MODEL)}
