"""Checks of the TensorFlow inferer and converter of grps projects, with real SavedModels.

python tf_grps.py
"""

import sys
import tempfile
from contextlib import asynccontextmanager, chdir
from pathlib import Path

import checks
import numpy as np
import tensorflow as tf
import tf_models
import yaml
from google.protobuf import json_format

from triglot.backends.grps.context import GrpsContext
from triglot.backends.grps.gtensors import fill, to_array
from triglot.backends.grps.project import GrpsProject
from triglot.backends.grps.settings import read_project
from triglot.backends.grps.tf_inferer import TfModelInferer, TfTensorConverter
from triglot.core.call import Call
from triglot.core.errors import Internal, InvalidArgument, ModelLoadError
from triglot.core.types import Exchange
from triglot.model.model import signatures_of
from triglot.model.signature import ModelMetadata
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.sample_calls import sample_calls
from triglot.telemetry.monitor import Monitor

CONVERTER = TfTensorConverter()
A, B = np.array([[1, 2]], np.float32), np.array([[10, 30]], np.float32)
PAIR = [tf.TensorSpec([None, 2], tf.float32, "first"), tf.TensorSpec([None, 2], tf.float32, "second")]
SERVER = """
interface: {framework: http+grpc, host: 0.0.0.0, port: "7080,7081"}
max_connections: 10
max_concurrency: 2
log: {log_dir: ./logs}
"""


class Callable(tf.Module):
    """`a` less `b`, when it is called; its signature's inputs have other names."""

    @tf.function(input_signature=PAIR)
    def __call__(self, a, b):
        return a - b


class Signature(tf.Module):
    """Has a signature only, with inputs `first` and `second`."""

    @tf.function(input_signature=PAIR)
    def difference(self, first, second):
        return {"difference": first - second, "sum": first + second}


def message(**arrays):
    sent = pb.GrpsMessage()
    for name, array in arrays.items():
        fill(sent.gtensors.tensors.add(name="" if name.startswith("_") else name), np.asarray(array))
    return sent


def named(reply):
    return {tensor.name: to_array(tensor).tolist() for tensor in reply.gtensors.tensors}


def loaded(folder, device="cpu", args=None):
    inferer = TfModelInferer()
    inferer.init(str(folder), device, args)
    assert inferer.load() is True
    return inferer


def infer(inferer, inp):
    return inferer.infer(inp, GrpsContext())


def refused(kind, text, function, *arguments):
    with checks.Raises(kind) as caught:
        function(*arguments)
    assert text in str(caught.error), caught.error


def described(model):
    declared = model.declared() if isinstance(model, TfModelInferer) else (model.inputs, model.outputs)
    return tuple({spec.name: (spec.datatype, spec.shape) for spec in specs} for specs in declared)


class Subject:
    """A folder with the models."""

    def __init__(self, folder):
        self.folder = folder
        self.callable, self.signature = folder / "callable", folder / "signature"
        tf.saved_model.save(Callable(), str(self.callable))
        module = Signature()
        tf.saved_model.save(module, str(self.signature), module.difference)


@asynccontextmanager
async def models():
    with tempfile.TemporaryDirectory() as folder:
        yield Subject(Path(folder))


# --- the converter ---


async def check_tensors_round_trip(subject):
    for dtype in ("u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"):
        for array in (np.array(3, dtype), np.arange(6, dtype=dtype).reshape(2, 3)):
            tensors = CONVERTER.preprocess(message(x=array), GrpsContext())
            assert isinstance(tensors["x"], tf.Tensor)
            assert (tensors["x"].dtype.as_numpy_dtype, tensors["x"].shape) == (array.dtype.type, array.shape)
            reply = CONVERTER.postprocess(tensors, GrpsContext())
            assert to_array(reply.gtensors.tensors[0]).dtype == array.dtype
            assert named(reply) == {"x": array.tolist()}


async def check_strings_are_utf8(subject):
    sent = pb.GrpsMessage()
    sent.gtensors.tensors.add(dtype=pb.DT_STRING, shape=[2], flat_string=["größer", "a\0"])
    sent.gtensors.tensors.add(dtype=pb.DT_STRING, flat_string=["b\0"])
    tensors = CONVERTER.preprocess(sent, GrpsContext())
    assert [tensor.numpy().tolist() for tensor in tensors[:1]] == [["größer".encode(), b"a\0"]]
    reply = CONVERTER.postprocess(tensors, GrpsContext())
    assert [(list(tensor.shape), list(tensor.flat_string)) for tensor in reply.gtensors.tensors] == [
        ([2], ["größer", "a\0"]),
        ([], ["b\0"]),
    ]
    refused(Internal, "output 'output': DT_STRING takes UTF-8", CONVERTER.postprocess, tf.constant(b"\xff"), None)


