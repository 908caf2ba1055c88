"""SavedModels of TensorFlow 1 and 2, run in one session as TensorFlow Serving runs them.

A graph and a session load both kinds; `tf.saved_model.load` rejects some of TensorFlow 1's. A call is the C call
below `Session.run`, without the latter's check in Python of input shapes against the graph's. TensorFlow Serving
does not check these either (tfs 0.9). A run ends at its call's deadline, between two operations. A session cannot
end a single run before that, so a cancelled one runs until then, as in TensorFlow Serving.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read once, by the import: at a lower level, TensorFlow logs every invalid request as a warning.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, struct_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.ops import dismantle_graph
from tensorflow.python.saved_model.loader_impl import SavedModelLoader

from triglot.backends import warn_of_unknown
from triglot.backends.placement import Placement, devices_of
from triglot.core.call import Call
from triglot.core.errors import Code, InvalidArgument, MissingDependency, ModelLoadError, ServingError
from triglot.core.tensor import DATATYPES, Array
from triglot.core.types import TensorSpec
from triglot.model.config import Device, ModelConfig
from triglot.model.model import Model
from triglot.model.signature import Signature
from triglot.platform.cpus import cpu_count, thread_limit

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

MAX_SELECTIONS = 64
"""Combinations of requested outputs that a signature keeps; further ones run all its outputs. The session keeps a
copy of the graph for each, and clients choose them."""
TEXT_PREFIX, FORESTS_PREFIX = "TFText>", "SimpleML"
TEXT_OPERATIONS = frozenset(
    (
        "CaseFoldUTF8",
        "ConstrainedSequence",
        "FastBertNormalize",
        "FastWordpieceTokenizeWithOffsets",
        "FindSourceOffsets",
        "MaxSpanningTree",
        "NormalizeUTF8",
        "NormalizeUTF8WithOffsetsMap",
        "PhraseTokenize",
        "RegexSplitWithOffsets",
        "RougeL",
        "SentenceFragments",
        "SentenceFragmentsV2",
        "SentencepieceDetokenizeOp",
        "SentencepieceIdToStringOp",
        "SentencepieceOp",
        "SentencepieceStringToIdOp",
        "SentencepieceTokenizeOp",
        "SentencepieceTokenizeWithOffsetsOp",
        "SentencepieceVocabSizeOp",
        "SplitMergeTokenizeWithOffsets",
        "TokenizerFromLogits",
        "UnicodeScriptTokenizeWithOffsets",
        "WhitespaceTokenizeWithOffsets",
        "WordpieceTokenizeWithOffsets",
    )
)
"""Operations of tensorflow-text 2.21 without its prefix."""

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
    types_pb2.DT_QINT8: "QINT8",
    types_pb2.DT_QUINT8: "QUINT8",
    types_pb2.DT_QINT16: "QINT16",
    types_pb2.DT_QUINT16: "QUINT16",
    types_pb2.DT_QINT32: "QINT32",
}


AS_SAVED = Device("MODEL")
"""Each operation where the model's author has placed it, or else where TensorFlow places it."""


def load(file: Path, config: ModelConfig) -> Model:
    """Return the SavedModel whose `saved_model.pb` or `saved_model.pbtxt` is `file`, on the devices of `config`.

    Raise `ModelLoadError` if it cannot be read or restored, if it has no usable signature, and for a device that
    does not exist; `MissingDependency` if it needs operations of a package that is not installed. Parameters other
    than `TAGS` are logged as ignored.
    """
    warn_of_unknown(file, config, "tensorflow", [TAGS])
    _load_libraries(config.op_libraries)
    tags = [tag.strip() for tag in config.parameters.get(TAGS, SERVE).split(",")]
    devices = devices_of(file, config, lambda: len(tf.config.list_physical_devices("GPU")))
    return PlacedSavedModel(file.parent, devices, tags) if devices else SavedModel(file.parent, tags=tags)


