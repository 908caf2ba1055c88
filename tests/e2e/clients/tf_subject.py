"""What the checks of the TensorFlow backend are given: models loaded without a server, and calls of them."""

import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import checks
import numpy as np
import tensorflow as tf
import tf_models
from samples import strings
from tf_models import v1

from triglot import backends
from triglot.core.call import Call
from triglot.core.errors import ServingError

FILE = "saved_model.pb"


class Subject:
    """The models of a folder, and a place for further ones."""

    def __init__(self, folder, scratch):
        self.folder = folder
        self.scratch = scratch
        self._models = {}

    def version(self, name):
        """The folder of the model's one version."""
        (folder,) = (self.folder / name).iterdir()
        return folder

    def model(self, name):
        if name not in self._models:
            self._models[name] = load(self.version(name))
        return self._models[name]

    def built(self, name, build, **options):
        """The model of a graph, see `tf_models.save`; its folder stays."""
        tf_models.save(self.scratch / name, build, **options)
        return load(self.scratch / name)


def load(folder):
    return backends.load("tensorflow", folder / FILE)


def infer(model, signature_name="serving_default", *, outputs=(), deadline=None, **inputs):
    """What the model answers; the inputs are read-only, as a server hands them in."""
    call = Call(deadline)
    call.requested_outputs = outputs
    call.signature_name = signature_name
    for array in inputs.values():
        array.flags.writeable = False
    answer = model.infer(inputs, call)
    assert all(isinstance(value, np.ndarray) for value in answer.values()), answer
    return answer


def infer_natively(folder, signature_name, **inputs):
    """What `Session.run` answers."""
    with tf.Graph().as_default(), v1.Session() as session:
        definition = v1.saved_model.load(session, ["serve"], str(folder)).signature_def[signature_name]
        feed = {definition.inputs[alias].name: array for alias, array in inputs.items()}
        fetches = {alias: tensor.name for alias, tensor in definition.outputs.items()}
        return {alias: np.asarray(value) for alias, value in session.run(fetches, feed).items()}


def floats(*values):
    return np.array(values, np.float32)


def texts(*values):
    return strings(list(values))[0]


def example(**features):
    """A serialized Example; a feature's values are floats or integers."""
    message = tf.train.Example()
    for name, values in features.items():
        feature = message.features.feature[name]
        kind = feature.int64_list if isinstance(values[0], int) else feature.float_list
        kind.value.extend(values)
    return message.SerializeToString()


def refused(model, code, text, **call):
    with checks.Raises(ServingError) as caught:
        infer(model, **call)
    assert (caught.error.code, caught.error.message) == (code, text), repr(caught.error.message)


@asynccontextmanager
async def models_of(folder):
    with tempfile.TemporaryDirectory() as scratch:
        yield Subject(folder, Path(scratch))
