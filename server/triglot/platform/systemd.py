"""What systemd learns of a server that it has started, by the protocol of sd_notify(3).

Each notice is one datagram of lines NAME=VALUE to the socket in `NOTIFY_SOCKET`. Without this variable nothing is
sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

SEND_SECONDS = 1.0
"""Time limit for a notice: systemd reads at once, unless it hangs."""


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """The service manager at a datagram socket; "" if there is none.

    `watchdog_seconds`: interval within which it expects a heartbeat; 0 if it expects none.
    """

    address: str = ""
    watchdog_seconds: float = 0.0

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """Return the one that has started this process, and removes its variables.

        Otherwise processes of models, which inherit the environment, would notify it, too.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        interval, process = (environment.pop(name, "") for name in ("WATCHDOG_USEC", "WATCHDOG_PID"))
        expected = interval.isdecimal() and process in ("", str(os.getpid()))
        return cls(address, int(interval) / 1e6 if expected else 0.0)

    def ready(self) -> None:
        """Report that the server serves; also ends a reload."""
        self._notify("READY=1")

    def reloading(self) -> None:
        """Report that a reload begins."""
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """Report that the server stops."""
        self._notify("STOPPING=1")

    async def feed_watchdog(self) -> None:
        """Report twice per interval that the event loop runs, until cancelled."""
        while self.address and self.watchdog_seconds:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)

    def _notify(self, state: str) -> None:
        if not self.address:
            return
        # systemd writes the first character of an abstract address, which is NUL, as "@".
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_SECONDS)
                sender.sendto(state.encode(), address)
        except OSError as error:
            log.warning("cannot notify systemd of %s at %s: %s", state.partition("\n")[0], self.address, error)
