"""Programs of PyTorch: TorchScript (`model.pt`), torch.export and AOTInductor (`model.pt2`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from triglot.backends import warn_of_unknown
from triglot.backends.torch.archive import Kind, kind_of
from triglot.backends.torch.compiled import CompiledModel, read_compiled
from triglot.backends.torch.exported import read_exported
from triglot.backends.torch.model import Program, TorchModel
from triglot.backends.torch.script import read_script
from triglot.core.errors import ModelLoadError
from triglot.model.config import Device, ModelConfig
from triglot.model.model import Model
from triglot.platform.cpus import thread_limit

log = logging.getLogger(__name__)

_READERS: dict[Kind, Callable[[Path, torch.device | None], Program]] = {
    Kind.SCRIPT: read_script,
    Kind.EXPORTED: read_exported,
    Kind.COMPILED: read_compiled,
}

if limit := thread_limit():
    torch.set_num_threads(min(limit, torch.get_num_threads()))


def load(file: Path, config: ModelConfig) -> Model:
    """Return the program of `file`; its kind is determined by the contents, not by the file's name.

    Its instances are on the devices of `config`; by default one on each GPU, or one on the CPU without GPUs.
    Raise `ModelLoadError` for any other file, for a device that does not exist, and for tensors that cannot be
    named as configured.
    """
    kind = kind_of(file)
    # A compiled program runs only on the kind of device that it was compiled for.
    read = _READERS[kind]
    devices = _devices(config, Device("MODEL") if kind is Kind.COMPILED else None)
    programs: dict[Device, Program] = {
        device: read(file, _torch_device(device)) for device in dict.fromkeys(devices)
    }
    warn_of_unknown(file, config, "torch")
    make = CompiledModel if kind is Kind.COMPILED else TorchModel
    return make(file, config, [programs[device] for device in devices])


def _devices(config: ModelConfig, default: Device | None) -> list[Device]:
    try:
        devices = config.devices(torch.cuda.device_count)
    except ValueError as error:
        raise ModelLoadError(f"{config.source}: {error}") from None
    if default is not None:
        return devices or [default]
    return devices or [Device("GPU", number) for number in range(torch.cuda.device_count())] or [Device("CPU")]


def _torch_device(device: Device) -> torch.device | None:
    """Return torch's device; None for a program that stays where it was saved."""
    if device.kind == "MODEL":
        return None
    return torch.device("cuda", device.id) if device.kind == "GPU" else torch.device("cpu")
