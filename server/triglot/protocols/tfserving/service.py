"""TensorFlow Serving's calls that run a model (tfs 3.1–3.4), how they find it, and what they check."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    ServingError,
    Unavailable,
    Unimplemented,
    without_frames,
)
from triglot.core.operation import Permission
from triglot.core.running import Defer, Running, Sink
from triglot.core.tensor import Array, object_array
from triglot.core.types import InferenceRequest, InferenceResponse, InputTensor, OutputTensor, TensorSpec
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.request_path import Decoupled
from triglot.model.signature import DEFAULT_SIGNATURE, Signature
from triglot.model.validation import InvalidRequest
from triglot.pb.tfserving import inference_pb2, metadata_pb2, model_pb2, signature_pb2
from triglot.protocols.rows import InferenceHandler
from triglot.protocols.tfserving.codec import (
    ModelSpec,
    PredictRequest,
    spec_message,
)
from triglot.protocols.tfserving.inference import (
    INPUTS,
    Classes,
    ExamplesRequest,
    MultiRequest,
    check_examples,
    classification_message,
    classifications,
    classify_outputs,
    regress_outputs,
    regression_message,
    regressions,
)
from triglot.protocols.tfserving.tensor import TYPES, dtype_name, tensor_message
from triglot.repository.manager.registry import UnknownLabel
from triglot.scheduling.servable import Servable

_OUTPUTS_OF = {"classify": classify_outputs, "regress": regress_outputs}


# --- signatures as messages (tfs 3.5) ---

METHOD_NAMES = {
    "predict": "tensorflow/serving/predict",
    "classify": "tensorflow/serving/classify",
    "regress": "tensorflow/serving/regress",
}


def signature_def(name: str, signature: Signature, given: Mapping[str, bytes]) -> signature_pb2.SignatureDef:
    """Return a signature's SignatureDef: the one in the model's file (`given`), or one made of the signature."""
    if name in given:
        return signature_pb2.SignatureDef.FromString(given[name])
    message = signature_pb2.SignatureDef(method_name=METHOD_NAMES[signature.method])
    _fill_infos(message.inputs, signature.inputs)
    _fill_infos(message.outputs, signature.outputs)
    for alias, value in signature.defaults.items():
        message.defaults[alias].CopyFrom(tensor_message(value, signature.input_rules[alias].spec.datatype))
    return message


def _fill_infos(infos: Any, specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        info = infos[spec.name]
        info.name = f"{spec.name}:0"
        info.dtype = TYPES[spec.datatype]
        if spec.shape is None:
            info.tensor_shape.unknown_rank = True
        else:
            info.tensor_shape.SetInParent()
            for dim in spec.shape:
                info.tensor_shape.dim.add(size=dim)


def signature_def_map(signatures: Mapping[str, Signature], given: Mapping[str, bytes]) -> Any:
    """Return all signatures of a model, including those of its file that cannot be called."""
    message = metadata_pb2.SignatureDefMap()
    for name, signature in signatures.items():
        message.signature_def[name].CopyFrom(signature_def(name, signature, given))
    for name, data in given.items():
        message.signature_def[name].CopyFrom(signature_pb2.SignatureDef.FromString(data))
    return message


# --- the version for a ModelSpec (tfs 3.1) ---


def require_spec(spec: ModelSpec | None) -> ModelSpec:
    """Return the ModelSpec. Raise `InvalidArgument` for a request without one."""
    if spec is None:
        raise InvalidArgument("Missing ModelSpec")
    return spec


def find_called(dataplane: DataPlane, spec: ModelSpec | None, call: Call) -> Servable:
    """Return what `find_servable` does, and records model and version in the call."""
    call.model_name = require_spec(spec).name
    servable = called_version(dataplane, spec, find_servable(dataplane, call.permission, spec), call)
    call.model_version = servable.version
    return servable


def called_version(dataplane: DataPlane, spec: ModelSpec | None, servable: Servable, call: Call) -> Servable:
    """Return the version that runs a call, for the one that `find_servable` returned."""
    names_one = spec is not None and (spec.version is not None or spec.label is not None)
    return servable if names_one else dataplane.routed(servable, call)


def find_servable(dataplane: DataPlane, permission: Permission, spec: ModelSpec | None) -> Servable:
    """Return the version for a call, to be leased by `with`.

    Raise `InvalidArgument` or `NotFound`, and `PermissionDenied` for a model that the client may not use.
    """
    spec = require_spec(spec)
    if not spec.name:
        raise InvalidArgument("ModelSpec has no name specified.")
    version = "" if spec.version is None else str(spec.version)
    try:
        if spec.label == "":
            permission.check_model(spec.name)
            raise UnknownLabel("an empty label")
        return dataplane.servable(permission, spec.name, version, spec.label or "")
    except UnknownLabel:
        raise InvalidArgument(f"Unrecognized servable version label: {spec.label}") from None
    except (ModelNotFound, Unavailable, InvalidArgument):
        # Clients get the same error for a version that is loading and one that never existed (tfs 0.7).
        number = dataplane.labelled(permission, spec.name, spec.label) if spec.label else spec.version
        which = f"Latest({spec.name})" if number is None else f"Specific({spec.name}, {number})"
        why = dataplane.load_error(permission, spec.name, "" if number is None else str(number))
        raise NotFound(f"Servable not found for request: {which}{why and f': {why}'}") from None


def define(servable: Servable, name: str) -> signature_pb2.SignatureDef:
    """Return the SignatureDef of one of the version's signatures."""
    return signature_def(name, servable.signatures[name], servable.model.signature_defs)


