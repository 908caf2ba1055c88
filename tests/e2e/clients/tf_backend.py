"""Checks of the TensorFlow backend where TensorFlow is installed: what models answer, and that they do so alone.

    python tf_backend.py FOLDER

FOLDER is what `tf_models.py` wrote; the models that break, and further ones, are written to a folder of its own.
"""

import gc
import sys
import threading
import time
import weakref
from pathlib import Path

import checks
import ml_dtypes
import numpy as np
import tensorflow as tf
import tf_backend_loading
import tf_models
from samples import assert_same, sample
from tf_models import signature, v1
from tf_subject import example, floats, infer, infer_natively, load, models_of, refused, texts

from triglot.backends.tensorflow import MAX_SELECTIONS
from triglot.core.errors import Code, ServingError

THREADS = 8
ROUNDS = 50
KEY = "Name: <unknown>, Key: x, Index: 1.  "
NODE = "\n\t [[{{node ParseExample/ParseExample}}]]"


# --- answers ---


async def check_it_answers_as_a_session_does(subject):
    examples = texts(example(x=[1.0]), example(x=[2.0], x2=[7.0]))
    column = floats(1, 2, 5).reshape(3, 1)
    for name, inputs in {
        "serving_default": {"x": column},
        "classify_x_to_y": {"inputs": examples},
        "regress_x_to_y": {"inputs": examples},
        "regress_x_to_y2": {"inputs": examples},
        "regress_x2_to_y3": {"inputs": column},
    }.items():
        answer = infer(subject.model("half_plus_two"), name, **inputs)
        expected = infer_natively(subject.version("half_plus_two"), name, **inputs)
        assert answer.keys() == expected.keys()
        for alias, array in answer.items():
            assert_same(array, expected[alias])


async def check_shapes_other_than_the_declared_ones(subject):
    model = subject.model("half_plus_two")
    assert_same(infer(model, x=floats(1, 2, 5))["y"], floats(2.5, 3, 4.5))
    assert_same(infer(model, x=np.array(2, np.float32))["y"], np.array(3, np.float32))
    assert_same(infer(model, x=floats().reshape(0, 1))["y"], floats().reshape(0, 1))


async def check_a_placeholder_takes_any_shape(subject):
    def build():
        x = v1.placeholder(tf.float32, [None, 1], name="x")
        return {"serving_default": signature({"x": x}, {"y": 0.5 * x + 2.0, "shape": tf.shape(x)})}

    model = subject.built("static_shape", build)
    answer = infer(model, x=floats(1, 2, 5))
    assert_same(answer["y"], floats(2.5, 3, 4.5))
    assert answer["shape"].tolist() == [3]
    assert infer(model, x=np.ones((), np.float32))["y"].shape == ()


async def check_every_datatype(subject, datatype):
    names = {"FP16": "half", "FP32": "float", "FP64": "double", "BF16": "bfloat16", "BYTES": "string"}
    model = subject.model(f"{names.get(datatype, datatype.lower())}_identity")
    (spec,) = model.signatures["serving_default"].inputs
    (output,) = model.signatures["serving_default"].outputs
    assert (spec.datatype, spec.shape) == (datatype, None)
    assert (output.name, output.datatype, output.shape) == (spec.name, datatype, None)
    array = sample(datatype)
    for value in (array, array[:0], array[0, 0], array[:, ::2], np.broadcast_to(array, (2, *array.shape))):
        given = np.asarray(value, array.dtype)
        assert_same(infer(model, **{spec.name: given})[spec.name], given)


async def check_complex_numbers(subject):
    for kind in ("complex64", "complex128"):
        array = np.array([[1 + 2j, complex("nan+infj")]], kind)
        model = subject.model(f"{kind}_identity")
        assert model.signatures["serving_default"].inputs[0].datatype == kind.upper()
        assert_same(infer(model, x=array)["x"], array)


