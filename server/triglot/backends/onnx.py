"""ONNX models, run by onnxruntime; their tensors are read from the model file.

onnxruntime cannot report the number of GPUs, so this asks NVIDIA's driver, which onnxruntime needs for GPUs
anyway. Both number the same GPUs, those in CUDA_VISIBLE_DEVICES, and no additional package is needed.

onnxruntime reports the shape [] both for a scalar and for a tensor of unknown rank, and returns the probabilities
of exported classifiers as a Python dict for each row. The model file tells the ranks, and which tensor these dicts
are made of.
"""

from __future__ import annotations

import ctypes
import logging
import re
import struct
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as errors

from triglot.backends import warn_of_unknown
from triglot.backends.placement import Placement, devices_of
from triglot.core.errors import Internal, InvalidArgument, ModelLoadError, ServingError
from triglot.core.tensor import DATATYPES, Array, element_count, object_array
from triglot.core.types import Answer, TensorSpec
from triglot.model.config import NO_CONFIG, Device, ModelConfig
from triglot.model.model import Model
from triglot.model.reshaping import reshaped
from triglot.pb.onnx import model_pb2 as pb
from triglot.platform.cpus import thread_limit

log = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
GPU = "CUDAExecutionProvider"
NO_PROVIDER = f"; onnxruntime has no {GPU} here, run: pip install onnxruntime-gpu"
THREAD_COUNTS = {"intra_op_thread_count": "intra_op_num_threads", "inter_op_thread_count": "inter_op_num_threads"}
"""Parameters of Triton's onnxruntime backend, with onnxruntime's names; 0: onnxruntime decides."""
MAX_DEFAULTS = 16
"""Limit on initializers that are optional inputs: with more, the model was exported with its weights as inputs."""
OPTIONAL = "optional("
MAPS = "seq(map("
_HINTS = {
    MAPS: "; export the model with zipmap=False (skl2onnx: options={'zipmap': False}), which makes it a tensor",
    "seq(": "; add a ConcatFromSequence node, which joins the tensors",
    "tensor(": "; add a Cast node",
}
"""What to do about the types that no protocol has, by what they begin with."""
INPUT_ERRORS = (errors.Fail, errors.InvalidArgument, errors.RuntimeException)
"""What kernels raise for inputs that they reject; which of these, differs from one release to the next."""
RUN_ERRORS = (*INPUT_ERRORS, errors.EngineError, errors.EPFail, errors.NotImplemented)
_RESOURCES = re.compile(r"allocat|out of memory|\b(?:CUDA|CUDNN|CUBLAS|CUFFT)[ _]", re.IGNORECASE)
"""Texts of such errors when memory or a GPU failed."""
NOT_UTF8 = "onnxruntime's Python API cannot return text that is not UTF-8"
_STRING = struct.Struct("QQQ8x")
_CODE = re.compile(r"^\[ONNXRuntimeError\] : (\d+) : \w+ : ")
_SOURCE = r"\S+\.(?:cc|cpp|cu|cuh|h|hpp):\d+ "
_PLACE = re.compile(rf"/{_SOURCE}[^()]*::[^()]*\([^()]*\)(?: const)? |{_SOURCE}|\b(?:hostname|file|line)=\S+ ; ")
"""Source files and functions of onnxruntime, and what its CUDA errors add of the machine."""
EXECUTION_MODE = "execution_mode"
EXECUTION_MODES = {"0": onnxruntime.ExecutionMode.ORT_SEQUENTIAL, "1": onnxruntime.ExecutionMode.ORT_PARALLEL}

BFLOAT16 = 16
"""onnx.TensorProto.BFLOAT16."""
_BF16 = DATATYPES["BF16"].dtype

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
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


# --- model files ---

FLOAT = 1
"""onnx.TensorProto.FLOAT."""


@dataclass(frozen=True, slots=True)
class Probabilities:
    """The tensor that an output of maps is made of: FP32 [rows, labels], its columns in the order of `labels`."""

    tensor: str
    labels: Sequence[bytes]


