"""ONNX models, run by onnxruntime; their tensors are read from the model file.

onnxruntime cannot report the number of GPUs, so this asks NVIDIA's driver, which onnxruntime needs for GPUs
anyway. Both number the same GPUs, those in CUDA_VISIBLE_DEVICES, and no additional package is needed.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument as OnnxInvalidArgument

from triglot.backends.parameters import warn_of_unknown
from triglot.backends.placement import Placement, devices_of
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import Array
from triglot.core.types import TensorSpec
from triglot.model.config import NO_CONFIG, Device, ModelConfig
from triglot.model.model import Model
from triglot.model.reshaping import reshaped

log = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
GPU = "CUDAExecutionProvider"
NO_PROVIDER = f"; onnxruntime has no {GPU} here, run: pip install onnxruntime-gpu"
THREAD_COUNTS = {"intra_op_thread_count": "intra_op_num_threads", "inter_op_thread_count": "inter_op_num_threads"}
"""Parameters of Triton's onnxruntime backend, with onnxruntime's names; 0: onnxruntime decides."""
MAX_DEFAULTS = 16
"""Limit on initializers that are optional inputs: with more, the model was exported with its weights as inputs."""
EXECUTION_MODE = "execution_mode"
EXECUTION_MODES = {"0": onnxruntime.ExecutionMode.ORT_SEQUENTIAL, "1": onnxruntime.ExecutionMode.ORT_PARALLEL}

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


def load(file: Path, config: ModelConfig) -> Model:
    """Returns the model of `file` on the devices of `config`, with its parameters.

    Raises `ModelLoadError` for unsupported datatypes, for a device that does not exist and for an invalid
    parameter. Unknown parameters are logged.
    """
    hint = "" if GPU in onnxruntime.get_available_providers() else NO_PROVIDER
    return OnnxModel(file, devices_of(file, config, gpu_count, hint), _options(file, config), config)


def gpu_count() -> int:
    """Returns the number of GPUs that onnxruntime can use: 0 without its CUDA provider, a driver or a GPU."""
    if GPU not in onnxruntime.get_available_providers():
        return 0
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0  # Both functions return an error code.
    return count.value


class OnnxModel(Model):
    """One onnxruntime session per device, shared by the instances there; without devices one on the CPU.

    Dynamic dims, including the batch, are -1 in the signature. A device of kind MODEL is the CPU. An initializer
    that is also an input is an optional input, with the initializer as its default.
    """

    platform = "onnxruntime_onnx"

    def __init__(
        self,
        file: Path,
        devices: Sequence[Device] = (),
        options: Any = None,
        config: ModelConfig = NO_CONFIG,
    ) -> None:
        if devices:
            self.instances = len(devices)
            self.places_instances = True
        gpus = [device.id if device.kind == "GPU" else None for device in devices] or [None]
        sessions = {gpu: _session(file, gpu, options) for gpu in dict.fromkeys(gpus)}
        self._placement = Placement([sessions[gpu] for gpu in gpus])
        session = sessions[gpus[0]]
        inputs = [*(_spec(file, node) for node in session.get_inputs()), *_defaults(file, session, config)]
        outputs = [_spec(file, node) for node in session.get_outputs()]
        self._output_names = [spec.name for spec in outputs]
        self.inputs, self.outputs, self._reshaping = reshaped(file, config, inputs, outputs)

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Runs the session. Raises `InvalidArgument` for inputs that it rejects and text that is not UTF-8."""
        if self._reshaping is not None:
            inputs = self._reshaping.given(inputs)
        feed = {name: _feedable(name, array) for name, array in inputs.items()}
        try:
            outputs = self._placement.current().run(self._output_names, feed)
        except OnnxInvalidArgument as error:
            raise InvalidArgument(str(error)) from None
        result = dict(zip(self._output_names, outputs, strict=True))
        return result if self._reshaping is None else self._reshaping.made(result)


def _session(file: Path, gpu: int | None, options: Any) -> Any:
    """Returns a session on a GPU or the CPU. Raises `ModelLoadError` if onnxruntime falls back to the CPU."""
    providers: list[Any] = [CPU] if gpu is None else [(GPU, {"device_id": gpu}), CPU]
    session = onnxruntime.InferenceSession(str(file), options, providers=providers)
    wanted, found = CPU if gpu is None else GPU, session.get_providers()
    if found[0] != wanted:
        raise ModelLoadError(
            f"{file}: onnxruntime cannot run on GPU {gpu}: expected a session of {wanted}, got one of "
            f"{', '.join(found)}; standard error says what is missing (CUDA, cuDNN)"
        )
    # After a GPU error it would silently continue on the CPU.
    session.disable_fallback()
    return session


def _options(file: Path, config: ModelConfig) -> Any:
    """Returns the session options. Raises `ModelLoadError` for an invalid parameter."""
    options = onnxruntime.SessionOptions()
    source = config.source or file
    for key, value in config.parameters.items():
        if key in THREAD_COUNTS:
            if not value.isdecimal():
                raise ModelLoadError(f"{source}: parameters: {key}: expected a number of threads, got {value!r}")
            setattr(options, THREAD_COUNTS[key], int(value))
        elif key == EXECUTION_MODE:
            if value not in EXECUTION_MODES:
                raise ModelLoadError(
                    f"{source}: parameters: {key}: expected 0 (sequential) or 1 (parallel), got {value!r}"
                )
            options.execution_mode = EXECUTION_MODES[value]
    warn_of_unknown(file, config, "onnx", [*THREAD_COUNTS, EXECUTION_MODE])
    return options


def _spec(file: Path, node: Any) -> TensorSpec:
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        raise ModelLoadError(
            f"{file}: tensor '{node.name}' is {node.type}, expected one of {', '.join(_DATATYPES)}"
        )
    # onnxruntime reports [] for a scalar and for an unknown rank, and checks the rank itself.
    shape = [dim if isinstance(dim, int) else -1 for dim in node.shape] or None
    return TensorSpec(node.name, datatype, shape)


def _defaults(file: Path, session: Any, config: ModelConfig) -> list[TensorSpec]:
    """Returns the initializers that requests may set: the configured ones, or all unless these are the weights."""
    nodes = [node for node in session.get_overridable_initializers() if node.type in _DATATYPES]
    configured = {tensor.name for tensor in config.inputs}
    if configured:
        nodes = [node for node in nodes if node.name in configured]
    elif len(nodes) > MAX_DEFAULTS:
        return []
    specs = [replace(_spec(file, node), optional=True) for node in nodes]
    if configured or not config.max_batch_size:
        return specs
    return [spec for spec in specs if spec.shape and spec.shape[0] == -1]


def _feedable(name: str, array: Array) -> Array:
    if array.dtype.kind == "O":
        try:
            text = [element.decode() for element in array.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"input '{name}': ONNX strings are UTF-8, an element is not: {error}") from None
        return np.array(text, dtype=object).reshape(array.shape)
    # onnxruntime reads the array through typed pointers, so it must be aligned.
    return array if array.flags.aligned else array.copy()
