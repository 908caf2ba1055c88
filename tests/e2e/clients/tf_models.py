"""Writes the SavedModels that the tests serve, as TensorFlow itself writes them: FOLDER/NAME/VERSION/….

    python tf_models.py FOLDER [NAME …]

Without names it writes all of them. half_plus_two, half_plus_three and counter are our own builds of TensorFlow
Serving's reference models, with the names of their tensors; the others are toys that show one thing each.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from tensorflow.core.framework import tensor_shape_pb2
from tensorflow.core.protobuf import meta_graph_pb2

v1 = tf.compat.v1

PREDICT, CLASSIFY, REGRESS = (f"tensorflow/serving/{method}" for method in ("predict", "classify", "regress"))
IDENTITIES = {
    "float": ("x", tf.float32),
    "double": ("x", tf.float64),
    "half": ("x", tf.float16),
    "bfloat16": ("x", tf.bfloat16),
    "int8": ("x", tf.int8),
    "int16": ("x", tf.int16),
    "int32": ("default", tf.int32),
    "int64": ("x", tf.int64),
    "uint8": ("x", tf.uint8),
    "uint16": ("x", tf.uint16),
    "uint32": ("x", tf.uint32),
    "uint64": ("x", tf.uint64),
    "bool": ("x", tf.bool),
    "complex64": ("x", tf.complex64),
    "complex128": ("x", tf.complex128),
    "qint8": ("x", tf.qint8),
    "quint8": ("x", tf.quint8),
    "qint16": ("x", tf.qint16),
    "quint16": ("x", tf.quint16),
    "qint32": ("x", tf.qint32),
    "string": ("s", tf.string),
    "bytes": ("img_bytes", tf.string),
}
WRITERS = {}


def writes(function):
    """Registers the writer of the model that it is named after."""
    WRITERS[function.__name__] = function
    return function


# --- TensorFlow 1: a graph, a session, and signatures that name tensors ---

ANY_RANK = None


def info(tensor, shape="its own"):
    """What a signature says of a tensor."""
    if shape == "its own":
        return v1.saved_model.utils.build_tensor_info(tensor)
    proto = (
        tensor_shape_pb2.TensorShapeProto(unknown_rank=True)
        if shape is ANY_RANK
        else tf.TensorShape(shape).as_proto()
    )
    return meta_graph_pb2.TensorInfo(name=tensor.name, dtype=tensor.dtype.as_datatype_enum, tensor_shape=proto)


def signature(inputs, outputs, method=PREDICT):
    """A SignatureDef of tensors, or of what `info` says of them."""

    def infos(tensors):
        return {
            alias: tensor if isinstance(tensor, meta_graph_pb2.TensorInfo) else info(tensor)
            for alias, tensor in tensors.items()
        }

    return v1.saved_model.build_signature_def(infos(inputs), infos(outputs), method)


def save(folder, build, tags=("serve",), as_text=False):
    """Saves the graph that `build()` makes; it answers with the signatures, and options of the builder."""
    anywhere = v1.ConfigProto(allow_soft_placement=True)
    with tf.Graph().as_default(), v1.Session(config=anywhere) as session:
        answer = build()
        signatures, options = answer if isinstance(answer, tuple) else (answer, {})
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(folder))
        builder.add_meta_graph_and_variables(session, list(tags), signatures, **options)
        builder.save(as_text)


def variable(value, name):
    """A variable of TensorFlow 1's own kind, whose tensor is a reference."""
    return v1.Variable(value, name=name, use_resource=False)


def parsed_examples(serialized):
    """The features x and x2 of serialized Examples, one float each; x2 may be left out."""
    with v1.name_scope("ParseExample"):
        return tf.raw_ops.ParseExample(
            serialized=serialized,
            names=tf.constant([], tf.string),
            sparse_keys=[],
            dense_keys=[tf.constant("x"), tf.constant("x2")],
            dense_defaults=[tf.constant([], tf.float32), tf.constant([0.0])],
            sparse_types=[],
            dense_shapes=[[1], [1]],
            name="ParseExample",
        ).dense_values


@writes
def half_plus_two(folder):
    def build():
        half, two, three = variable(0.5, "a"), variable(2.0, "b"), variable(3.0, "c")
        examples = v1.placeholder(tf.string, name="tf_example")
        feature_x, feature_x2 = parsed_examples(examples)
        x, x2 = tf.identity(feature_x, name="x"), tf.identity(feature_x2, name="x2")
        y = tf.add(half * x, two, name="y")
        y2 = tf.add(half * x, three, name="y2")
        y3 = tf.add(half * x2, three, name="y3")
        return {
            "serving_default": signature({"x": x}, {"y": y}),
            "classify_x_to_y": signature({"inputs": examples}, {"scores": y}, CLASSIFY),
            "regress_x_to_y": signature({"inputs": examples}, {"outputs": y}, REGRESS),
            "regress_x_to_y2": signature({"inputs": examples}, {"outputs": y2}, REGRESS),
            "regress_x2_to_y3": signature({"inputs": x2}, {"outputs": y3}, REGRESS),
        }

    save(folder / "00000123", build)