class SavedModel(Model):
    """The graph with these tags, restored and initialized, and its signatures with supported datatypes."""

    platform = "tensorflow_savedmodel"
    any_output_shapes = True

    def __init__(self, folder: Path, device: Device = AS_SAVED, tags: Sequence[str] = (SERVE,)) -> None:
        # A session accepts any number of concurrent calls; more than there are CPUs do not help.
        self.instances = cpu_count()
        self._session, definitions = _restore(folder, device, tags)
        self.signature_defs = {name: definition.SerializeToString() for name, definition in definitions.items()}
        self.signatures, self.unservable_signatures = _signatures(definitions, self._session.graph)
        self.warnings = list(_warnings(self.signatures, self.unservable_signatures))
        if not self.signatures:
            self._session.close()
            raise ModelLoadError(f"{folder}: the SavedModel has no usable signature{_listed(self.warnings)}")
        by_reference = _has_references(self._session.graph)
        self._runs = {
            name: _Run(self._session, definitions[name], signature, by_reference)
            for name, signature in self.signatures.items()
        }

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Any]:
        """Run the operations of the requested outputs, within the call's deadline.

        Raise `ServingError` with an operation's own code and text.
        """
        try:
            return self._runs[call.signature_name](inputs, call.requested_outputs, call.remaining)
        except tf.errors.OpError as error:
            raise ServingError(error.message, code=Code(error.error_code)) from None
        except UnicodeDecodeError as error:
            # If an error text quotes bytes of the request, TensorFlow fails to decode it, and its code is lost.
            raise InvalidArgument(error.object.decode(errors="replace")) from None

    def close(self) -> None:
        """Close the session, which holds the variables, and dismantle the graph, which holds the constants."""
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
        self.unservable_signatures, self.warnings = first.unservable_signatures, first.warnings

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Any]:
        """Run the model on the instance's device; raise as `SavedModel.infer` does."""
        return self._placement.current().infer(inputs, call)

    def close(self) -> None:
        """Close all copies."""
        for model in self._models.values():
            model.close()


@dataclass(frozen=True, slots=True)
class _Selection:
    """What one run fetches: the session's `fetches`, and for each output its position there or, for an input that
    is also an output, the input's name.
    """

    fetches: Sequence[Any]
    places: Mapping[str, int | str]


class _Run:
    """Runs one signature.

    The session makes an optimized copy of the graph for each combination of fetched tensors when it is first run,
    as in TensorFlow Serving, and keeps it.
    """

    def __init__(self, session: Any, definition: Any, signature: Signature, by_reference: bool) -> None:
        self._session = session
        self._inputs = {alias: tensor.name for alias, tensor in definition.inputs.items()}
        self._outputs = {spec.name: definition.outputs[spec.name].name for spec in signature.outputs}
        # A session returns the integers alone.
        self._quantized = {
            alias: DATATYPES[rule.spec.datatype].dtype
            for alias, rule in signature.output_rules.items()
            if rule.dtype.names
        }
        self._by_reference = by_reference
        self._feeds: Mapping[str, Any] | None = None
        self._all: _Selection | None = None
        self._selections: dict[frozenset[str], _Selection] = {}

    def __call__(
        self, inputs: Mapping[str, Array], requested: Sequence[str], seconds: float | None
    ) -> dict[str, Any]:
        """Return the `requested` outputs, all if there are none, by name; `seconds`: how long it may run.

        Raise `tf.errors.OpError` or `UnicodeDecodeError`; `InvalidArgument` for a tensor that the graph lacks.
        """
        selection = self._selected(requested) if requested else self._all or self._select_all()
        values = self._fetched(inputs, selection.fetches, seconds) if selection.fetches else ()
        outputs = {
            alias: inputs[place] if isinstance(place, str) else self._array(values[place])
            for alias, place in selection.places.items()
        }
        for alias in self._quantized.keys() & outputs.keys():
            outputs[alias] = outputs[alias].view(self._quantized[alias])
        return outputs

    def _fetched(self, inputs: Mapping[str, Array], fetches: Sequence[Any], seconds: float | None) -> list[Any]:
        feeds = self._feeds
        if feeds is None:
            feeds = self._feeds = {alias: self._tensor(name) for alias, name in self._inputs.items()}
        fed = {tensor: inputs[alias] for alias, tensor in feeds.items()}
        # What `Session.run` calls; that one adds checks in Python.
        run = self._session._call_tf_sessionrun
        if seconds is None:
            return run(None, fed, fetches, [], None)  # type: ignore[no-any-return]
        options = config_pb2.RunOptions(timeout_in_ms=max(1, math.ceil(seconds * 1000)))
        buffer = pywrap_tf_session.TF_NewBufferFromString(options.SerializeToString())
        try:
            return run(buffer, fed, fetches, [], None)  # type: ignore[no-any-return]
        finally:
            pywrap_tf_session.TF_DeleteBuffer(buffer)

    def _selected(self, requested: Sequence[str]) -> _Selection:
        key = frozenset(requested)
        selection = self._selections.get(key)
        if selection is None:
            if len(self._selections) >= MAX_SELECTIONS:
                return self._all or self._select_all()
            selection = self._selections[key] = self._select(key)
        return selection

    def _select_all(self) -> _Selection:
        self._all = self._select(self._outputs.keys())
        return self._all

    def _select(self, aliases: Set[str]) -> _Selection:
        # A session rejects fetching a tensor that is fed: such an output is the input itself.
        fed = {name: alias for alias, name in self._inputs.items()}
        names = {alias: name for alias, name in self._outputs.items() if alias in aliases}
        fetched = {
            name: at for at, name in enumerate(dict.fromkeys(name for name in names.values() if name not in fed))
        }
        return _Selection(
            [self._tensor(name) for name in fetched],
            {alias: fed[name] if name in fed else fetched[name] for alias, name in names.items()},
        )

    def _tensor(self, name: str) -> Any:
        """Return a tensor of the graph as the session wants it."""
        try:
            return self._session.graph.get_tensor_by_name(name)._as_tf_output()
        except (KeyError, ValueError):
            raise InvalidArgument(
                f"Tensor {name}, specified in either feed_devices or fetch_devices was not found in the Graph"
            ) from None

    def _array(self, value: Any) -> Array:
        if isinstance(value, np.ndarray):
            # Its memory may be that of the variable, which the next call may change.
            return value.copy() if self._by_reference else value
        # A scalar; the dtype is for bytes, whose trailing zeros numpy would strip.
        return np.array(value, object if isinstance(value, bytes) else None)