async def check_quantized_numbers(subject):
    for kind, values in {
        "qint8": [[-128, 127]],
        "quint8": [[0, 255]],
        "qint16": [[-(2**15), 2**15 - 1]],
        "quint16": [[0, 2**16 - 1]],
        "qint32": [[-(2**31), 2**31 - 1]],
    }.items():
        dtype = tf.as_dtype(kind).as_numpy_dtype
        array = np.array(values, dtype[0]).view(dtype)
        model = subject.model(f"{kind}_identity")
        assert model.signatures["serving_default"].inputs[0].datatype == kind.upper()
        for value in (array, array[0, 1], array[:0]):
            given = np.asarray(value, dtype)
            assert_same(infer(model, x=given)["x"], given)


async def check_only_requested_outputs_are_run(subject):
    def build():
        x = v1.placeholder(tf.float32, name="x")
        outputs = {f"y{n}": x + float(n) for n in range(8)}
        outputs["bad"] = v1.debugging.check_numerics(1.0 / x, "not finite")
        return {"serving_default": signature({"x": x}, outputs | {"x": x})}

    model = subject.built("requested", build)
    zero = floats(0)
    for wanted in (["y1"], ["x"], ["y7", "x"], ["x", "y7"], ["y3", "y2", "y1"]):
        answer = infer(model, outputs=wanted, x=zero)
        assert {name: array.tolist() for name, array in answer.items()} == {
            name: [0.0 if name == "x" else float(name[1:])] for name in wanted
        }
    for wanted in ([], ["bad"], ["y1", "bad"]):
        with checks.Raises(ServingError) as caught:
            infer(model, outputs=wanted, x=zero)
        assert caught.error.message.startswith("not finite"), caught.error.message


async def check_the_combinations_of_requested_outputs_that_are_kept(subject):
    def build():
        x = v1.placeholder(tf.float32, name="x")
        return {"serving_default": signature({"x": x}, {f"y{n}": x + float(n) for n in range(7)})}

    model = subject.built("combinations", build)
    for number in range(1, 2**7):
        wanted = [f"y{n}" for n in range(7) if number >> n & 1]
        answer = infer(model, outputs=wanted, x=floats(0))
        # Further combinations give all outputs.
        assert set(wanted) <= answer.keys()
    assert len(model._runs["serving_default"]._selections) == MAX_SELECTIONS


async def check_a_run_ends_at_its_deadline(subject):
    def build():
        steps = v1.placeholder(tf.int32, [], name="steps")
        step = tf.minimum(steps, 1)
        (at,) = tf.while_loop(lambda at: at < steps, lambda at: at * step, [step], parallel_iterations=1)
        return {"serving_default": signature({"steps": steps}, {"at": at})}

    model = subject.built("endless", build)
    steps = np.array(2, np.int32)
    for seconds in (0.3, 0.0, -1.0):
        with checks.Raises(ServingError) as caught:
            infer(model, deadline=time.monotonic() + seconds, steps=steps)
        # It would not have returned before the run's end.
        assert caught.error.code is Code.DEADLINE_EXCEEDED
    assert infer(model, deadline=time.monotonic() + 60, steps=np.array(0, np.int32))["at"].tolist() == 0


async def check_memory_at_any_address(subject):
    for kind, dtype in (("float", "f4"), ("int64", "i8"), ("complex128", "c16"), ("bfloat16", ml_dtypes.bfloat16)):
        array = np.arange(100).astype(dtype)
        for offset in (0, 1, 3):
            memory = b"-" * offset + array.tobytes()
            answer = infer(subject.model(f"{kind}_identity"), x=np.ndarray((100,), dtype, memory, offset))
            assert_same(answer["x"], array)


async def check_strings_that_end_with_zeros(subject):
    model = subject.model("bytes_identity")
    scalar = np.array(b"\xff\0\0", object)
    assert_same(infer(model, img_bytes=scalar)["img_bytes"], scalar)


async def check_a_scalar_answer(subject):
    answer = infer(subject.model("scalar_out"), x=floats(1, 2))
    assert_same(answer["y"], np.array(3, np.float32))