def save_half_plus_three(folder, tensor_info):
    """Save the model; `tensor_info` makes what its signatures hold of a tensor."""

    def build():
        half, three = variable(0.5, "a"), variable(3.0, "b")
        examples = v1.placeholder(tf.string, name="tf_example")
        x = tf.identity(parsed_examples(examples)[0], name="x")
        y = tf.add(half * x, three, name="y")
        in_x, out_y, inputs = (tensor_info(tensor) for tensor in (x, y, examples))
        return {
            "serving_default": signature({"x": in_x}, {"y": out_y}),
            REGRESS: signature({"inputs": inputs}, {"outputs": out_y}, REGRESS),
        }

    save(folder / "00000123", build)


@writes
def half_plus_three(folder):
    save_half_plus_three(folder, lambda tensor: info(tensor, []))


@writes
def half_plus_three_of_old(folder):
    """As TensorFlow Serving's own test data: its signatures say no shapes, and that examples are floats."""
    dtype = tf.float32.as_datatype_enum
    save_half_plus_three(folder, lambda tensor: meta_graph_pb2.TensorInfo(name=tensor.name, dtype=dtype))


@writes
def counter(folder):
    def build():
        count = variable(0.0, "counter")
        delta = v1.placeholder(tf.float32, name="delta")
        return {
            "get_counter": signature({}, {"output": count}),
            "incr_counter": signature({}, {"output": v1.assign_add(count, 1.0, name="incr")}),
            "incr_counter_by": signature(
                {"delta": delta}, {"output": v1.assign_add(count, delta, name="incr_by")}
            ),
            "reset_counter": signature({}, {"output": v1.assign(count, 0.0, name="reset")}),
        }

    save(folder / "00000123", build)


def identity_writer(alias, dtype):
    """The writer of a model that answers with its one input, of any shape, under the same name."""

    def build():
        tensor = v1.placeholder(dtype, name=alias)
        return {"serving_default": signature({alias: tensor}, {alias: tf.identity(tensor, name="out")})}

    return lambda folder: save(folder / "123", build)


for _name, (_alias, _dtype) in IDENTITIES.items():
    WRITERS[f"{_name}_identity"] = identity_writer(_alias, _dtype)


@writes
def multi_io(folder):
    def build():
        inputs = {
            "int_tensor": v1.placeholder(tf.int32, name="int_tensor"),
            "str_tensor": v1.placeholder(tf.string, name="str_tensor"),
        }
        outputs = {alias: tf.identity(tensor, name=f"{alias}_out") for alias, tensor in inputs.items()}
        return {"serving_default": signature(inputs, outputs)}

    save(folder / "123", build)


def of_floats(folder, compute):
    """A model of an input x, a list of floats; `compute(x)` gives the outputs by name."""

    def build():
        x = v1.placeholder(tf.float32, [None], name="x")
        return {"serving_default": signature({"x": x}, compute(x))}

    save(folder / "123", build)


@writes
def scalar_out(folder):
    of_floats(folder, lambda x: {"y": tf.reduce_sum(x, name="y")})


@writes
def ragged_out(folder):
    """Two outputs with different first dims."""
    of_floats(folder, lambda x: {"a": tf.fill([2], tf.reduce_sum(x)), "b": tf.fill([1], tf.reduce_sum(x))})


@writes
def half_out(folder):
    of_floats(folder, lambda x: {"y": tf.cast(x, tf.float16, name="y")})


# --- TensorFlow 2: a module with functions, a variable, a table and an asset ---


class Vocabulary(tf.Module):
    """Word numbers from a file, and a linear function whose offset may be left out."""

    def __init__(self, words):
        super().__init__()
        self.words = tf.saved_model.Asset(str(words))
        # Whole lines are the keys, their numbers the values.
        initializer = tf.lookup.TextFileInitializer(
            self.words,
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        )
        self.numbers = tf.lookup.StaticHashTable(initializer, default_value=-1)
        self.factor = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "sentences")])
    def words_of(self, sentences):
        words = tf.strings.split(tf.strings.lower(sentences))
        return {"numbers": self.numbers.lookup(words.to_tensor()), "counts": words.row_lengths()}

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.float32, "x"), tf.TensorSpec([None], tf.float32, "offset")]
    )
    def scale(self, x, offset=tf.constant([10.0])):  # noqa: B008
        return {"y": self.factor * x + offset}


@writes
def tf2_vocabulary(folder):
    """Signatures `words` and `serving_default`; the latter's input `offset` has the default [10]."""
    words = folder / "words.txt"
    words.parent.mkdir(parents=True, exist_ok=True)
    words.write_text("zero\none\ntwo\n")
    module = Vocabulary(words)
    signatures = {"serving_default": module.scale, "words": module.words_of}
    tf.saved_model.save(module, str(folder / "1"), signatures)
    # What is served has a copy among its assets.
    words.unlink()


@writes
def tf2_checked(folder):
    """A function whose only answer is an error where an element is negative."""

    class Root(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
        def root(self, x):
            with tf.control_dependencies([tf.debugging.assert_non_negative(x, "x must not be negative")]):
                return {"y": tf.sqrt(x)}

    module = Root()
    tf.saved_model.save(module, str(folder / "1"), module.root)


def main(folder, *names):
    for name in names or WRITERS:
        WRITERS[name](Path(folder) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