# --- calls ---


@dataclass(slots=True)
class Prediction:
    """The response of Predict, and the signature that was called."""

    response: InferenceResponse
    signature_name: str


@dataclass(frozen=True, slots=True)
class Classification:
    """The result of Classify for each example, and the ModelSpec of the version that gave it."""

    spec: model_pb2.ModelSpec
    examples: list[Classes]


@dataclass(frozen=True, slots=True)
class Regression:
    """The result of Regress for each example (FP32), and the ModelSpec of the version that gave it."""

    spec: model_pb2.ModelSpec
    values: Array


class Predictions(InferenceHandler):
    """The calls of PredictionService that run a model, for gRPC, REST and warm-up; the handler of Predict."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    async def predict(self, request: PredictRequest, call: Call) -> Prediction:
        """Run Predict. Raise `ServingError` with TensorFlow Serving's texts."""
        with find_called(self._dataplane, request.spec, call) as servable:
            return await self.predict_on(servable, request, call)

    def start(self, request: PredictRequest, call: Call, sink: Sink, defer: Defer | None = None) -> Running:
        """Run Predict: see `InferenceHandler`."""
        return self.start_on(find_called(self._dataplane, request.spec, call), request, call, sink, defer)

    def start_on(
        self,
        servable: Servable,
        request: PredictRequest,
        call: Call,
        sink: Sink,
        defer: Defer | None = None,
        *,
        leased: bool = False,
    ) -> Running:
        """Run as `start`, on this version. `leased`: see `DataPlane.start`."""
        request.servable = servable
        name = _signature_name(request.spec)
        signature = servable.signatures.get(name)
        if signature is None:
            raise FailedPrecondition(f'Serving signature key "{name}" not found.{servable.why_unservable(name)}')
        if request.unreadable:
            check_predict(request, signature, partial(define, servable, name))
        outputs = request.output_filter
        if signature.unservable_outputs and not outputs and name in servable.model.signature_defs:
            # An empty filter means all outputs of the SignatureDef (tfs 3.2).
            outputs = [*signature.output_rules, *signature.unservable_outputs]
        inference = _inference(servable, name, request.inputs, outputs, "predict")
        return self._dataplane.start(servable, inference, call, sink, defer, leased=leased)

    def answer(self, response: InferenceResponse, request: PredictRequest) -> Prediction:
        return Prediction(response, _signature_name(request.spec))

    def map_error(self, error: ServingError, request: PredictRequest, _: Call) -> ServingError:
        servable, name = request.servable, _signature_name(request.spec)
        assert isinstance(servable, Servable)  # Set before the request could fail.
        if isinstance(error, Decoupled):
            return _streams(servable)
        if isinstance(error, InvalidRequest):
            # The error is found again in TensorFlow Serving's order of checks, for its text.
            try:
                check_predict(request, servable.signatures[name], partial(define, servable, name))
            except ServingError as found:
                return without_frames(found)
        return error

    async def predict_on(self, servable: Servable, request: PredictRequest, call: Call) -> Prediction:
        """Run as `predict`, on a version that the caller has leased."""
        start = partial(self.start_on, servable, leased=True)
        prediction: Prediction = await self.infer(request, call, start)
        return prediction

    async def classify(self, request: ExamplesRequest, call: Call) -> Classification:
        """Run Classify. Raise `ServingError` with TensorFlow Serving's texts."""
        with find_called(self._dataplane, request.spec, call) as servable:
            return await self.classify_on(servable, request, call)

    async def classify_on(self, servable: Servable, request: ExamplesRequest, call: Call) -> Classification:
        """Run as `classify`, on a version that the caller has leased."""
        spec, outputs = await self._run_examples(servable, request, "classify", call)
        return Classification(spec, classifications(outputs, len(request.examples)))

    async def regress(self, request: ExamplesRequest, call: Call) -> Regression:
        """Run Regress. Raise `ServingError` with TensorFlow Serving's texts."""
        with find_called(self._dataplane, request.spec, call) as servable:
            return await self.regress_on(servable, request, call)

    async def regress_on(self, servable: Servable, request: ExamplesRequest, call: Call) -> Regression:
        """Run as `regress`, on a version that the caller has leased."""
        spec, outputs = await self._run_examples(servable, request, "regress", call)
        return Regression(spec, regressions(outputs, len(request.examples)))

    async def _run_examples(
        self, servable: Servable, request: ExamplesRequest, method: str, call: Call
    ) -> tuple[model_pb2.ModelSpec, list[OutputTensor]]:
        name = _signature_name(request.spec)
        signature = servable.signatures.get(name)
        if signature is None:
            raise InvalidArgument(f"No signature was found with the name: {name}{servable.why_unservable(name)}")
        outputs = _OUTPUTS_OF[method](signature, partial(define, servable, name))
        check_examples(request.examples)
        count = len(request.examples)
        examples = InputTensor(INPUTS, "BYTES", (count,), object_array(request.examples, (count,)))
        check_datatypes([examples], signature)
        inference = _inference(servable, name, [examples], outputs, method)
        try:
            response = await self._dataplane.infer_on(servable, inference, call)
        except Decoupled:
            raise _streams(servable) from None
        return spec_message(servable.name, servable.version, name), response.outputs

    async def multi_inference(self, request: MultiRequest, call: Call) -> inference_pb2.MultiInferenceResponse:
        """Run all tasks on one version; the first error is raised (tfs 3.4)."""
        spec = request.tasks[0][0] if request.tasks else ModelSpec("")
        with find_called(self._dataplane, spec, call) as servable:
            return await self.multi_inference_on(servable, request, call)

    async def multi_inference_on(
        self, servable: Servable, request: MultiRequest, call: Call
    ) -> inference_pb2.MultiInferenceResponse:
        """Run as `multi_inference`, on a version that the caller has leased."""
        _check_tasks(servable, request)
        check_examples(request.examples)
        response = inference_pb2.MultiInferenceResponse()
        for spec, method in request.tasks:
            task = ExamplesRequest(spec, request.examples)
            result = response.results.add()
            if method == METHOD_NAMES["classify"]:
                classified = await self.classify_on(servable, task, call)
                result.classification_result.CopyFrom(classification_message(classified.examples))
                result.model_spec.CopyFrom(classified.spec)
            else:
                regressed = await self.regress_on(servable, task, call)
                result.regression_result.CopyFrom(regression_message(regressed.values))
                result.model_spec.CopyFrom(regressed.spec)
        return response


