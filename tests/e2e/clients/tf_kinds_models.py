"""Writes SavedModels with outputs and inputs of further kinds, and in further forms: FOLDER/NAME/VERSION/….

python tf_kinds_models.py FOLDER NAME [NAME …]
"""

import sys
from pathlib import Path

import tensorflow as tf
import tf_models
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tf_models import save, signature, v1, writes


def doubled():
    x = v1.placeholder(tf.float32, [None], name="x")
    return x, tf.multiply(x, 2.0, name="y")


def endless(x):
    """A loop that never ends."""
    step = tf.minimum(tf.size(x), 1)
    (number,) = tf.while_loop(lambda at: at >= 0, lambda at: at * step, [step], parallel_iterations=1)
    return number


OTHERS = {
    "checked": lambda x: v1.debugging.check_numerics(1.0 / x, "not finite"),
    "endless": endless,
    "sparse": lambda x: tf.sparse.from_dense(tf.reshape(x, [-1, 1])),
    "ragged": lambda x: tf.RaggedTensor.from_tensor(tf.reshape(x, [-1, 1])),
    "variant": lambda x: tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=tf.constant([], tf.int32)),
    "resource": lambda _: tf.raw_ops.MutableHashTableV2(key_dtype=tf.string, value_dtype=tf.int64),
    "quantized": lambda x: tf.quantization.quantize(x, 0.0, 1.0, tf.quint8).output,
}


@writes
def kinds(folder):
    """A signature for each kind of `OTHERS`: y, and an output `other` that is of this kind.

    `only_sparse` has no other output, and `takes_sparse` cannot be called.
    """

    def build():
        x, y = doubled()
        others = {name: make(x) for name, make in OTHERS.items()}
        signatures = {name: signature({"x": x}, {"y": y, "other": other}) for name, other in others.items()}
        sparse = v1.sparse_placeholder(tf.float32, [None, 1])
        return signatures | {
            "serving_default": signature({"x": x}, {"y": y, "other": others["sparse"]}),
            "only_sparse": signature({"x": x}, {"other": others["sparse"]}),
            "takes_sparse": signature({"x": sparse}, {"y": tf.sparse.reduce_sum(sparse)}),
        }

    save(folder / "1", build)


@writes
def unusable(folder):
    """Its only signature takes a sparse tensor."""

    def build():
        x = v1.sparse_placeholder(tf.float32, [None, 1])
        return {"serving_default": signature({"x": x}, {"y": tf.sparse.reduce_sum(x)})}

    save(folder / "1", build)


def save_as_text(folder):
    def build():
        x, y = doubled()
        return {"serving_default": signature({"x": x}, {"y": y + v1.get_variable("zero", initializer=0.0)})}

    save(folder, build, as_text=True)


@writes
def text(folder):
    save_as_text(folder / "1")


@writes
def triton_text(folder):
    save_as_text(folder / "1" / "model.savedmodel")


# The packages that have these operations are not needed to write the models.


def unregistered(folder, operation):
    """A model whose graph has an operation that TensorFlow lacks."""

    def build():
        x, y = doubled()
        return {"serving_default": signature({"x": x}, {"y": y})}

    save(folder / "1", build)
    file = folder / "1" / "saved_model.pb"
    message = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    node = message.meta_graphs[0].graph_def.node.add(name="unregistered", op=operation)
    node.attr["dtype"].type = types_pb2.DT_FLOAT
    file.write_bytes(message.SerializeToString())


@writes
def needs_text(folder):
    unregistered(folder, "TFText>WhitespaceTokenizeWithOffsetsV2")


@writes
def needs_old_text(folder):
    unregistered(folder, "WordpieceTokenizeWithOffsets")


@writes
def needs_forests(folder):
    unregistered(folder, "SimpleMLCreateModelResource")


@writes
def needs_unknown(folder):
    unregistered(folder, "NobodyKnowsThis")


@writes
def needs_library(folder):
    """The features of 16 kHz audio, by a library that comes with TensorFlow and is not loaded with it."""
    (library,) = Path(tf.__file__).parent.glob("lite/experimental/microfrontend/python/ops/_*.so")
    operations = tf.load_op_library(str(library))

    def build():
        x = v1.placeholder(tf.int16, [None], name="x")
        return {
            "serving_default": signature(
                {"x": x}, {"y": operations.audio_microfrontend(audio=x, out_type=tf.float32)}
            )
        }

    save(folder / "1", build)


if __name__ == "__main__":
    tf_models.main(*sys.argv[1:])
