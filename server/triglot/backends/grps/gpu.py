"""GPU metrics and memory limits of a grps project (grps 5.1, 7).

All of this is optional. If a library, a driver or a device is missing, a warning is logged, and the project runs.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from triglot.backends.grps.server_settings import GpuSettings
from triglot.telemetry.monitor import Monitor

log = logging.getLogger(__name__)

MIB = 1 << 20
SAMPLE_SECONDS = 1.0
"""Interval between samples of the GPUs."""


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """A sample of a device: its utilization in the last second in percent, and MiB in use; None if unavailable."""

    device: int
    usage: float | None
    used_mib: float | None


Reader = Callable[[], Sequence[GpuLoad]]


def visible_devices(devices: Sequence[int], environment: Mapping[str, str]) -> dict[int, int | str]:
    """Return the GPU of each device number: its index or UUID, from CUDA_VISIBLE_DEVICES if that is set.

    Numbers that are not in there are omitted.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {device: device for device in devices}
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return {
        device: int(names[device]) if names[device].isdecimal() else names[device]
        for device in devices
        if device < len(names)
    }


def nvml_reader(devices: Sequence[int], environment: Mapping[str, str]) -> Reader | None:
    """Return a reader of the devices' load through NVML; None, after a warning, without NVML or a driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        log.warning("gpu.devices: no GPU metrics: pynvml is not installed; run: pip install nvidia-ml-py")
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.warning("gpu.devices: no GPU metrics: cannot reach the NVIDIA driver: %s", error)
        return None
    handles = _handles(nvml, devices, visible_devices(devices, environment))

    def read() -> list[GpuLoad]:
        return [_load(nvml, device, handle) for device, handle in handles.items()]

    return read


def _handles(nvml: Any, devices: Sequence[int], gpus: Mapping[int, int | str]) -> dict[int, Any]:
    handles = {}
    for device in devices:
        if device not in gpus:
            log.warning("gpu.devices: device %d is not in CUDA_VISIBLE_DEVICES", device)
            continue
        gpu = gpus[device]
        find = nvml.nvmlDeviceGetHandleByIndex if isinstance(gpu, int) else nvml.nvmlDeviceGetHandleByUUID
        try:
            handles[device] = find(gpu)
        except nvml.NVMLError as error:
            log.warning("gpu.devices: cannot find GPU %s of device %d: %s", gpu, device, error)
    return handles


def _load(nvml: Any, device: int, handle: Any) -> GpuLoad:
    usage = used = None
    try:
        usage = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        pass  # A GPU partition (MIG) does not report its utilization.
    try:
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB
    except nvml.NVMLError:
        pass  # Temporarily unavailable; the next sample follows in a second.
    return GpuLoad(device, usage, used)


class GpuMonitor:
    """Samples a project's GPUs once a second for its metrics, on its own thread from `start` to `stop`.

    `read` returns the load; by default through NVML.
    """

    def __init__(
        self,
        settings: GpuSettings,
        monitor: Monitor,
        *,
        read: Reader | None = None,
        free: Callable[[], object] | None = None,
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._read = read
        self._free = free
        self.freed = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)

    def __enter__(self) -> GpuMonitor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Limits the library's memory, which has to be done before it loads a model, and starts sampling."""
        limit_memory(self._settings)
        if self._free is None and self._settings.mem_gc_interval is not None:
            self._free = free_memory(self._settings)
        if self._read is None:
            self._read = nvml_reader(self._settings.devices, os.environ)
        self.freed = time.monotonic()
        if self._read is not None or self._free is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop sampling and wait for the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def sample(self) -> None:
        """Add one sample of each device to the metrics."""
        for load in self._read() if self._read is not None else ():
            if load.usage is not None:
                self._monitor.add(f"*gpu{load.device}_usage(%)", "avg", load.usage)
            if load.used_mib is not None:
                self._monitor.add(f"*gpu{load.device}_mem_usage(MIB)", "avg", load.used_mib)

    def collect(self, now: float) -> bool:
        """Frees the library's cached memory if it is due at `now` (monotonic seconds); returns whether it was."""
        interval = self._settings.mem_gc_interval
        if self._free is None or interval is None or now - self.freed < interval:
            return False
        self.freed = now
        self._free()
        return True

    def _run(self) -> None:
        try:
            while True:
                self.sample()
                self.collect(time.monotonic())
                if self._stopped.wait(SAMPLE_SECONDS):
                    return
        except Exception:
            log.exception("GPU metrics stopped after an error")


def limit_memory(settings: GpuSettings) -> None:
    """Limits the library to `mem_limit_mib` on each device; warns if it cannot."""
    if settings.mem_limit_mib is None or settings.mem_manager == "none":
        return
    library = _library(settings, "gpu.mem_limit_mib", "no memory limit")
    if library is None:
        return
    limit = {"torch": _limit_torch, "tensorflow": _limit_tensorflow}[settings.mem_manager]
    for device in settings.devices:
        try:
            limit(library, device, settings.mem_limit_mib)
        except Exception as error:  # The libraries raise various types for a device.
            log.warning("gpu.mem_limit_mib: no memory limit on device %d: %s", device, error)


def free_memory(settings: GpuSettings) -> Callable[[], object] | None:
    """Return the function that frees torch's cached memory; None with a warning for TensorFlow (grps 5.1)."""
    if settings.mem_manager != "torch":
        log.warning("gpu.mem_gc_enable: ignored, as %s cannot free cached GPU memory", settings.mem_manager)
        return None
    torch = _library(settings, "gpu.mem_gc_enable", "cached GPU memory is not freed")
    # Before a model uses the GPU there is nothing to free, and the call itself would allocate memory.
    return None if torch is None else lambda: torch.cuda.is_initialized() and torch.cuda.empty_cache()


def _library(settings: GpuSettings, key: str, otherwise: str) -> Any | None:
    name = settings.mem_manager
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        log.warning("%s: %s: %s; run: pip install %s", key, otherwise, error, name)
        return None
    devices = library.cuda.is_available() if name == "torch" else library.config.list_physical_devices("GPU")
    if not devices:
        log.warning("%s: %s: %s finds no GPU", key, otherwise, name)
        return None
    return library


def _limit_torch(torch: Any, device: int, limit_mib: int) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_mib * MIB / total), device)


def _limit_tensorflow(tensorflow: Any, device: int, limit_mib: int) -> None:
    gpus = tensorflow.config.list_physical_devices("GPU")
    if device >= len(gpus):
        raise ValueError(f"this machine has {len(gpus)} GPUs")
    logical = tensorflow.config.LogicalDeviceConfiguration(memory_limit=limit_mib)
    tensorflow.config.set_logical_device_configuration(gpus[device], [logical])