async def check_results_that_grps_has_no_dtype_for(subject):
    wide = CONVERTER.postprocess((tf.constant([True]), tf.constant([1.5], tf.bfloat16)), GrpsContext())
    assert [tensor.dtype for tensor in wide.gtensors.tensors] == [pb.DT_UINT8, pb.DT_FLOAT32]
    assert named(wide) == {"output_0": [1], "output_1": [1.5]}
    refused(
        Internal, "grps has no dtype for complex64", CONVERTER.postprocess, tf.constant(1j, tf.complex64), None
    )
    ragged = tf.ragged.constant([[1], [2, 3]])
    refused(Internal, "got RaggedTensor", CONVERTER.postprocess, {"a": ragged}, None)


# --- calls ---


async def check_a_model_that_can_be_called_is_called(subject):
    inferer = loaded(subject.callable)
    for inp in ([A, B], (tf.constant(A), B), {"b": B, "a": A}):
        answer = infer(inferer, inp)
        assert isinstance(answer, tf.Tensor)
        assert answer.numpy().tolist() == [[-9, -28]]


async def check_names_of_the_signature_call_the_signature(subject):
    answer = infer(loaded(subject.callable), {"first": A, "second": B})
    assert {name: tensor.numpy().tolist() for name, tensor in answer.items()} == {"output_0": [[-9, -28]]}


async def check_a_model_without_a_call_runs_its_signature(subject):
    inferer = loaded(subject.signature)
    for inp in ([A, B], {"second": B, "first": A}):
        answer = infer(inferer, inp)
        assert {name: tensor.numpy().tolist() for name, tensor in answer.items()} == {
            "difference": [[-9, -28]],
            "sum": [[11, 32]],
        }


async def check_inputs_that_the_signature_has_not(subject):
    inferer = loaded(subject.signature)
    text = "expected the inputs first, second of the signature 'serving_default', got "
    refused(InvalidArgument, f"{text}first", infer, inferer, {"first": A})
    refused(InvalidArgument, f"{text}first, third", infer, inferer, {"first": A, "third": A})
    refused(InvalidArgument, f"{text}1 unnamed", infer, inferer, A)
    refused(InvalidArgument, f"{text}3 unnamed", infer, inferer, [A, A, A])
    refused(TypeError, "missing a required argument: 'a'", infer, loaded(subject.callable), {"b": B})


async def check_a_graph_of_tensorflow_1(subject):
    def build():
        x = tf_models.v1.placeholder(tf.string, [None], "x")
        return {"serving_default": tf_models.signature({"x": x}, {"y": tf.strings.upper(x)})}

    folder = subject.folder / "tensorflow_1"
    tf_models.save(folder, build)
    for names in (["x"], ["_"]):
        reply = infer(loaded(folder), message(**{names[0]: np.array(["abc"])}))
        assert named(reply) == {"y": [b"ABC"]}


# --- messages ---


async def check_without_a_converter_messages_go_in_and_come_out(subject):
    for sent in (message(first=A, second=B), message(_1=A, _2=B)):
        assert named(infer(loaded(subject.signature), sent))["sum"] == [[11, 32]]
        assert named(infer(loaded(subject.callable), sent)) in (
            {"output": [[-9, -28]]},
            {"output_0": [[-9, -28]]},
        )


async def check_a_batch_of_messages(subject):
    sent = [message(_1=np.repeat(A, rows, 0), _2=np.repeat(B, rows, 0)) for rows in (1, 3, 2)]
    replies = loaded(subject.callable).batch_infer(sent, [GrpsContext() for _ in sent])
    assert [named(reply)["output"] for reply in replies] == [[[-9, -28]] * rows for rows in (1, 3, 2)]


async def check_a_project(subject):
    folder = subject.folder / "project"
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "server.yml").write_text(SERVER)
    for converter_type in ("tensorflow", "none"):
        entry = {
            "name": "m",
            "version": "1",
            "device": "cpu",
            "inferer_type": "tensorflow",
            "inferer_path": "../signature",
            "converter_type": converter_type,
        }
        dag = {"type": "sequential", "name": "d", "nodes": [{"name": "n", "type": "model", "model": "m-1"}]}
        (folder / "conf" / "inference.yml").write_text(yaml.safe_dump({"models": [entry], "dag": dag}))
        with chdir(folder):
            model = GrpsProject(read_project(folder), Monitor()).dag()
        call = Call()
        call.exchange = Exchange(message(first=A, second=B).SerializeToString())
        reply = pb.GrpsMessage.FromString(model.infer({}, call))
        assert named(reply) == {"difference": [[-9, -28]], "sum": [[11, 32]]}
        assert described(model) == (
            {"first": ("FP32", (-1, 2)), "second": ("FP32", (-1, 2))},
            {"difference": ("FP32", (-1, 2)), "sum": ("FP32", (-1, 2))},
        )
        # The sample call that is shown for it.
        signature = signatures_of(model)["serving_default"]
        (sample,) = sample_calls(ModelMetadata("d", ["1"], "grps", signature, False), ["grps"])
        call = Call()
        pasted = json_format.ParseDict(sample.message, pb.GrpsMessage())
        call.exchange = Exchange(pasted.SerializeToString())
        assert named(pb.GrpsMessage.FromString(model.infer({}, call)))["sum"] == [[3, 3]]
        answer = model.infer({"first": A, "second": B}, Call())
        assert {name: array.tolist() for name, array in answer.items()} == named(reply)
        model.close()


