"""What the checks of TensorFlow Serving's client use: its stubs, blocking or of grpc.aio, and filled requests."""

import inspect
from contextlib import asynccontextmanager
from pathlib import Path

import checks
import grpc
import numpy as np
import tensorflow as tf
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

Code = grpc.StatusCode
SECONDS = 60
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
FIELDS = {
    tf.float32: "float_val",
    tf.float64: "double_val",
    tf.float16: "half_val",
    tf.bfloat16: "half_val",
    tf.int64: "int64_val",
    tf.uint32: "uint32_val",
    tf.uint64: "uint64_val",
    tf.bool: "bool_val",
    tf.string: "string_val",
    tf.complex64: "scomplex_val",
    tf.complex128: "dcomplex_val",
} | dict.fromkeys((tf.int8, tf.int16, tf.int32, tf.uint8, tf.uint16), "int_val")
FIELDS |= dict.fromkeys((tf.qint8, tf.quint8, tf.qint16, tf.quint16, tf.qint32), "int_val")
"""The field of a TensorProto that holds the elements of a dtype."""


class Stubs:
    """The generated stubs of one server. Their methods answer, or give what is to be awaited."""

    def __init__(self, channel):
        self.channel = channel
        self.predictions = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(channel)

    async def predict(self, model, signature="", output_filter=(), **inputs):
        request = predict_request(model, signature, **inputs)
        request.output_filter.extend(output_filter)
        return await call(self.predictions.Predict, request)

    async def classify(self, model, signature, *examples, **context):
        request = examples_request(classification_pb2.ClassificationRequest, model, signature, examples, **context)
        return await call(self.predictions.Classify, request)

    async def regress(self, model, signature, *examples, **context):
        request = examples_request(regression_pb2.RegressionRequest, model, signature, examples, **context)
        return await call(self.predictions.Regress, request)

    async def metadata(self, model, *fields):
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=fields)
        request.model_spec.CopyFrom(spec_of(request, model))
        return await call(self.predictions.GetModelMetadata, request)

    async def status(self, model):
        """The versions as (version, state, code, text)."""
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.CopyFrom(spec_of(request, model))
        response = await call(self.models.GetModelStatus, request)
        return [
            (
                version.version,
                get_model_status_pb2.ModelVersionStatus.State.Name(version.state),
                version.status.error_code,
                version.status.error_message,
            )
            for version in response.model_version_status
        ]

    async def y(self, model, values):
        """What a model of input x gives for these floats, and the version that did."""
        response = await self.predict(model, x=np.array(values, np.float32))
        return list(response.outputs["y"].float_val), response.model_spec.version.value


class Subject(Stubs):
    """A server with every model of a folder, REST's address, and another server, whose models checks choose."""

    def __init__(self, channel, rest_address, other_channel, folder):
        super().__init__(channel)
        self.rest = f"http://{rest_address}/v1/models"
        self.other = Stubs(other_channel)
        self.folder = folder


async def call(method, request, seconds=SECONDS, **options):
    """The answer of a stub's method, of whichever kind it is."""
    answer = method(request, timeout=seconds, **options)
    return await answer if inspect.isawaitable(answer) else answer


def start(method, request):
    """A running call: `method.future`, as TensorFlow Serving's own example has it, or its like of grpc.aio."""
    return getattr(method, "future", method)(request, timeout=SECONDS)


async def answer_of(running):
    """The answer of a running call."""
    return await running if inspect.isawaitable(running) else running.result()


async def failure(coroutine):
    """The code and the text with which a call fails."""
    with checks.Raises(grpc.RpcError) as caught:
        await coroutine
    return caught.error.code(), caught.error.details()


async def refused(coroutine, code, text):
    """Asserts that a call fails so, and with exactly this text."""
    found = await failure(coroutine)
    assert found == (code, text), found


def spec_of(request, model):
    """A ModelSpec: of the model's name, or (name, version), or (name, label)."""
    spec = type(request.model_spec)()
    spec.name, version = model if isinstance(model, tuple) else (model, None)
    if isinstance(version, str):
        spec.version_label = version
    elif version is not None:
        spec.version.value = version
    return spec


def predict_request(model, signature="", **inputs):
    request = predict_pb2.PredictRequest()
    request.model_spec.CopyFrom(spec_of(request, model))
    request.model_spec.signature_name = signature
    for name, value in inputs.items():
        is_proto = isinstance(value, TensorProto)
        request.inputs[name].CopyFrom(value if is_proto else tf.make_tensor_proto(value))
    return request


def examples_request(request_class, model, signature, examples, **context):
    """The examples, and the context if there is one, are features by name."""
    request = request_class()
    request.model_spec.CopyFrom(spec_of(request, model))
    request.model_spec.signature_name = signature
    fill_input(request.input, examples, **context)
    return request


def multi_request(tasks, *examples):
    """Of (model, signature, method) each; an absent model leaves the ModelSpec empty."""
    request = inference_pb2.MultiInferenceRequest()
    for model, signature, method in tasks:
        task = request.tasks.add(method_name=f"tensorflow/serving/{method}")
        task.model_spec.CopyFrom(spec_of(task, model))
        task.model_spec.signature_name = signature
    fill_input(request.input, examples)
    return request


def fill_input(message, examples, **context):
    kind = message.example_list_with_context if context else message.example_list
    kind.SetInParent()
    kind.examples.extend([example(**features) for features in examples])
    if context:
        kind.context.CopyFrom(example(**context))


def example(**features):
    """A feature's value is a float, an integer or bytes, or a list of such."""
    message = tf.train.Example()
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        feature = message.features.feature[name]
        lists = {int: feature.int64_list, float: feature.float_list, bytes: feature.bytes_list}
        lists[type(values[0])].value.extend(values)
    return message


def bare_tensor(array):
    """A TensorProto without elements."""
    return TensorProto(
        dtype=tf.as_dtype(array.dtype).as_datatype_enum, tensor_shape=tf.TensorShape(array.shape).as_proto()
    )


def as_content(array):
    """A TensorProto whose elements are bytes; not for strings."""
    proto = bare_tensor(array)
    proto.tensor_content = array.tobytes()
    return proto


def as_values(array):
    """A TensorProto whose elements are numbers, or strings, in the field of the dtype."""
    proto = bare_tensor(array)
    dtype = tf.as_dtype(array.dtype)
    if dtype.is_complex:
        array = array.reshape(-1).view(array.real.dtype)
    elif FIELDS[dtype] == "half_val":
        array = array.view(np.uint16)
    getattr(proto, FIELDS[dtype]).extend(array.ravel().tolist())
    return proto


@asynccontextmanager
async def blocking_stubs(grpc_address, rest_address, other_address, folder):
    with (
        grpc.insecure_channel(grpc_address, UNLIMITED) as channel,
        grpc.insecure_channel(other_address, UNLIMITED) as other,
    ):
        yield Subject(channel, rest_address, other, Path(folder))


@asynccontextmanager
async def aio_stubs(grpc_address, rest_address, other_address, folder):
    async with (
        grpc.aio.insecure_channel(grpc_address, UNLIMITED) as channel,
        grpc.aio.insecure_channel(other_address, UNLIMITED) as other,
    ):
        yield Subject(channel, rest_address, other, Path(folder))