async def check_state(subject):
    model = subject.model("counter")
    outputs = [
        infer(model, name, **inputs)["output"].tolist()
        for name, inputs in (
            ("reset_counter", {}),
            ("incr_counter", {}),
            ("incr_counter_by", {"delta": np.array(2.5, np.float32)}),
            ("get_counter", {}),
            ("reset_counter", {}),
            ("get_counter", {}),
        )
    ]
    assert outputs == [0, 1, 3.5, 3.5, 0, 0], outputs


async def check_answers_do_not_change_later(subject):
    """A variable of TensorFlow 1's own kind is changed in place, and what it gives is that very memory."""

    def build():
        total = tf_models.variable(np.zeros(100, np.float32), "total")
        x = v1.placeholder(tf.float32, name="x")
        return {
            "get": signature({}, {"y": tf.identity(total)}),
            "add": signature({"x": x}, {"y": v1.assign_add(total, x)}),
        }

    model = subject.built("in_place", build)
    answers = [
        infer(model, "get")["y"],
        infer(model, "add", x=np.ones(100, np.float32))["y"],
        infer(model, "add", x=np.ones(100, np.float32))["y"],
    ]
    assert [set(answer.tolist()) for answer in answers] == [{0.0}, {1.0}, {2.0}]


async def check_one_tensor_under_several_names(subject):
    def build():
        x = v1.placeholder(tf.float32, name="x")
        y = 2.0 * x
        return {
            "serving_default": signature({"x": x}, {"y": y, "again": y, "x": x}),
            "echo": signature({"x": x}, {"same": x}),
        }

    model = subject.built("aliases", build)
    answer = infer(model, x=floats(1, 2))
    assert {name: array.tolist() for name, array in answer.items()} == {"y": [2, 4], "again": [2, 4], "x": [1, 2]}
    assert infer(model, "echo", x=floats(3))["same"].tolist() == [3]


async def check_a_missing_device(subject):
    def build():
        x = v1.placeholder(tf.float32, name="x")
        with tf.device("/device:GPU:7"):
            return {"serving_default": signature({"x": x}, {"y": x + 1.0})}

    assert infer(subject.built("device", build), x=floats(1))["y"].tolist() == [2]


async def check_tables_and_ragged_tensors_of_tensorflow_2(subject):
    answer = infer(subject.model("tf2_vocabulary"), "words", sentences=texts(b"One TWO two", b"", b"three"))
    assert answer["numbers"].tolist() == [[1, 2, 2], [-1, -1, -1], [-1, -1, -1]]
    assert answer["counts"].tolist() == [3, 0, 1]


async def check_a_default(subject):
    model = subject.model("tf2_vocabulary")
    defaults = model.signatures["serving_default"].defaults
    assert_same(defaults["offset"], floats(10))
    assert_same(infer(model, x=floats(1), **defaults)["y"], floats(12))


# --- errors ---


async def check_errors_of_bad_examples(subject):
    model = subject.model("half_plus_two")
    good = example(x=[1.0])
    for bad, text in (
        (example(x=[1]), f"{KEY}Data types don't match. Data type: int64 but expected type: float"),
        (example(x2=[1.0]), "Name: <unknown>, Feature: x (data type: float) is required but could not be found."),
        (
            example(x=[1.0, 2.0]),
            f"{KEY}Number of float values != expected.  Values size: 2 but output shape: [1]",
        ),
        (b"\n\x05junk", "Could not parse example input, value: '\n\x05junk'"),
        (b"\xff\xff", "Could not parse example input, value: '\ufffd\ufffd'"),
    ):
        call = {"signature_name": "regress_x_to_y", "inputs": texts(good, bad)}
        refused(model, Code.INVALID_ARGUMENT, text + NODE, **call)


