"""SavedModels of TensorFlow 1 and 2, run in one session as TensorFlow Serving runs them.

A graph and a session load both kinds; `tf.saved_model.load` rejects some of TensorFlow 1's. A signature is a
*callable* of the session: the C++ call below `Session.run`, without the latter's check in Python of input shapes
against the graph's. TensorFlow Serving does not check these either (tfs 0.9).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

# Read once, by the import: at a lower level, TensorFlow logs every invalid request as a warning.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.framework.ops import dismantle_graph
from tensorflow.python.saved_model.loader_impl import SavedModelLoader

from triglot.backends.parameters import warn_of_unknown
from triglot.backends.placement import Placement, devices_of
from triglot.core.call import Call
from triglot.core.errors import Code, InvalidArgument, ModelLoadError, ServingError
from triglot.core.tensor import Array
from triglot.core.types import TensorSpec
from triglot.model.config import Device, ModelConfig
from triglot.model.model import Model
from triglot.model.signature import Signature

log = logging.getLogger(__name__)
# The loader logs every file that it reads.
logging.getLogger("tensorflow").setLevel(logging.WARNING)

TAGS, SERVE = "TF_GRAPH_TAG", "serve"
"""Triton's parameter with the comma-separated tags of the graph to load; and its default."""
METHOD_PREFIX = "tensorflow/serving/"
INTERNAL_PREFIX = "__saved_model_"
"""Prefix of signatures that only loading and training use."""
REFERENCE = 100
"""Offset that the datatype number of a reference to a variable has."""
REFERENCE_VARIABLES = {"Variable", "VariableV2", "TemporaryVariable"}
"""Operations that return such a reference."""

_DATATYPES = {
    types_pb2.DT_BOOL: "BOOL",
    types_pb2.DT_UINT8: "UINT8",
    types_pb2.DT_UINT16: "UINT16",
    types_pb2.DT_UINT32: "UINT32",
    types_pb2.DT_UINT64: "UINT64",
    types_pb2.DT_INT8: "INT8",
    types_pb2.DT_INT16: "INT16",
    types_pb2.DT_INT32: "INT32",
    types_pb2.DT_INT64: "INT64",
    types_pb2.DT_HALF: "FP16",
    types_pb2.DT_BFLOAT16: "BF16",
    types_pb2.DT_FLOAT: "FP32",
    types_pb2.DT_DOUBLE: "FP64",
    types_pb2.DT_COMPLEX64: "COMPLEX64",
    types_pb2.DT_COMPLEX128: "COMPLEX128",
    types_pb2.DT_STRING: "BYTES",
}


AS_SAVED = Device("MODEL")
"""Each operation where the model's author has placed it, or else where TensorFlow places it."""


def load(file: Path, config: ModelConfig) -> Model:
    """Returns the SavedModel whose `saved_model.pb` is `file`, on the devices of `config`.

    Raises `ModelLoadError` if it cannot be read or restored, if it has no usable signature, and for a device that
    does not exist. Parameters other than `TAGS` are logged as ignored.
    """
    warn_of_unknown(file, config, "tensorflow", [TAGS])
    tags = [tag.strip() for tag in config.parameters.get(TAGS, SERVE).split(",")]
    devices = devices_of(file, config, lambda: len(tf.config.list_physical_devices("GPU")))
    return PlacedSavedModel(file.parent, devices, tags) if devices else SavedModel(file.parent, tags=tags)


