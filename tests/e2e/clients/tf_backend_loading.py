"""Checks of the TensorFlow backend, run by tf_backend.py: what it knows of a SavedModel, and which it refuses."""

import asyncio
import logging
import shutil
import subprocess
import sys
from contextlib import contextmanager

import checks
import tensorflow as tf
import tf_models
from tensorflow.core.protobuf import saved_model_pb2
from tf_models import signature, v1
from tf_subject import FILE, floats, infer, load, texts

from triglot import backends
from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig


def saved(folder):
    """The SavedModel's message."""
    return saved_model_pb2.SavedModel.FromString((folder / FILE).read_bytes())


def edit(folder, change):
    """Changes the first graph of the SavedModel."""
    message = saved(folder)
    change(message.meta_graphs[0])
    (folder / FILE).write_bytes(message.SerializeToString())


@contextmanager
def logged(name):
    """The lines of a logger."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def declared(model):
    """method, inputs and outputs of each signature."""
    return {
        name: (
            signature.method,
            [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs],
            [(spec.name, spec.datatype, spec.shape) for spec in signature.outputs],
        )
        for name, signature in model.signatures.items()
    }


# --- signatures ---


async def check_signatures_of_half_plus_two(subject):
    column, examples = (-1, 1), ("inputs", "BYTES", None)
    assert declared(subject.model("half_plus_two")) == {
        "serving_default": ("predict", [("x", "FP32", column)], [("y", "FP32", column)]),
        "classify_x_to_y": ("classify", [examples], [("scores", "FP32", column)]),
        "regress_x_to_y": ("regress", [examples], [("outputs", "FP32", column)]),
        "regress_x_to_y2": ("regress", [examples], [("outputs", "FP32", column)]),
        "regress_x2_to_y3": ("regress", [("inputs", "FP32", column)], [("outputs", "FP32", column)]),
    }
    assert list(subject.model("half_plus_two").inputs) == []


async def check_signatures_of_scalars_and_references(subject):
    y = [("y", "FP32", ())]
    assert declared(subject.model("half_plus_three")) == {
        "serving_default": ("predict", [("x", "FP32", ())], y),
        "tensorflow/serving/regress": ("regress", [("inputs", "BYTES", ())], [("outputs", "FP32", ())]),
    }
    y = [("y", "FP32", None)]
    assert declared(subject.model("half_plus_three_of_old")) == {
        "serving_default": ("predict", [("x", "FP32", None)], y),
        "tensorflow/serving/regress": ("regress", [("inputs", "BYTES", None)], [("outputs", "FP32", None)]),
    }
    count = [("output", "FP32", ())]
    assert declared(subject.model("counter")) == {
        "get_counter": ("predict", [], count),
        "incr_counter": ("predict", [], count),
        "incr_counter_by": ("predict", [("delta", "FP32", None)], count),
        "reset_counter": ("predict", [], count),
    }


async def check_signature_defs_are_those_of_the_file(subject):
    for name in ("half_plus_two", "counter", "tf2_vocabulary"):
        in_file = saved(subject.version(name)).meta_graphs[0].signature_def
        given = subject.model(name).signature_defs
        assert {key: type(in_file[key]).FromString(value) for key, value in given.items()} == dict(in_file)
    assert "__saved_model_init_op" in subject.model("tf2_vocabulary").signature_defs
    assert "__saved_model_init_op" not in subject.model("tf2_vocabulary").signatures


async def check_what_tf_saved_model_load_refuses(subject):
    """These are why a session loads the models."""
    for name in ("counter", "half_plus_three"):
        subject.model(name)
        with checks.Raises(Exception):
            tf.saved_model.load(str(subject.version(name)))


async def check_signatures_that_cannot_be_called(subject):
    folder = subject.scratch / "left_out"

    def build():
        x = v1.placeholder(tf.float32, name="x")
        held = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=tf.constant([], tf.int32))
        sparse = tf_models.info(x)
        sparse.coo_sparse.values_tensor_name = "x:0"
        return {
            "serving_default": signature({"x": x}, {"y": x + 1.0}),
            "odd": signature({"x": x}, {"y": x + 3.0}, "my/method"),
            "held": signature({"x": x}, {"y": held}),
            "sparse": signature({"x": sparse}, {"y": x + 4.0}),
        }

    tf_models.save(folder, build)
    model = load(folder)
    assert model.warnings == [
        "signature 'sparse' cannot be called: input 'x' is a sparse tensor, of three tensors",
        "signature 'held': output 'y' cannot be returned: it is of the datatype DT_VARIANT",
    ], model.warnings
    assert set(model.signatures) == {"serving_default", "odd", "held"}
    assert set(model.signature_defs) == {"serving_default", "odd", "held", "sparse"}
    assert model.signatures["odd"].method == "predict"
    assert infer(model, "odd", x=floats(1))["y"].tolist() == [4.0]


# --- what has to be run before the first call ---


def table(words):
    """A graph that looks words up in a file which is an asset; the table's initializer comes second."""
    v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, tf.constant(str(words), name="words_file"))
    file = v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS)[0]
    initializer = tf.lookup.TextFileInitializer(
        file, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
    )
    numbers = tf.lookup.StaticHashTable(initializer, -1)
    x = v1.placeholder(tf.string, name="x")
    return {"serving_default": signature({"x": x}, {"y": numbers.lookup(x)})}


