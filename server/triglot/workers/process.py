"""A worker process, as the supervisor sees it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from triglot.dataplane.control import METRICS, TFSERVING_METRICS, Bound
from triglot.workers.channel import Answer, Channel, ChannelClosed
from triglot.workers.ports import Ports
from triglot.workers.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

_PROGRAM = """
import sys
sys.path[:] = {path!r}
spec, sys.argv[:] = sys.argv[1], ["triglot", *sys.argv[2:]]
from triglot.__main__ import run
run(spec)
"""
Snapshots = dict[str, Any]
"""A worker's last reports by name."""
KEPT = (METRICS, TFSERVING_METRICS)
"""The reports that are kept after a worker has ended."""
REPORT_SECONDS = 5.0
"""Limit on the time for a worker's report."""
ACKNOWLEDGE_SECONDS = 5.0
"""Limit on the time for a worker's acknowledgement."""


class Worker:
    """One worker process, from `start` to `has_ended`. Two have the same `number` while one replaces the other."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, channel: Channel, now: float) -> None:
        self.number = number
        self.started = now
        self.served = 0.0
        """When it began to serve, in the loop's time; 0.0: not yet."""
        self.serving = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.retiring = False
        self.is_retired = False
        """Whether its counters have been added to those of ended workers."""
        self.snapshots: Snapshots = {}
        self.status = 0
        self._killed = False
        self._process = process
        self._channel = channel
        self._running = asyncio.create_task(self._run())

    @classmethod
    async def start(
        cls,
        number: int,
        run: int,
        ports: Ports,
        sockets: Bound,
        tallies: int,
        arguments: Sequence[str],
        answer: Answer,
    ) -> Worker:
        """Start `triglot ARGUMENTS` as a worker; `answer` handles its requests. Raise `OSError`."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            channel = await Channel.open(ours, answer)
            program = _PROGRAM.format(path=[str(path) for path in sys.path])
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                program,
                WorkerSpec.of(number, run, ports, theirs, sockets, tallies).text(),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[
                    theirs.fileno(),
                    tallies,
                    *(listening.fileno() for listening in (*sockets.grpc, *sockets.rest)),
                ],
                # Signals of the terminal reach only the supervisor, which decides when workers end.
                start_new_session=True,
            )
        finally:
            theirs.close()
        return cls(number, process, channel, asyncio.get_running_loop().time())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    async def _run(self) -> None:
        taking = asyncio.create_task(self._channel.run())
        self.status = await self._process.wait()
        # Its last messages are still handled, its last reports above all.
        await taking
        self.has_ended.set()

    async def ask(self, what: str, argument: Any = None) -> Any:
        """See `Channel.ask`."""
        return await self._channel.ask(what, argument)

    async def report(self, name: str, arguments: Any) -> tuple[Any, bool]:
        """Return a report, and whether it is current.

        Otherwise it is the last one, or None if that is not kept.
        """
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                answer = await self._channel.ask("report", [name, arguments])
        except Exception as error:  # One worker must not prevent the report of the others.
            if not isinstance(error, ChannelClosed):
                log.warning("%s did not report its %s: %r", self, name, error)
            return self.snapshots.get(name), False
        if name in KEPT:
            self.snapshots[name] = answer
        return answer, True

    def kill(self) -> None:
        """Kill the process."""
        self._killed = True
        with suppress(ProcessLookupError):
            self._process.kill()

    def exit_reason(self) -> str:
        """Return a description of its end for the log."""
        if self.status >= 0:
            return f"exited with status {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = f"signal {-self.status}"
        unexpected = name == "SIGKILL" and not self._killed
        return f"was terminated by {name}{' (out of memory?)' if unexpected else ''}"


async def notify(worker: Worker, what: str) -> bool:
    """Send a request that a worker acknowledges at once.

    Return False if it does not respond, True if it has ended.
    """
    try:
        async with asyncio.timeout(ACKNOWLEDGE_SECONDS):
            await worker.ask(what)
    except ChannelClosed:
        pass
    except TimeoutError:
        log.warning("%s does not respond", worker)
        return False
    return True