def _inference(
    servable: Servable, signature_name: str, inputs: list[InputTensor], outputs: Sequence[str], method: str
) -> InferenceRequest:
    return InferenceRequest(
        servable.name,
        inputs=inputs,
        outputs=outputs,
        signature_name=signature_name,
        lenient_shapes=True,
        method=method,
    )


def _streams(servable: Servable) -> Unimplemented:
    return Unimplemented(
        f"model '{servable.name}' returns a stream, which TensorFlow Serving's API does not support"
    )


def _signature_name(spec: ModelSpec | None) -> str:
    """Return the name of the signature to call: the requested or the default one."""
    return (spec.signature_name if spec else "") or DEFAULT_SIGNATURE


def _check_tasks(servable: Servable, request: MultiRequest) -> None:
    """Raise `InvalidArgument`, or `Unimplemented` for a method that takes no examples (tfs 3.4)."""
    seen: set[str] = set()
    for spec, method in request.tasks:
        if not spec.name:
            raise InvalidArgument("Found ModelSpec with an empty model name.")
        if spec.name != request.tasks[0][0].name:
            raise InvalidArgument("All ModelSpecs in a MultiInferenceRequest must access the same model name.")
        name = _signature_name(spec)
        if name in seen:
            raise InvalidArgument(f"Duplicate evaluation of signature: {name}")
        seen.add(name)
        if name not in servable.signatures:
            why = servable.why_unservable(name)
            raise InvalidArgument(f"Requested signature not found in model graph: {name}{why}")
        if method not in (METHOD_NAMES["classify"], METHOD_NAMES["regress"]):
            raise Unimplemented(f"Unsupported signature method_name: {method}")