def session_options() -> Any:
    """Return the ConfigProto of a session; TensorFlow's variables and a container's CPU limit set its threads."""

    def threads(variable: str) -> int:
        return 0 if os.environ.get(variable) else thread_limit()

    # A model that was saved with other devices runs on those of this machine.
    return config_pb2.ConfigProto(
        allow_soft_placement=True,
        intra_op_parallelism_threads=threads("TF_NUM_INTRAOP_THREADS"),
        inter_op_parallelism_threads=threads("TF_NUM_INTEROP_THREADS"),
    )


def _restore(folder: Path, device: Device, tags: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
    """Return a session with the variables and tables of the SavedModel, and its SignatureDefs.

    Raise `ModelLoadError`.
    """
    graph = tf.Graph()
    options = session_options()
    if device.kind == "CPU":
        options.device_count["GPU"] = 0
    session = tf.compat.v1.Session(graph=graph, config=options)
    try:
        loader = SavedModelLoader(os.fspath(folder))
        definition = loader.get_meta_graph_def_from_tags(tags)
        _load_packages(folder, definition.graph_def)
        place: AbstractContextManager[Any] = nullcontext()
        if device.kind == "GPU":
            _clear_devices(definition.graph_def)
            place = graph.device(f"/device:GPU:{device.id}")
        with graph.as_default(), place:
            saver, _ = loader.load_graph(graph, tags)
        loader.restore_variables(session, saver)
        loader.run_init_ops(session, tags)
        session._extend_graph()  # `Session.run` does it, which a model without variables has not called.
    except MissingDependency:
        session.close()
        raise
    except Exception as error:
        session.close()
        text = _error_text(error)
        if "Op type not registered" in text:
            text += "; name the shared library that has it in --tensorflow-op-libraries"
        raise ModelLoadError(f"{folder}: the SavedModel cannot be loaded: {text}") from error
    return session, definition.signature_def


def _load_libraries(files: Iterable[Path]) -> None:
    """Load the operations of shared libraries. Raise `ModelLoadError`."""
    for file in files:
        try:
            tf.load_op_library(os.fspath(file))  # TensorFlow loads each file once.
        except (OSError, tf.errors.OpError) as error:
            raise ModelLoadError(f"{file}: the operations of this library cannot be loaded: {error}") from error


def _load_packages(folder: Path, graph: Any) -> None:
    """Import the packages that have those operations of the graph that TensorFlow lacks.

    Raise `MissingDependency` if one is not installed, and as it does if it cannot be imported.
    """
    nodes = (graph.node, *(function.node_def for function in graph.library.function))
    functions = {function.signature.name for function in graph.library.function}
    used = {node.op for group in nodes for node in group} - functions
    for name in sorted(used):
        if op_def_registry.get(name) is not None or (package := _package_of(name)) is None:
            continue
        module, requirement = package
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise MissingDependency(
                f"{folder}: its operation {name} needs {error.name}, which is not installed; "
                f"run: pip install {requirement}"
            ) from error
        except Exception as error:
            raise ModelLoadError(
                f"{folder}: its operation {name} needs {module}, which cannot be imported: {error}"
            ) from error


def _package_of(operation: str) -> tuple[str, str] | None:
    """Return the module that registers an operation, and what to install for it; None if that is not known."""
    if operation.startswith(TEXT_PREFIX) or operation in TEXT_OPERATIONS:
        # Its libraries fit one minor version of TensorFlow.
        minor = ".".join(tf.__version__.split(".")[:2])
        return "tensorflow_text", f"'tensorflow-text=={minor}.*'"
    if operation.startswith(FORESTS_PREFIX):
        return "tensorflow_decision_forests", "tensorflow-decision-forests"
    return None


def _clear_devices(graph: Any) -> None:
    """Clear the devices that the model's author assigned to operations, those in functions included."""
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            node.device = ""


def _error_text(error: BaseException) -> str:
    """Return the text of the failed operation, without the additions of Python's layers."""
    innermost: BaseException | None = error
    while innermost is not None:
        if isinstance(innermost, tf.errors.OpError):
            error = innermost
        innermost = innermost.__context__
    return str(error.message if isinstance(error, tf.errors.OpError) else error)


def _has_references(graph: Any) -> bool:
    """Whether the graph has TensorFlow 1's reference variables, which are changed in place."""
    return any(operation.type in REFERENCE_VARIABLES for operation in graph.get_operations())


def _signatures(definitions: Mapping[str, Any], graph: Any) -> tuple[dict[str, Signature], dict[str, str]]:
    """Return the signatures that can be called, and why the others cannot."""
    signatures, unservable = {}, {}
    for name, definition in sorted(definitions.items()):
        if name.startswith(INTERNAL_PREFIX):
            continue
        try:
            signatures[name] = _signature(definition, graph)
        except ValueError as error:
            unservable[name] = str(error)
    return signatures, unservable


def _warnings(signatures: Mapping[str, Signature], unservable: Mapping[str, str]) -> Iterator[str]:
    for name, why in unservable.items():
        yield f"signature '{name}' cannot be called: {why}"
    for name, signature in signatures.items():
        for alias, what in signature.unservable_outputs.items():
            yield f"signature '{name}': output '{alias}' cannot be returned: {what}"


def _listed(texts: Sequence[str]) -> str:
    return f": {'; '.join(texts)}" if texts else ""


def _signature(definition: Any, graph: Any) -> Signature:
    """Return a signature. Raise `ValueError` for an input that no request can hold."""
    method = definition.method_name.removeprefix(METHOD_PREFIX)
    method = method if method in ("classify", "regress") else "predict"
    defaults = {alias: tf.make_ndarray(tensor) for alias, tensor in definition.defaults.items()}
    inputs = dict(definition.inputs)
    if method != "predict":
        inputs = {alias: _as_in_graph(tensor, graph) for alias, tensor in inputs.items()}
    for alias, tensor in sorted(inputs.items()):
        if what := _unservable(tensor):
            raise ValueError(f"input '{alias}' is {what}")
    unservable = {
        alias: f"it is {what}" for alias, tensor in definition.outputs.items() if (what := _unservable(tensor))
    }
    outputs = {alias: tensor for alias, tensor in definition.outputs.items() if alias not in unservable}
    return Signature(
        _specs(inputs), _specs(outputs), method=method, defaults=defaults, unservable_outputs=unservable
    )


def _as_in_graph(tensor: Any, graph: Any) -> Any:
    """Return the input's info with the datatype in its graph: for examples, TensorFlow Serving compares only the
    names, and there are models that declare another datatype."""
    with suppress(KeyError, ValueError):  # The tensor does not exist: a call reports that.
        tensor = meta_graph_pb2.TensorInfo.FromString(tensor.SerializeToString())
        tensor.dtype = graph.get_tensor_by_name(tensor.name).dtype.as_datatype_enum
    return tensor


def _specs(tensors: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    return tuple(_spec(alias, tensor) for alias, tensor in sorted(tensors.items()))


def _spec(alias: str, tensor: Any) -> TensorSpec:
    shape = tensor.tensor_shape
    any_rank = shape.unknown_rank or not tensor.HasField("tensor_shape")
    datatype = _DATATYPES[tensor.dtype % REFERENCE]
    return TensorSpec(alias, datatype, None if any_rank else [dim.size for dim in shape.dim])


def _unservable(tensor: Any) -> str:
    """Return what an input or output is that no message can hold; "" for any other."""
    encoding = tensor.WhichOneof("encoding")
    if encoding == "coo_sparse":
        return "a sparse tensor, of three tensors"
    if encoding == "composite_tensor":
        kind = struct_pb2.TypeSpecProto.TypeSpecClass.Name(tensor.composite_tensor.type_spec.type_spec_class)
        return f"a composite tensor ({kind})"
    if encoding != "name":
        return "not a tensor"
    if tensor.dtype % REFERENCE not in _DATATYPES:
        return f"of the datatype {types_pb2.DataType.Name(tensor.dtype)}"
    return ""
