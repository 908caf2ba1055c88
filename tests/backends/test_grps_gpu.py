"""The GPUs of a grps project: which they are, what is reported of them, and the log where there are none."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import threading
from pathlib import Path

import pytest

from tests.process import Triglot
from tests.text_project import SERVER, write_project
from tests.waiting import wait_until
from triglot.backends.grps.gpu import GpuLoad, GpuMonitor, free_memory, limit_memory, nvml_reader, visible_devices
from triglot.backends.grps.server_settings import GpuSettings
from triglot.telemetry.monitor import Monitor

NONE = GpuSettings((0, 1), "none")


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, {0: 0, 2: 2}),
        ("3,1,0", {0: 3, 2: 0}),
        (" 3 , 1 ", {0: 3}),
        ("GPU-8a1b,MIG-2c,GPU-9d", {0: "GPU-8a1b", 2: "GPU-9d"}),
        ("", {}),
    ],
)
def test_devices_count_within_what_cuda_sees(visible: str | None, devices: dict[int, int | str]) -> None:
    assert visible_devices([0, 2], {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == devices


def test_a_look_gives_two_values_for_each_device() -> None:
    monitor = Monitor()
    watch = GpuMonitor(NONE, monitor, read=lambda: [GpuLoad(0, 30.0, 1024.0), GpuLoad(1, None, 10.5)])
    watch.sample()
    assert monitor.drain() == [
        ("*gpu0_usage(%)", "avg", 30.0),
        ("*gpu0_mem_usage(MIB)", "avg", 1024.0),
        ("*gpu1_mem_usage(MIB)", "avg", 10.5),
    ]


def test_the_thread_looks_from_start_to_stop() -> None:
    monitor, looked = Monitor(), threading.Event()

    def read() -> list[GpuLoad]:
        looked.set()
        return [GpuLoad(0, 1.0, 2.0)]

    with GpuMonitor(NONE, monitor, read=read):
        assert looked.wait(20)
    assert "gpu-watch" not in {thread.name for thread in threading.enumerate()}
    assert monitor.drain()[:2] == [("*gpu0_usage(%)", "avg", 1.0), ("*gpu0_mem_usage(MIB)", "avg", 2.0)]


def test_a_look_that_fails_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> list[GpuLoad]:
        raise RuntimeError("fell off the bus")

    watch = GpuMonitor(NONE, Monitor(), read=read)
    watch.start()
    watch.stop()
    assert [record.message for record in caplog.records] == ["GPU metrics stopped after an error"]
    assert "fell off the bus" in caplog.text


def test_memory_is_given_back_when_it_is_time() -> None:
    given: list[str] = []
    settings = GpuSettings((0,), "torch", None, 60)
    watch = GpuMonitor(settings, Monitor(), read=list, free=lambda: given.append("back"))
    watch.start()
    watch.stop()
    assert not given
    watch.freed = start = 1000.0  # so that the sums below are exact
    assert [watch.collect(start + seconds) for seconds in (59, 60, 61, 119, 120)] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert len(given) == 2


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.mark.skipif(has("pynvml"), reason="pynvml is installed")
def test_missing_nvml_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor()
    with GpuMonitor(NONE, monitor):
        pass
    (record,) = caplog.records
    assert (record.levelno, record.message) == (
        logging.WARNING,
        "gpu.devices: no GPU metrics: pynvml is not installed; run: pip install nvidia-ml-py",
    )
    assert not monitor.drain()


@pytest.mark.skipif(not has("pynvml"), reason="pynvml is not installed")
def test_nvml_gives_a_reader_or_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    reader = nvml_reader([0], {})
    assert (reader is None) == ("cannot reach the NVIDIA driver" in caplog.text)
    assert reader is None or [load.device for load in reader()] == [0]


def has_gpu() -> bool:
    """Whether NVML finds one."""
    if not has("pynvml"):
        return False
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    return bool(nvml.nvmlDeviceGetCount())


@pytest.mark.skipif(not has_gpu(), reason="there is no GPU that NVML could find")
def test_project_reports_its_gpu(tmp_path: Path) -> None:
    gpu = "gpu: {devices: [0], mem_manager_type: none, mem_limit_mib: -1, mem_gc_enable: false}\n"
    write_project(tmp_path, SERVER + gpu)
    ports = {"TRIGLOT_REST_PORT": "0", "TRIGLOT_GRPC_PORT": "0", "TRIGLOT_DRAIN_DELAY": "0"}
    with Triglot(tmp_path, command="grps", environment=ports) as server:
        server.ports()
        metrics = tmp_path / "logs" / "grps_monitor.log"
        wait_until(lambda: metrics.exists() and "*gpu0_mem_usage(MIB) : " in metrics.read_text())
        text = metrics.read_text()
        server.stop()
    usage, used = (re.search(rf"\*gpu0_{name} : ([\d.]+)", text) for name in (r"usage\(%\)", r"mem_usage\(MIB\)"))
    assert usage is not None, text
    assert used is not None, text
    assert 0 <= float(usage[1]) <= 100
    assert float(used[1]) > 0


@pytest.mark.skipif(has("torch") or has("tensorflow"), reason="a library that could use a GPU is installed")
@pytest.mark.parametrize("library", ["torch", "tensorflow"])
def test_limits_without_the_library(library: str, caplog: pytest.LogCaptureFixture) -> None:
    limit_memory(GpuSettings((0,), library, 1024))
    assert [record.message for record in caplog.records] == [
        f"gpu.mem_limit_mib: no memory limit: No module named '{library}'; run: pip install {library}"
    ]
    caplog.clear()
    limit_memory(GpuSettings((0,), library, None))
    limit_memory(NONE)
    assert not caplog.records
    assert free_memory(GpuSettings((0,), library, None, 60)) is None
    assert "gpu.mem_gc_enable: " in caplog.text