# --- checks of requests, in TensorFlow Serving's order and with its texts (tfs 3.2) ---


def listed(names: Collection[str]) -> str:
    """Return a set of names in the form of some messages."""
    return ",".join(sorted(names))


def braced(names: Collection[str]) -> str:
    """Return a set of names in the form of the other messages."""
    return f"{{{listed(names)}}}"


def check_predict(
    request: PredictRequest, signature: Signature, define: Callable[[], signature_pb2.SignatureDef]
) -> None:
    """Raise `InvalidArgument` for the first mismatch with the signature; shapes are not checked.

    `define` returns the signature's definition, for texts that name its tensors.
    """
    rules = signature.input_rules
    sent = {tensor.name for tensor in request.inputs}
    if (sent != rules.keys() and not signature.any_inputs) or request.unreadable:
        _check_names(request, signature, sent | request.unreadable.keys(), define)
    if request.output_filter:
        _check_filter(request.output_filter, signature)
    if not signature.any_inputs:
        check_datatypes(request.inputs, signature)


def check_datatypes(inputs: Iterable[InputTensor], signature: Signature) -> None:
    """Raise `InvalidArgument` for the first of the signature's inputs that has a wrong datatype."""
    rules = signature.input_rules
    wrong = {tensor.name: tensor for tensor in inputs if tensor.datatype != rules[tensor.name].spec.datatype}
    if wrong:
        at, name = next((at, name) for at, name in enumerate(sorted(rules)) if name in wrong)
        wanted, sent = dtype_name(rules[name].spec.datatype), dtype_name(wrong[name].datatype)
        raise InvalidArgument(f"Expects arg[{at}] to be {wanted} but {sent} is provided")


def _check_names(
    request: PredictRequest,
    signature: Signature,
    sent: Collection[str],
    define: Callable[[], signature_pb2.SignatureDef],
) -> None:
    wanted, may_lack = signature.input_rules.keys(), signature.may_lack
    if len(sent) > len(wanted) or (len(sent) < len(wanted) and not may_lack):
        raise InvalidArgument(
            f"input size does not match signature: {len(sent)}!={len(wanted)} len({braced(sent)}) != "
            f"len({braced(wanted)}). Sent extra: {braced(set(sent) - wanted)}. Missing but required: "
            f"{braced(wanted - set(sent))}."
        )
    for alias in sorted(wanted):
        if alias in request.unreadable:
            raise InvalidArgument(f"tensor parsing error: {alias}")
        if alias not in sent and alias not in may_lack:
            raise InvalidArgument(
                f"Signature input alias: {alias}(feed name: {define().inputs[alias].name}) not found in request "
                f"and no default value provided. Inputs expected to be in the request {braced(sent)}, or default "
                f"input alias set: {listed(signature.defaults)}"
            )
    used = wanted & set(sent)
    if len(used) < len(sent):
        raise InvalidArgument(
            f"Inputs contains invalid name. Used request inputs: {listed(used)}, request input: {listed(sent)}"
        )


def _check_filter(output_filter: Collection[str], signature: Signature) -> None:
    seen: set[str] = set()
    known = signature.output_rules.keys() | signature.unservable_outputs.keys()
    for alias in output_filter:
        if alias not in known:
            raise InvalidArgument(
                f"output tensor alias not found in signature: {alias} Outputs expected to be in the set "
                f"{braced(known)}."
            )
        if alias in seen:
            raise InvalidArgument(f"duplicate output tensor alias: {alias}")
        seen.add(alias)
