"""Writes the SavedModels of `tf_models.py`, and more that only a whole server can show: FOLDER/NAME/VERSION/….

    python tfs_models.py FOLDER [NAME …]

Those named warm* have a file of recorded requests, as TensorFlow Serving's clients write it.
"""

import sys

import tensorflow as tf
import tf_models
from tensorflow_serving.apis import prediction_log_pb2 as logs
from tf_models import CLASSIFY, REGRESS, save, signature, v1, variable, writes

RECORDED = "assets.extra/tf_serving_warmup_requests"
DEFAULT = "serving_default"


@writes
def labels(folder):
    """Classifies with labels, scores or both: the label is "high" where x is more than 0.5."""

    def build():
        examples, x = feature_x()
        low_high = tf.tile(tf.constant([["low", "high"]]), [tf.shape(x)[0], 1])
        classes, scores = low_high, tf.concat([1.0 - x, x], 1)
        best = tf.where(x > 0.5, "high", "low")
        outputs = {
            "serving_default": {"classes": classes, "scores": scores},
            "scores": {"scores": scores},
            "classes": {"classes": best},
            "flat": {"scores": x[:, 0]},
        }
        signatures = {name: signature({"inputs": examples}, of, CLASSIFY) for name, of in outputs.items()}
        # One dimension is as good as two.
        return signatures | {"regress": signature({"inputs": examples}, {"outputs": x[:, 0]}, REGRESS)}

    save(folder / "1", build)


def feature_x():
    """Serialized Examples, and their feature x: float[-1, 1]."""
    examples = v1.placeholder(tf.string, [None], name="examples")
    return examples, tf.io.parse_example(examples, {"x": tf.io.FixedLenFeature([1], tf.float32)})["x"]


@writes
def slow(folder):
    """Goes so many steps round a loop that does nothing else, and answers with their number.

    Signature `started` says how many calls have begun.
    """

    def build():
        steps, count = v1.placeholder(tf.int32, [], name="steps"), variable(0.0, "count")
        with tf.control_dependencies([v1.assign_add(count, 1.0)]):
            start = tf.constant(0)
        (done,) = tf.while_loop(lambda at: at < steps, lambda at: at + 1, [start], parallel_iterations=1)
        return {
            "serving_default": signature({"steps": steps}, {"done": done}),
            "started": signature({}, {"started": count}),
        }

    save(folder / "1", build)


# --- recorded requests ---

ADDS = {DEFAULT: 1.0, "classify": 10.0, "regress": 100.0, "classify_too": 1000.0, "regress_too": 10000.0}
"""What a call of each signature adds to the count of a warm model."""


def warm_graph():
    """Signatures that count their calls, and one that says what the count is."""
    count = variable(0.0, "count")
    x = v1.placeholder(tf.float32, [None], name="x")
    examples, feature = feature_x()

    def counting(name, tensor):
        with tf.control_dependencies([v1.assign_add(count, ADDS[name])]):
            return tf.identity(tensor)

    signatures = {
        "count": signature({}, {"count": count}),
        DEFAULT: signature({"x": x}, {"y": counting(DEFAULT, x)}),
    }
    for name in ("classify", "classify_too"):
        signatures[name] = signature({"inputs": examples}, {"scores": counting(name, feature)}, CLASSIFY)
    for name in ("regress", "regress_too"):
        signatures[name] = signature({"inputs": examples}, {"outputs": counting(name, feature)}, REGRESS)
    return signatures


def record(folder, *messages):
    """Write the file of recorded requests, of these messages."""
    write_records(folder, *[message.SerializeToString() for message in messages])


def write_records(folder, *records):
    file = folder / RECORDED
    file.parent.mkdir()
    with tf.io.TFRecordWriter(str(file)) as writer:
        for each in records:
            writer.write(each)


def recorded_predict(array):
    """A recorded Predict of input x."""
    log = logs.PredictionLog()
    log.predict_log.request.model_spec.name = "whatever it was called then"
    log.predict_log.request.model_spec.version.value = 7
    log.predict_log.request.inputs["x"].CopyFrom(tf.make_tensor_proto(array))
    # The answer, too, was recorded; nobody compares it.
    log.predict_log.response.outputs["y"].CopyFrom(tf.make_tensor_proto([0.0]))
    return log


def of_examples(request, **spec):
    """Fill a request with one Example, x = 0.5."""
    request.input.example_list.examples.add().features.feature["x"].float_list.value.append(0.5)
    for name, value in spec.items():
        setattr(request.model_spec, name, value)


def recorded_of_every_kind():
    """One request of each kind that can be replayed."""
    yield recorded_predict([1.0, 2.0])
    classify, regress, multi, nothing = (logs.PredictionLog() for _ in range(4))
    of_examples(classify.classify_log.request, name="m", signature_name="classify")
    yield classify
    of_examples(regress.regress_log.request, name="m", signature_name="regress")
    yield regress
    yield nothing
    of_examples(multi.multi_inference_log.request)
    for name, method in (("classify_too", CLASSIFY), ("regress_too", REGRESS)):
        task = multi.multi_inference_log.request.tasks.add(method_name=method)
        task.model_spec.name, task.model_spec.signature_name = "m", name
    yield multi


@writes
def warm(folder):
    """Every kind of request was recorded once."""
    save(folder / "1", warm_graph)
    record(folder / "1", *recorded_of_every_kind())


@writes
def warm_failing(folder):
    """The second recorded request has another datatype than the model."""
    save(folder / "1", warm_graph)
    record(folder / "1", recorded_predict([1.0]), recorded_predict([1]))


@writes
def warm_damaged(folder):
    """A bit of the file is wrong."""
    save(folder / "1", warm_graph)
    record(folder / "1", recorded_predict([1.0]))
    file = folder / "1" / RECORDED
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


@writes
def warm_session(folder):
    """A kind of request that no public server answers."""
    save(folder / "1", warm_graph)
    log = logs.PredictionLog()
    log.session_run_log.request.model_spec.name = "m"
    record(folder / "1", log)


@writes
def warm_too_often(folder):
    """One request more than may be recorded."""
    save(folder / "1", warm_graph)
    record(folder / "1", *[recorded_predict([1.0])] * 1001)


@writes
def warm_unreadable(folder):
    """A record that is no message."""
    save(folder / "1", warm_graph)
    write_records(folder / "1", recorded_predict([1.0]).SerializeToString(), b"\xff\xff")


if __name__ == "__main__":
    tf_models.main(*sys.argv[1:])
