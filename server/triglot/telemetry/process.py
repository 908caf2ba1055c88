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


class MachineUsage:
    """What everything on this machine uses. May be asked on any thread."""

    def __init__(self) -> None:
        self._times = psutil.cpu_times()

    def cpu_share(self) -> float:
        """From 0 to 1, since the last time this was asked."""
        before, self._times = self._times, psutil.cpu_times()
        # On Linux, a guest's time is its user's, too.
        counted = [name for name in before._fields if not name.startswith("guest")]
        passed = {name: getattr(self._times, name) - getattr(before, name) for name in counted}
        whole = sum(passed.values())
        idle = passed["idle"] + passed.get("iowait", 0.0)
        return min(1.0, max(0.0, 1 - idle / whole)) if whole > 0 else 0.0

    def memory_bytes(self) -> tuple[int, int]:
        """What is used, and what there is."""
        memory = psutil.virtual_memory()
        return memory.used, memory.total