def save_table(subject, name, options_of):
    """The folder of a saved table of the words a, b and c; the file that was used is gone."""
    words = subject.scratch / "words.txt"
    words.write_text("a\nb\nc\n")

    def build():
        signatures = table(words)
        assets = v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS)
        return signatures, {"assets_collection": assets, **options_of()}

    folder = subject.scratch / name
    tf_models.save(folder, build)
    words.unlink()
    return folder


async def check_main_op_and_assets_of_tensorflow_1(subject):
    folder = save_table(subject, "main_op", lambda: {"main_op": v1.tables_initializer()})
    keys = texts(b"c", b"x", b"a")
    assert infer(load(folder), x=keys)["y"].tolist() == [2, -1, 0]


async def check_legacy_init_op_of_tensorflow_1(subject):
    folder = save_table(subject, "legacy", lambda: {"legacy_init_op": v1.tables_initializer("init")})

    def age(graph):
        # As old versions wrote it; those of today write a main op in either case.
        graph.collection_def["legacy_init_op"].CopyFrom(graph.collection_def["saved_model_main_op"])
        del graph.collection_def["saved_model_main_op"]

    edit(folder, age)
    assert infer(load(folder), x=texts(b"b"))["y"].tolist() == [1]


# --- what keeps a model from loading ---


def load_error(folder):
    with checks.Raises(ModelLoadError) as caught:
        load(folder)
    text = str(caught.error)
    assert text.startswith(f"{folder}: "), text
    assert "stack trace" not in text, text
    assert "Detected at" not in text, text
    return text


def broken(subject, name, model="half_plus_two"):
    """A copy of a model, to be broken."""
    return shutil.copytree(subject.version(model), subject.scratch / name)


async def check_variables_that_are_missing(subject):
    for model in ("half_plus_two", "tf2_vocabulary"):
        folder = broken(subject, f"no_variables_{model}", model)
        shutil.rmtree(folder / "variables")
        assert str(folder / "variables" / "variables") in load_error(folder)
    folder = broken(subject, "half_of_the_variables")
    (data,) = (folder / "variables").glob("*.data-*")
    data.unlink()
    text = load_error(folder)
    assert text == (
        f"{folder}: the SavedModel cannot be loaded: {data}; No such file or directory\n"
        "\t [[{{node save/RestoreV2}}]]"
    ), text


async def check_variables_of_another_model(subject):
    folder = broken(subject, "other_variables")
    shutil.rmtree(folder / "variables")
    shutil.copytree(subject.version("half_plus_three") / "variables", folder / "variables")
    assert "Key c not found in checkpoint" in load_error(folder)


async def check_variables_that_are_corrupt(subject):
    folder = broken(subject, "corrupt_variables")
    index = folder / "variables" / "variables.index"
    index.write_bytes(b"junk" + index.read_bytes()[4:])
    assert str(index) in load_error(folder)


async def check_an_asset_that_is_missing(subject):
    folder = broken(subject, "no_asset", "tf2_vocabulary")
    shutil.rmtree(folder / "assets")
    assert f"{folder}/assets/words.txt; No such file or directory" in load_error(folder)


async def check_a_file_that_is_no_saved_model(subject):
    for name, content in (("half", None), ("junk", b"\xff" * 100)):
        folder = broken(subject, name)
        file = folder / FILE
        file.write_bytes(content or file.read_bytes()[:1000])
        assert f"Cannot parse file {str(file).encode()!r}" in load_error(folder)
    folder = broken(subject, "empty")
    (folder / FILE).write_bytes(b"")
    assert "'serve'" in load_error(folder)
    (folder / FILE).unlink()
    assert "does not exist" in load_error(folder)


async def check_a_model_that_is_not_for_serving(subject):
    folder = subject.scratch / "train"

    def build():
        x = v1.placeholder(tf.float32, name="x")
        return {"serving_default": signature({"x": x}, {"y": x})}

    tf_models.save(folder, build, tags=["train", "gpu"])
    text = load_error(folder)
    assert "'serve'" in text, text
    assert "train" in text, text
    config = ModelConfig(parameters={"TF_GRAPH_TAG": "gpu, train"})
    model = backends.load("tensorflow", folder / FILE, config)
    assert infer(model, x=floats(1, 2))["y"].tolist() == [1, 2]


async def check_an_unknown_operation(subject):
    folder = broken(subject, "unknown_op", "float_identity")

    def rename(graph):
        graph.graph_def.node[-1].op = "NobodyKnowsThis"

    edit(folder, rename)
    text = load_error(folder)
    assert "Op type not registered 'NobodyKnowsThis'" in text
    assert text.endswith("; name the shared library that has it in --tensorflow-op-libraries")


async def check_a_model_without_signatures(subject):
    tf_models.save(subject.scratch / "none", dict)
    assert load_error(subject.scratch / "none").endswith("the SavedModel has no usable signature")


# --- what an operator reads ---

ASK = r"""
import sys
from pathlib import Path
import numpy as np
from triglot import backends
from triglot.core.errors import ServingError
from triglot.core.call import Call

model = backends.load("tensorflow", Path(sys.argv[1]))
call = Call()
call.signature_name = "regress_x_to_y"
try:
    model.infer({"inputs": np.array([b"\xff"], object)}, call)
except ServingError:
    print("refused")
model.close()
"""


async def check_the_log_of_a_mistake_in_a_request(subject):
    file = subject.version("half_plus_two") / FILE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ASK, str(file), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert out == b"refused\n", err
    for noise in ("OP_REQUIRES", "Could not parse", "WARNING:tensorflow", "deprecated", "Traceback"):
        assert noise not in err.decode(), err
