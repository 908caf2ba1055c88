"""TensorFlow Serving's calls that run a model (tfs 3.1–3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from triglot.core.call import Call
from triglot.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    ServingError,
    Unimplemented,
    without_frames,
)
from triglot.core.running import Defer, Running, Sink
from triglot.core.tensor import Array, object_array
from triglot.core.types import InferenceRequest, InferenceResponse, InputTensor, OutputTensor
from triglot.dataplane.dataplane import DataPlane, Decoupled
from triglot.model.signature import DEFAULT_SIGNATURE
from triglot.model.validation import InvalidRequest
from triglot.pb.tfserving import inference_pb2, model_pb2
from triglot.protocols.rows import InferenceHandler
from triglot.protocols.tfserving.checks import check_datatypes, check_predict
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
from triglot.protocols.tfserving.lookup import define, find_called
from triglot.protocols.tfserving.signature_def import METHOD_NAMES
from triglot.scheduling.servable import Servable

_OUTPUTS_OF = {"classify": classify_outputs, "regress": regress_outputs}


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
        """Run Predict. Raises `ServingError` with TensorFlow Serving's texts."""
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
        """Run Classify. Raises `ServingError` with TensorFlow Serving's texts."""
        with find_called(self._dataplane, request.spec, call) as servable:
            return await self.classify_on(servable, request, call)

    async def classify_on(self, servable: Servable, request: ExamplesRequest, call: Call) -> Classification:
        """Run as `classify`, on a version that the caller has leased."""
        spec, outputs = await self._run_examples(servable, request, "classify", call)
        return Classification(spec, classifications(outputs, len(request.examples)))

    async def regress(self, request: ExamplesRequest, call: Call) -> Regression:
        """Run Regress. Raises `ServingError` with TensorFlow Serving's texts."""
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
    """Returns the name of the signature to call: the requested or the default one."""
    return (spec.signature_name if spec else "") or DEFAULT_SIGNATURE


def _check_tasks(servable: Servable, request: MultiRequest) -> None:
    """Raises `InvalidArgument`, or `Unimplemented` for a method that takes no examples (tfs 3.4)."""
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