class SavedModel(Model):
    """The graph with these tags, restored and initialized, and its signatures with supported datatypes."""

    platform = "tensorflow_savedmodel"
    any_output_shapes = True

    def __init__(self, folder: Path, device: Device = AS_SAVED, tags: Sequence[str] = (SERVE,)) -> None:
        # A session accepts any number of concurrent calls; more than there are CPUs do not help.
        self.instances = os.cpu_count() or 1
        self._session, definitions = _restore(folder, device, tags)
        self.signature_defs = {name: definition.SerializeToString() for name, definition in definitions.items()}
        self.signatures = dict(_signatures(folder, definitions, self._session.graph))
        if not self.signatures:
            self._session.close()
            raise ModelLoadError(f"{folder}: the SavedModel has no usable signature")
        by_reference = _has_references(self._session.graph)
        self._runs = {name: _Run(self._session, definitions[name], by_reference) for name in self.signatures}

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Any]:
        """Runs the signature's operations. Raises `ServingError` with an operation's own code and text."""
        try:
            return self._runs[call.signature_name](inputs)
        except tf.errors.OpError as error:
            raise ServingError(error.message, code=Code(error.error_code)) from None
        except UnicodeDecodeError as error:
            # If an error text quotes bytes of the request, TensorFlow fails to decode it, and its code is lost.
            raise InvalidArgument(error.object.decode(errors="replace")) from None

    def close(self) -> None:
        """Closes the session, which holds the variables, and dismantles the graph, which holds the constants."""
        self._runs.clear()
        self._session.close()
        # The graph has reference cycles: its memory would stay allocated until the next garbage collection.
        graph = self._session.graph
        for name in graph.collections:
            graph.clear_collection(name)
        dismantle_graph(graph)


class PlacedSavedModel(Model):
    """A SavedModel on several devices, loaded once on each; the instances of a device share it.

    Each copy has its own variables, so a call changes only those on its instance's device.
    """

    platform = SavedModel.platform
    any_output_shapes = True
    places_instances = True

    def __init__(self, folder: Path, devices: Sequence[Device], tags: Sequence[str] = (SERVE,)) -> None:
        self.instances = len(devices)
        self._models: dict[Device, SavedModel] = {}
        try:
            for device in dict.fromkeys(devices):
                self._models[device] = SavedModel(folder, device, tags)
        except BaseException:
            self.close()
            raise
        self._placement = Placement([self._models[device] for device in devices])
        first = self._models[devices[0]]
        self.signature_defs, self.signatures = first.signature_defs, first.signatures

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Any]:
        """Runs the model on the instance's device; raises as `SavedModel.infer` does."""
        return self._placement.current().infer(inputs, call)

    def close(self) -> None:
        """Closes all copies."""
        for model in self._models.values():
            model.close()


class _Run:
    """The callable of one signature.

    It is made by the first call, as in TensorFlow Serving: it has its own optimized copy of the graph, which
    unused signatures do not need.
    """

    def __init__(self, session: Any, definition: Any, by_reference: bool) -> None:
        self._session = session
        self._feeds = {alias: tensor.name for alias, tensor in sorted(definition.inputs.items())}
        self._outputs = {alias: tensor.name for alias, tensor in definition.outputs.items()}
        # A session rejects fetching a tensor that is fed: such an output is the input itself.
        fed = {name: alias for alias, name in self._feeds.items()}
        self._echoes = {alias: fed[name] for alias, name in self._outputs.items() if name in fed}
        self._fetches = [name for name in dict.fromkeys(self._outputs.values()) if name not in fed]
        self._by_reference = by_reference
        self._callable: Any = None
        self._make_lock = threading.Lock()

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Returns the outputs by name. Raises `tf.errors.OpError` or `UnicodeDecodeError`."""
        fetched = {}
        if self._fetches:
            values = (self._callable or self._make())(*[inputs[alias] for alias in self._feeds])
            fetched = dict(zip(self._fetches, map(self._array, values), strict=True))
        return {
            alias: inputs[self._echoes[alias]] if alias in self._echoes else fetched[name]
            for alias, name in self._outputs.items()
        }

    def _make(self) -> Any:
        with self._make_lock:
            if self._callable is None:
                # The public `Session.make_callable` adds checks in Python.
                self._callable = self._session._make_callable_from_options(
                    config_pb2.CallableOptions(feed=self._feeds.values(), fetch=self._fetches)
                )
        return self._callable

    def _array(self, value: Any) -> Array:
        if isinstance(value, np.ndarray):
            # Its memory may be that of the variable, which the next call may change.
            return value.copy() if self._by_reference else value
        # A scalar; the dtype is for bytes, whose trailing zeros numpy would strip.
        return np.array(value, object if isinstance(value, bytes) else None)


def _restore(folder: Path, device: Device, tags: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
    """Returns a session with the variables and tables of the SavedModel, and its SignatureDefs.

    Raises `ModelLoadError`.
    """
    graph = tf.Graph()
    # A model that was saved with other devices runs on those of this machine.
    options = config_pb2.ConfigProto(allow_soft_placement=True)
    if device.kind == "CPU":
        options.device_count["GPU"] = 0
    session = tf.compat.v1.Session(graph=graph, config=options)
    try:
        loader = SavedModelLoader(os.fspath(folder))
        definition = loader.get_meta_graph_def_from_tags(tags)
        place: AbstractContextManager[Any] = nullcontext()
        if device.kind == "GPU":
            _clear_devices(definition.graph_def)
            place = graph.device(f"/device:GPU:{device.id}")
        with graph.as_default(), place:
            saver, _ = loader.load_graph(graph, tags)
        loader.restore_variables(session, saver)
        loader.run_init_ops(session, tags)
    except Exception as error:
        session.close()
        raise ModelLoadError(f"{folder}: the SavedModel cannot be loaded: {_error_text(error)}") from error
    return session, definition.signature_def


def _clear_devices(graph: Any) -> None:
    """Clears the devices that the model's author assigned to operations, those in functions included."""
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            node.device = ""


