"""TensorFlow's own protobuf classes and parsers at work: a JSON object in a file in, one out, all bytes in hex.

    python tensorflow_messages.py JOB.json

`arrays` (dtype, shape, elements) become TensorProtos made by `tf.make_tensor_proto`, in `made`, and one
PredictRequest, in `request`. Each of `tensors` (serialized TensorProtos) is parsed as TensorFlow's C++ does it,
into `parsed`: dtype, shape and elements, or null. Each of `responses` (serialized PredictResponses) is read:
`outputs` has their model specs and what `tf.make_ndarray` makes of the outputs. `records` are written as a
TFRecord file, to `file`. Elements are a list of strings for strings, and the array's bytes for everything else.
"""

# Written for an environment that has no types.
# mypy: ignore-errors

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow_serving.apis import predict_pb2


def array_of(dtype, shape, elements):
    if dtype == "DT_STRING":
        strings = np.empty(len(elements), object)
        strings[:] = [bytes.fromhex(element) for element in elements]
        return strings.reshape(shape)
    numpy_dtype = tf.as_dtype(
        TensorProto.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_name[dtype].number
    )
    return np.frombuffer(bytes.fromhex(elements), numpy_dtype.as_numpy_dtype).reshape(shape)


def elements_of(array):
    if array.dtype.hasobject:
        return [element.hex() for element in array.ravel().tolist()]
    return array.tobytes().hex()


def as_object(dtype):
    return object if dtype == tf.string else None  # A scalar string comes as bytes, and numpy's own drop zeros.


def request_of(protos):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "m"
    request.model_spec.version.value = 3
    request.model_spec.signature_name = "s"
    request.output_filter.extend(["y", "z"])
    request.request_options.max_cache_length = 7
    request.predict_streamed_options.split_dimensions["x"] = 1
    for name, proto in protos.items():
        request.inputs[name].CopyFrom(proto)
    return request


def parsed(wire):
    message = TensorProto.FromString(wire)
    try:
        tensor = tf.raw_ops.ParseTensor(serialized=wire, out_type=message.dtype)
    except (tf.errors.InvalidArgumentError, TypeError, ValueError):
        return None  # TypeError and ValueError: a type that there is not.
    return [message.dtype, tensor.shape.as_list(), elements_of(np.array(tensor.numpy(), as_object(tensor.dtype)))]


def outputs_of(wire):
    response = predict_pb2.PredictResponse.FromString(wire)
    spec = response.model_spec
    outputs = {}
    for name, tensor in response.outputs.items():
        array = tf.make_ndarray(tensor)
        fields = [field.name for field, _ in tensor.ListFields()]
        outputs[name] = [tensor.dtype, list(array.shape), elements_of(np.asarray(array)), fields]
    return [[spec.name, spec.version.value, spec.signature_name, spec.version_label], outputs]


def file_of(records):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records"
        with tf.io.TFRecordWriter(str(file)) as writer:
            for record in records:
                writer.write(bytes.fromhex(record))
        return file.read_bytes().hex()


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    arrays = [array_of(*array) for array in job.get("arrays", [])]
    protos = {
        f"{at}": tf.make_tensor_proto(array, dtype=array.dtype if array.dtype != object else tf.string)
        for at, array in enumerate(arrays)
    }
    answer = {
        "made": [proto.SerializeToString().hex() for proto in protos.values()],
        "request": request_of(protos).SerializeToString().hex(),
        "parsed": [parsed(bytes.fromhex(wire)) for wire in job.get("tensors", [])],
        "outputs": [outputs_of(bytes.fromhex(wire)) for wire in job.get("responses", [])],
        "file": file_of(job.get("records", [])),
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