async def check_an_error_within_a_function(subject):
    model = subject.model("tf2_checked")
    assert infer(model, x=floats(4, 9))["y"].tolist() == [2, 3]
    with checks.Raises(ServingError) as caught:
        infer(model, x=floats(1, -4))
    assert caught.error.code is Code.INVALID_ARGUMENT
    text = caught.error.message
    assert text.startswith("assertion failed: [x must not be negative."), text
    assert text.endswith("}}]]"), text


async def check_an_error_keeps_its_code(subject):
    def build():
        file, x = v1.placeholder(tf.string, name="file"), v1.placeholder(tf.float32, name="x")
        # Neither saved nor initialized.
        absent = v1.Variable(1.0, name="absent", collections=[], use_resource=False)
        return {
            "read": signature({"file": file}, {"content": tf.raw_ops.ReadFile(filename=file, name="read")}),
            "multiply": signature({"x": x}, {"y": tf.multiply(absent, x, name="y")}),
        }

    model = subject.built("codes", build)
    path = str(subject.scratch / "nowhere")
    text = path + "; No such file or directory\n\t [[{{node read}}]]"
    refused(model, Code.NOT_FOUND, text, signature_name="read", file=np.array(path.encode(), object))
    text = "Attempting to use uninitialized value absent\n\t [[{{node absent/read}}]]"
    refused(model, Code.FAILED_PRECONDITION, text, signature_name="multiply", x=floats(1))


async def check_a_signature_with_a_missing_tensor(subject):
    """It spoils neither the model nor the other signatures, as in TensorFlow Serving."""

    def build():
        x = v1.placeholder(tf.float32, name="x")
        wrong = tf_models.info(y := x + 1.0)
        wrong.name = "nowhere:0"
        return {"serving_default": signature({"x": x}, {"y": y}), "wrong": signature({"x": x}, {"y": wrong})}

    model = subject.built("no_tensor", build)
    for _ in range(2):
        with checks.Raises(ServingError) as caught:
            infer(model, "wrong", x=floats(1))
        assert caught.error.code is Code.INVALID_ARGUMENT
        assert "nowhere:0" in caught.error.message
    assert infer(model, x=floats(1))["y"].tolist() == [2]


# --- threads and memory ---


async def check_many_threads(subject):
    model = load(subject.version("half_plus_two"))
    wrong = []

    def ask(number):
        for step in range(ROUNDS):
            x = np.full(number + 1, step, np.float32)
            y = infer(model, x=x)["y"]
            if y.tolist() != (x * 0.5 + 2).tolist():
                wrong.append((number, step, y))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert model.instances >= 1


async def check_inputs_are_neither_changed_nor_kept(subject):
    def build():
        x = v1.placeholder(tf.float32, name="x")
        return {"serving_default": signature({"x": x}, {"y": x + 1.0})}

    model = subject.built("plus_one", build)
    array = np.zeros(10_000, np.float32)
    answer = infer(model, x=array)
    assert not array.any()
    assert answer["y"].tolist() == [1] * 10_000
    kept = weakref.ref(array)
    del array
    assert kept() is None


async def check_an_answer_outlives_its_request(subject):
    sent = np.arange(10_000, dtype=np.float32)
    memory = bytearray(sent.tobytes())
    answer = infer(subject.model("float_identity"), x=np.frombuffer(bytes(memory), np.float32))["x"]
    for _ in range(3):
        infer(subject.model("float_identity"), x=np.zeros(10_000, np.float32))
    assert_same(answer, sent)


async def check_close_frees_everything(subject):
    for name, call in (
        ("half_plus_two", {"x": floats(1)}),
        ("tf2_vocabulary", {"x": floats(1), "offset": floats(1)}),
    ):
        model = load(subject.version(name))
        infer(model, **call)
        session = weakref.ref(model._session)
        graph = weakref.ref(model._session.graph)
        gc.disable()
        try:
            model.close()
            del model
            assert (session(), graph()) == (None, None), name
        finally:
            gc.enable()


if __name__ == "__main__":
    checks.run([tf_backend_loading, sys.modules[__name__]], lambda: models_of(Path(sys.argv[1])))