def _error_text(error: BaseException) -> str:
    """Returns the text of the failed operation, without the additions of Python's layers."""
    innermost: BaseException | None = error
    while innermost is not None:
        if isinstance(innermost, tf.errors.OpError):
            error = innermost
        innermost = innermost.__context__
    return str(error.message if isinstance(error, tf.errors.OpError) else error)


def _has_references(graph: Any) -> bool:
    """Whether the graph has TensorFlow 1's reference variables, which are changed in place."""
    return any(operation.type in REFERENCE_VARIABLES for operation in graph.get_operations())


def _signatures(folder: Path, definitions: Mapping[str, Any], graph: Any) -> Iterable[tuple[str, Signature]]:
    """Yields the usable signatures; logs the others."""
    for name, definition in sorted(definitions.items()):
        if name.startswith(INTERNAL_PREFIX):
            continue
        try:
            yield name, _signature(definition, graph)
        except ValueError as error:
            log.warning("%s: skipped signature %r: %s", folder, name, error)


def _signature(definition: Any, graph: Any) -> Signature:
    """Returns a signature. Raises `ValueError` for composite tensors and unsupported datatypes."""
    method = definition.method_name.removeprefix(METHOD_PREFIX)
    defaults = {alias: tf.make_ndarray(tensor) for alias, tensor in definition.defaults.items()}
    outputs = _specs(definition.outputs)
    if method not in ("classify", "regress"):
        return Signature(_specs(definition.inputs), outputs, defaults=defaults)
    inputs = {alias: _as_in_graph(tensor, graph) for alias, tensor in definition.inputs.items()}
    return Signature(_specs(inputs), outputs, method=method, defaults=defaults)


def _as_in_graph(tensor: Any, graph: Any) -> Any:
    """Returns the input's info with the datatype in its graph: for examples, TensorFlow Serving compares only the
    names, and there are models that declare another datatype."""
    with suppress(KeyError, ValueError):  # The tensor does not exist: a call reports that.
        tensor = meta_graph_pb2.TensorInfo.FromString(tensor.SerializeToString())
        tensor.dtype = graph.get_tensor_by_name(tensor.name).dtype.as_datatype_enum
    return tensor


def _specs(tensors: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    return tuple(_spec(alias, tensor) for alias, tensor in sorted(tensors.items()))


def _spec(alias: str, tensor: Any) -> TensorSpec:
    if tensor.WhichOneof("encoding") != "name":
        raise ValueError(f"{alias!r} is not a single tensor")
    datatype = _DATATYPES.get(tensor.dtype % REFERENCE)
    if datatype is None:
        raise ValueError(f"{alias!r} has the unsupported type {types_pb2.DataType.Name(tensor.dtype)}")
    shape = tensor.tensor_shape
    any_rank = shape.unknown_rank or not tensor.HasField("tensor_shape")
    return TensorSpec(alias, datatype, None if any_rank else [dim.size for dim in shape.dim])
