"""CPU and memory usage of this process and of the machine."""

from __future__ import annotations

import psutil


class ProcessUsage:
    """CPU and memory usage of this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()

    def cpu_percent(self) -> float:
        """CPU usage since the last call in percent; 100 is one core."""
        return self._process.cpu_percent()

    def memory_percent(self) -> float:
        """Resident memory in percent of the machine's memory."""
        return self._process.memory_percent()


class MachineUsage:
    """CPU and memory usage of the machine. Usable on any thread."""

    def __init__(self) -> None:
        self._times = psutil.cpu_times()

    def cpu_share(self) -> float:
        """Share of busy CPU time since the last call, from 0 to 1."""
        before, self._times = self._times, psutil.cpu_times()
        # On Linux, guest time is included in user time.
        counted = [name for name in before._fields if not name.startswith("guest")]
        passed = {name: getattr(self._times, name) - getattr(before, name) for name in counted}
        whole = sum(passed.values())
        idle = passed["idle"] + passed.get("iowait", 0.0)
        return min(1.0, max(0.0, 1 - idle / whole)) if whole > 0 else 0.0

    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of memory that are used, and in total."""
        memory = psutil.virtual_memory()
        return memory.used, memory.total
