"""Encodes recorded requests as TensorFlow Serving's PredictionLog in TFRecord format (tfs 6.7). Pure functions."""

from __future__ import annotations

from triglot.core.tensor import bytes_elements, datatype_of
from triglot.core.types import InferenceResponse, OutputTensor
from triglot.dataplane.recorder import Record
from triglot.model.validation import bind_inputs
from triglot.pb.tfserving import inference_pb2, model_pb2, prediction_log_pb2
from triglot.protocols.tfserving.codec import encode_predict, encode_predict_request, spec_message
from triglot.protocols.tfserving.inference import (
    INPUTS,
    classification_message,
    classifications,
    encode_examples,
    regression_message,
    regressions,
)
from triglot.protocols.tfserving.tfrecord import framed
from triglot.protocols.wire import length_prefix, serialize

_REQUEST, _RESPONSE = 1, 2
_LOGS = {"predict": 6, "classify": 2, "regress": 3}
"""Field number in PredictionLog of each method."""


def encode_record(record: Record) -> bytes:
    """Returns a record of a TFRecord file.

    Requests of Classify and Regress become such logs, all others a Predict log. The logged request names no
    version, so that it can be replayed on any; the response names it. Raises `InvalidArgument` for outputs that
    are no valid result of Classify or Regress.
    """
    request, name = record.request, record.signature_name
    request_spec = model_pb2.ModelSpec(name=record.model, signature_name=name)
    spec = spec_message(record.model, record.version, name)
    head = prediction_log_pb2.PredictionLog()
    head.log_metadata.model_spec.CopyFrom(spec)
    head.log_metadata.sampling_config.sampling_rate = record.rate
    head.log_metadata.timestamp_secs = record.seconds
    inputs = bind_inputs(record.signature, request)
    if request.method == "predict":
        tensors = [OutputTensor(key, datatype_of(array), array) for key, array in inputs.items()]
        encoded = encode_predict_request(request_spec, tensors, request.outputs)
        response = InferenceResponse(record.model, str(record.version), "", record.outputs)
        answer = encode_predict(response, name, as_content=True)
    else:
        examples = bytes_elements(inputs[INPUTS])
        encoded = encode_examples(request_spec, examples)
        if request.method == "classify":
            classes = classification_message(classifications(record.outputs, len(examples)))
            answer = serialize(inference_pb2.ClassificationResponse(result=classes, model_spec=spec))
        else:
            values = regression_message(regressions(record.outputs, len(examples)))
            answer = serialize(inference_pb2.RegressionResponse(result=values, model_spec=spec))
    log = _field(_REQUEST, encoded) + _field(_RESPONSE, answer)
    return framed(serialize(head) + _field(_LOGS[request.method], log))


def _field(number: int, payload: bytes) -> bytes:
    return length_prefix(number, len(payload)) + payload