def scalars_of(file: Path) -> frozenset[str]:
    """Return the names of the inputs and outputs that the file declares as tensors of rank 0."""
    graph = pb.ModelProto.FromString(file.read_bytes()).graph
    return frozenset(
        value.name
        for value in (*graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape") and not value.type.tensor_type.shape.dim
    )


def without_maps(file: Path) -> tuple[bytes, dict[str, Probabilities]]:
    """Return the model without ZipMap nodes, and the tensors that replace their maps, by output.

    skl2onnx and onnxmltools add such a node unless they get zipmap=False, and CatBoost always. It returns
    a sequence of maps from labels to probabilities, one for each row (ai.onnx.ml, ZipMap).
    """
    model = pb.ModelProto.FromString(file.read_bytes())
    graph = model.graph
    outputs = {value.name: value for value in graph.output}
    found: dict[str, Probabilities] = {}
    for node in [node for node in graph.node if (node.op_type, node.domain) == ("ZipMap", "ai.onnx.ml")]:
        name, tensor = node.output[0], node.input[0]
        if (output := outputs.pop(name, None)) is None:
            continue
        probabilities = Probabilities(tensor, _labels(node))
        graph.node.remove(node)
        if tensor in outputs:  # It is returned anyway.
            graph.output.remove(output)
            found[tensor] = probabilities
            continue
        found[name] = probabilities
        outputs[tensor] = output
        output.name = tensor
        output.type.Clear()
        output.type.tensor_type.elem_type = FLOAT
        output.type.tensor_type.shape.dim.add()
        output.type.tensor_type.shape.dim.add(dim_value=len(probabilities.labels))
    return model.SerializeToString(), found


def _labels(node: pb.NodeProto) -> list[bytes]:
    """Return the labels of a ZipMap node, which are either integers or strings."""
    values = {attribute.name: attribute for attribute in node.attribute}
    if "classlabels_strings" in values:
        return list(values["classlabels_strings"].strings)
    return [b"%d" % label for label in values["classlabels_int64s"].ints]


# --- models ---


def load(file: Path, config: ModelConfig) -> Model:
    """Return the model of `file` on the devices of `config`, with its parameters.

    Raise `ModelLoadError` for unsupported datatypes, for a device that does not exist and for an invalid
    parameter. Unknown parameters are logged.
    """
    hint = "" if GPU in onnxruntime.get_available_providers() else NO_PROVIDER
    return OnnxModel(file, devices_of(file, config, gpu_count, hint), _options(file, config), config)


def gpu_count() -> int:
    """Return the number of GPUs that onnxruntime can use: 0 without its CUDA provider, a driver or a GPU."""
    if GPU not in onnxruntime.get_available_providers():
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0  # Both functions return an error code.
    return count.value


class OnnxModel(Model):
    """One onnxruntime session per device, shared by the instances there; without devices one on the CPU.

    Dynamic dims, including the batch, are -1 in the signature. A device of kind MODEL is the CPU. An initializer
    that is also an input is an optional input, with the initializer as its default. The shapes of outputs are
    those of the results, as in onnxruntime and in Triton's backend (ReadOutputTensors): some exporters declare
    false ones. Outputs that are no tensors are omitted.
    """

    platform = "onnxruntime_onnx"
    any_output_shapes = True

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
        sessions, maps = _sessions(file, list(dict.fromkeys(gpus)), options)
        self._file = file
        self._placement = Placement([sessions[gpu] for gpu in gpus])
        session = sessions[gpus[0]]
        given, defaults, returned = session.get_inputs(), _defaults(session, config), session.get_outputs()
        may_be_scalar = any(not node.shape for node in (*given, *defaults, *returned))
        scalars = scalars_of(file) if may_be_scalar else frozenset[str]()
        inputs = [_input(file, node, scalars) for node in given]
        inputs += _optional([_input(file, node, scalars) for node in defaults], config)
        outputs = self._outputs(returned, maps, scalars, batched=config.max_batch_size > 0)
        self._optional = [node.name for node in given if node.type.startswith(OPTIONAL)]
        self._may_lack = any(node.type.startswith(OPTIONAL) for node in returned)
        self._by_values = any(spec.datatype == "BF16" for spec in (*inputs, *outputs))
        """Whether tensors are passed as onnxruntime's own values, not as arrays, which have no BF16."""
        if self._by_values:
            _check_bf16(file, inputs)
        self.inputs, self.outputs, self._reshaping = reshaped(file, config, inputs, outputs)

    def _outputs(
        self, nodes: Sequence[Any], maps: Mapping[str, Probabilities], scalars: Set[str], *, batched: bool
    ) -> list[TensorSpec]:
        """Return the outputs that can be returned, and note the reasons why others cannot."""
        made = {known.tensor: name for name, known in maps.items()}
        specs: list[TensorSpec] = []
        reasons: dict[str, str] = {}
        self._tensors: list[str] = []
        for node in nodes:
            name = made.get(node.name, node.name)
            datatype = _DATATYPES.get(_element_type(node))
            if datatype is None:
                reasons[name] = _wrong_type(node)
                continue
            shape = _shape(node, scalars)
            # Exporters declare the one row that they were given.
            if batched and shape and shape[0] != -1:
                shape = [-1, *shape[1:]]
            specs.append(TensorSpec(name, datatype, shape))
            self._tensors.append(node.name)
        if reasons and not specs:
            raise ModelLoadError(f"{self._file}: output {next(iter(reasons.values()))}")
        for reason in reasons.values():
            log.warning("%s: omitted: output %s", self._file, reason)
        self.labels = {name: known.labels for name, known in maps.items()}
        self.unservable_outputs = reasons
        self._output_names = [spec.name for spec in specs]
        return specs

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Run the session.

        Raise `InvalidArgument` with onnxruntime's reason for inputs that the graph rejects, and for text that is
        not UTF-8, and `Internal` for a lack of memory and failures of a GPU.
        """
        if self._reshaping is not None:
            inputs = self._reshaping.given(inputs)
        feed: dict[str, Any] = {name: _feedable(name, array) for name, array in inputs.items()}
        if self._optional:
            feed = {**dict.fromkeys(self._optional), **feed}
        try:
            outputs = self._run(self._placement.current(), feed)
        except RUN_ERRORS as error:
            failure = failure_of(error)
            if isinstance(failure, Internal):
                log.warning("%s: %s", self._file, failure.message)
            raise failure from None
        result: dict[str, Any] = dict(zip(self._output_names, outputs, strict=True))
        if self._may_lack:
            result = Answer({name: array for name, array in result.items() if array is not None}, partial=True)
        return result if self._reshaping is None else self._reshaping.made(result)

    def _run(self, session: Any, feed: Mapping[str, Any]) -> list[Any]:
        if not self._by_values:
            try:
                outputs: list[Any] = session.run(self._tensors, feed)
                return outputs
            except UnicodeDecodeError as error:
                if any(spec.datatype == "BYTES" for spec in self.inputs):
                    raise Internal(f"{NOT_UTF8} beside inputs of strings: {error}") from None
            self._by_values = True  # From now on, so that no graph runs twice.
        values = {name: _ort_value(array) for name, array in feed.items() if array is not None}
        return [_array_of(value) for value in session.run_with_ort_values(self._tensors, values)]


def failure_of(error: Exception) -> ServingError:
    """Return the error for a failed run: `InvalidArgument` if the inputs are the cause, else `Internal`.

    The text is onnxruntime's, which begins as in Triton's backend (RETURN_IF_ORT_ERROR).
    """
    text = _CODE.sub(r"onnx runtime error \1: ", _PLACE.sub("", str(error))).strip()
    by_inputs = isinstance(error, INPUT_ERRORS) and not _RESOURCES.search(text)
    return InvalidArgument(text) if by_inputs else Internal(text)


def _sessions(
    file: Path, gpus: Sequence[int | None], options: Any
) -> tuple[dict[int | None, Any], dict[str, Probabilities]]:
    """Return a session for each GPU, None for the CPU, and the outputs that are tensors in place of maps."""
    sessions = {gpus[0]: _session(file, str(file), gpus[0], options)}
    source: str | bytes = str(file)
    maps: dict[str, Probabilities] = {}
    if any(node.type.startswith(MAPS) for node in sessions[gpus[0]].get_outputs()):
        source, maps = without_maps(file)
        sessions = {}
    return {gpu: sessions.get(gpu) or _session(file, source, gpu, options) for gpu in gpus}, maps


def _session(file: Path, source: str | bytes, gpu: int | None, options: Any) -> Any:
    """Return a session on a GPU or the CPU. Raise `ModelLoadError` if onnxruntime falls back to the CPU.

    `source` is the path of the model file, or its content.
    """
    providers: list[Any] = [CPU] if gpu is None else [(GPU, {"device_id": gpu}), CPU]
    session = onnxruntime.InferenceSession(source, options, providers=providers)
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
    """Return the session options. Raise `ModelLoadError` for an invalid parameter."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = thread_limit()
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


def _input(file: Path, node: Any, scalars: Set[str]) -> TensorSpec:
    datatype = _DATATYPES.get(_element_type(node))
    if datatype is None:
        raise ModelLoadError(f"{file}: input {_wrong_type(node)}")
    return TensorSpec(node.name, datatype, _shape(node, scalars), optional=node.type.startswith(OPTIONAL))


def _element_type(node: Any) -> str:
    """Return the type of a node; for an optional tensor that of the tensor."""
    kind: str = node.type
    return kind.removeprefix(OPTIONAL).removesuffix(")") if kind.startswith(OPTIONAL) else kind


def _wrong_type(node: Any) -> str:
    hint = next((hint for start, hint in _HINTS.items() if node.type.startswith(start)), "")
    return f"'{node.name}' is {node.type}, expected one of {', '.join(_DATATYPES)}{hint}"


def _shape(node: Any, scalars: Set[str]) -> list[int] | None:
    """Return the declared shape; None for any rank. `scalars` holds the names of the tensors of rank 0."""
    if not node.shape:
        return [] if node.name in scalars else None
    return [dim if isinstance(dim, int) else -1 for dim in node.shape]


def _defaults(session: Any, config: ModelConfig) -> list[Any]:
    """Return the initializers that requests may set: the configured ones, or all unless these are the weights."""
    nodes = [node for node in session.get_overridable_initializers() if node.type in _DATATYPES]
    if configured := {tensor.name for tensor in config.inputs}:
        return [node for node in nodes if node.name in configured]
    return nodes if len(nodes) <= MAX_DEFAULTS else []


def _optional(specs: Sequence[TensorSpec], config: ModelConfig) -> list[TensorSpec]:
    """Return the specs of such initializers; without those that cannot be batched, unless they are configured."""
    return [
        replace(spec, optional=True)
        for spec in specs
        if config.inputs or not config.max_batch_size or (spec.shape and spec.shape[0] == -1)
    ]


def _check_bf16(file: Path, inputs: Sequence[TensorSpec]) -> None:
    """Raise `ModelLoadError` if onnxruntime's Python API cannot pass BF16 tensors, or not with these inputs."""
    if not hasattr(onnxruntime.OrtValue, "ortvalue_from_numpy_with_onnx_type"):
        raise ModelLoadError(
            f"{file}: BF16 tensors need a newer onnxruntime than {onnxruntime.__version__}; "
            "run: pip install --upgrade onnxruntime"
        )
    if texts := [spec.name for spec in inputs if spec.datatype == "BYTES"]:
        raise ModelLoadError(
            f"{file}: input '{texts[0]}' is tensor(string): onnxruntime's Python API takes no strings beside BF16 "
            "tensors; convert these with Cast nodes"
        )


def _ort_value(array: Array) -> Any:
    if array.dtype == _BF16:
        bits = np.ascontiguousarray(array).view(np.uint16).reshape(array.shape)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _texts(value: Any, error: UnicodeDecodeError) -> list[bytes]:
    """Return the elements of a tensor of strings, which onnxruntime's Python API only returns as UTF-8.

    They are std::string objects of libstdc++ (since GCC 5): an address, a length, and 16 bytes with the text
    itself or, if the address is another one, the capacity there. Raise `Internal` for anything else.
    """
    at, count = value.data_ptr(), element_count(value.shape())
    size = value.tensor_size_in_bytes() if hasattr(value, "tensor_size_in_bytes") else 0
    if sys.platform != "linux" or size != count * _STRING.size:
        raise Internal(f"{NOT_UTF8} here: {error}")
    texts = []
    for place in range(at, at + size, _STRING.size):
        address, length, capacity = _STRING.unpack(ctypes.string_at(place, _STRING.size))
        if not (length < 16 if address == place + 16 else length <= capacity):
            raise Internal(f"{NOT_UTF8} here: {error}")
        texts.append(ctypes.string_at(address, length))
    return texts


def _array_of(value: Any) -> Array | None:
    if not value.has_value():
        return None
    if value.data_type() != "tensor(bfloat16)":
        try:
            array: Array = value.numpy()
        except UnicodeDecodeError as error:
            return object_array(_texts(value, error), value.shape())
        return array
    # numpy() has no type for it.
    shape = value.shape()
    bits = ctypes.string_at(value.data_ptr(), element_count(shape) * _BF16.itemsize)
    return np.frombuffer(bits, _BF16).reshape(shape)


def _feedable(name: str, array: Array) -> Array:
    if array.dtype.kind == "O":
        try:
            text = [element.decode() for element in array.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"input '{name}': ONNX strings are UTF-8, an element is not: {error}") from None
        return np.array(text, dtype=object).reshape(array.shape)
    # onnxruntime reads the array through typed pointers, so it must be aligned.
    return array if array.flags.aligned else array.copy()