async def check_what_a_model_declares(subject):
    assert described(loaded(subject.callable)) == (
        {"first": ("FP32", (-1, 2)), "second": ("FP32", (-1, 2))},
        {"output_0": ("FP32", (-1, 2))},
    )

    class Named(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec(None, tf.string, "x")])
        def __call__(self, x):
            return tf.strings.length(x)

    class Booleans(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.bool, "x")])
        def __call__(self, x):
            return x

    tf.saved_model.save(Named(), str(subject.folder / "named"))
    inferer = loaded(subject.folder / "named")
    assert described(inferer) == ({"x": ("BYTES", None)}, {"output": ("INT32", None)})
    assert list(named(infer(inferer, message(x=np.array(["abc"]))))) == ["output"]
    # V2 has no way to a tensor that grps has no type for.
    tf.saved_model.save(Booleans(), str(subject.folder / "booleans"))
    assert loaded(subject.folder / "booleans").declared() is None


# --- devices, operations, files ---


async def check_devices(subject):
    for device, name in {
        "cpu": "cpu",
        "gpu": "gpu:0",
        "cuda": "gpu:0",
        "CUDA:2": "gpu:2",
        "gpu:1": "gpu:1",
        "original": "original",
    }.items():
        inferer = TfModelInferer()
        inferer.init("model", device)
        assert inferer._device == name
    for device in (None, "tpu", "original_cpu"):
        refused(ModelLoadError, "device: expected cpu, cuda, gpu, cuda:N", TfModelInferer().init, "model", device)
    answer = infer(loaded(subject.callable, "original"), [A, B])
    assert answer.numpy().tolist() == [[-9, -28]]


async def check_libraries_of_operations(subject):
    # Any shared library will do: what it registers is its own business.
    args = {"customized_op_paths": [np.linalg._umath_linalg.__file__]}
    assert infer(loaded(subject.callable, "cpu", args), [A, B]).shape == (1, 2)
    missing = subject.folder / "missing.so"
    args = {"customized_op_paths": [str(missing)]}
    refused(ModelLoadError, f"no such file: {missing}", TfModelInferer().init, "model", "cpu", args)
    text = subject.folder / "text.so"
    text.write_text("no library")
    args = {"customized_op_paths": [str(text)]}
    refused(ModelLoadError, "the operations cannot be loaded", TfModelInferer().init, "model", "cpu", args)


async def check_folders_that_hold_no_model(subject):
    empty = subject.folder / "empty"
    empty.mkdir()
    refused(ModelLoadError, f"{empty}: the model cannot be loaded: ", loaded, empty)
    nothing = subject.folder / "nothing"
    tf.saved_model.save(tf.Module(), str(nothing))
    text = f"{nothing}: the model cannot be loaded: it is not callable and has no signature 'serving_default'"
    refused(ModelLoadError, text, loaded, nothing)


async def check_several_graphs_in_one_file(subject):
    """The one with the tag `serve` is taken."""
    folder = subject.folder / "several"
    builder = tf_models.v1.saved_model.Builder(str(folder))
    for number, tags in enumerate((["train"], ["serve"])):
        with tf.Graph().as_default(), tf_models.v1.Session() as session:
            x = tf_models.v1.placeholder(tf.float32, [None], "x")
            offset = tf_models.v1.get_variable("offset", initializer=float(number))
            signatures = {"serving_default": tf_models.signature({"x": x}, {"y": x + offset})}
            session.run(tf_models.v1.global_variables_initializer())
            if number == 0:
                builder.add_meta_graph_and_variables(session, tags, signatures)
            else:
                builder.add_meta_graph(tags, signatures)
    builder.save()
    assert named(infer(loaded(folder), message(x=np.float32([1, 2])))) == {"y": [1.0, 2.0]}


if __name__ == "__main__":
    checks.run([sys.modules[__name__]], models)
