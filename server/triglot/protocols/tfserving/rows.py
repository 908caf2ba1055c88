"""The rows of TensorFlow Serving's gRPC services (tfs 1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from triglot.core.http import no_work
from triglot.core.operation import Operation
from triglot.core.tensor import MessageBytes, Scattered
from triglot.pb.tfserving import inference_pb2, management_pb2, metadata_pb2
from triglot.protocols.rows import Kind, Method, Service
from triglot.protocols.tfserving.codec import (
    ELEMENT_WORK,
    PredictDecoder,
    decoding_size,
    encode_predict,
    encoding_size,
    scatter_predict,
)
from triglot.protocols.tfserving.inference import (
    classification_message,
    decode_examples,
    decode_multi,
    regression_message,
)
from triglot.protocols.tfserving.models import Models
from triglot.protocols.tfserving.service import Classification, Prediction, Predictions, Regression
from triglot.protocols.wire import parse_control, serialize

PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"
PROTOCOL = "tfserving"
MAX_ERROR_BYTES = 1024
TRUNCATED = "...TRUNCATED"


def tfserving_services(predictions: Predictions, models: Models, *, tensor_content: bool) -> list[Service]:
    """Return both services. `tensor_content`: Predict's outputs are in that field (tfs 0.2)."""
    infer, described = Operation.INFER, Operation.METADATA
    classify = partial(decode_examples, inference_pb2.ClassificationRequest)
    regress = partial(decode_examples, inference_pb2.RegressionRequest)
    metadata = partial(parse_control, metadata_pb2.GetModelMetadataRequest)
    status = partial(parse_control, management_pb2.GetModelStatusRequest)
    reload = partial(parse_control, management_pb2.ReloadConfigRequest)

    def row(
        name: str, decode: Any, run: Any, encode: Any, answer_size: Any, decode_size: Any, **more: Any
    ) -> Method:
        return Method(
            name, Kind.UNARY, infer, decode, run, encode, answer_size, decode_size, details=_truncated, **more
        )

    encode = partial(_encode_prediction, tensor_content)
    scatter = partial(_scatter_prediction, tensor_content)
    run = predictions
    return [
        Service(
            PREDICTION_SERVICE,
            (
                row(
                    "Predict",
                    PredictDecoder(),
                    None,
                    encode,
                    _prediction_size,
                    decoding_size,
                    scatter=scatter,
                    inference=predictions,
                ),
                row("Classify", classify, run.classify, _encode_classification, _classes, len),
                row("Regress", regress, run.regress, _encode_regression, _values, len),
                row("MultiInference", decode_multi, run.multi_inference, serialize, no_work, len),
                _control_row("GetModelMetadata", described, metadata, models.metadata),
            ),
            PROTOCOL,
        ),
        Service(
            MODEL_SERVICE,
            (
                _control_row("GetModelStatus", described, status, models.status),
                _control_row("HandleReloadConfigRequest", Operation.MODEL_CONTROL, reload, models.reload),
            ),
            PROTOCOL,
        ),
    ]


def _control_row(name: str, operation: Operation, decode: Callable[[MessageBytes], Any], call: Any) -> Method:
    return Method(name, Kind.UNARY, operation, decode, call, serialize, details=_truncated)


def _truncated(text: str) -> str:
    """Return an error's text, truncated as TensorFlow Serving does over gRPC (tfs 0.22)."""
    encoded = text.encode()
    if len(encoded) <= MAX_ERROR_BYTES:
        return text
    return encoded[:MAX_ERROR_BYTES].decode(errors="ignore") + TRUNCATED


def _encode_prediction(tensor_content: bool, prediction: Prediction) -> bytes:
    return encode_predict(prediction.response, prediction.signature_name, as_content=tensor_content)


def _scatter_prediction(tensor_content: bool, prediction: Prediction) -> bytes | Scattered:
    return scatter_predict(prediction.response, prediction.signature_name, as_content=tensor_content)


def _prediction_size(prediction: Prediction) -> int:
    return encoding_size(prediction.response)


def _classes(answer: Classification) -> int:
    return sum(map(len, answer.examples)) * ELEMENT_WORK


def _values(answer: Regression) -> int:
    return answer.values.size * ELEMENT_WORK


def _encode_classification(answer: Classification) -> bytes:
    result = classification_message(answer.examples)
    return serialize(inference_pb2.ClassificationResponse(model_spec=answer.spec, result=result))


def _encode_regression(answer: Regression) -> bytes:
    result = regression_message(answer.values)
    return serialize(inference_pb2.RegressionResponse(model_spec=answer.spec, result=result))
