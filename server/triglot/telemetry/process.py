"""What this process uses of the machine."""

from __future__ import annotations

import psutil


class ProcessUsage:
    """CPU since the last look, and memory."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()

    def cpu_percent(self) -> float:
        """100: one core, since the last time this was asked."""
        return self._process.cpu_percent()

    def memory_percent(self) -> float:
        """Resident memory, of the machine's."""
        return self._process.memory_percent()
