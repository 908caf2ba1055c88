"""Checks of the TensorFlow backend's instances, where TensorFlow is installed: their devices, and what they share.

    python tf_backend_devices.py FOLDER

FOLDER is what `tf_models.py` wrote; further models are written to a folder of its own.
"""

import gc
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import checks
import tensorflow as tf
import tf_models
from tf_backend_loading import logged
from tf_models import signature, v1
from tf_subject import FILE, floats, infer, models_of

from triglot import backends
from triglot.backends.tensorflow import PlacedSavedModel, SavedModel
from triglot.core.errors import ModelLoadError
from triglot.model.config import Device, InstanceGroup, ModelConfig
from triglot.platform.cpus import cpu_count

CPU, GPU_1 = Device("CPU"), Device("GPU", 1)
GPUS = len(tf.config.list_physical_devices("GPU"))


def load(folder, *groups, **options):
    config = ModelConfig(instance_groups=groups, source="m/config.pbtxt", **options)
    return backends.load("tensorflow", folder / FILE, config)


def on_threads(count, function):
    """What `function` gives on each of so many threads, called on one after the other while all of them live."""
    results, done = [], threading.Event()

    def run(called):
        results.append(function())
        called.set()
        done.wait(60)

    threads = []
    for _ in range(count):
        called = threading.Event()
        threads.append(threading.Thread(target=run, args=(called,)))
        threads[-1].start()
        assert called.wait(60)
    done.set()
    for thread in threads:
        thread.join()
    return results


def sessions():
    """How many are open in this process."""
    gc.collect()
    return sum(type(held) is v1.Session and not held._closed for held in gc.get_objects())


def devices(model):
    """Where the operations of a SavedModel's graph are to run."""
    return {operation.device for operation in model._session.graph.get_operations()}


async def check_without_groups(subject):
    model = load(subject.version("half_plus_two"))
    assert (model.instances, model.places_instances) == (cpu_count(), False)


async def check_instances_of_a_device_share_a_session(subject):
    before = sessions()
    for groups, instances, expected in (
        ([InstanceGroup("CPU", 3)], 3, 1),
        ([InstanceGroup("CPU", 2), InstanceGroup("MODEL", 1)], 3, 2),
        ([InstanceGroup("AUTO", 2)], 2 * (GPUS or 1), GPUS or 1),
    ):
        model = load(subject.version("half_plus_two"), *groups)
        assert (model.instances, model.places_instances) == (instances, True), groups
        assert sessions() == before + expected, groups
        assert infer(model, x=floats(1, 2, 5))["y"].tolist() == [2.5, 3, 4.5]
        model.close()
        del model
        assert sessions() == before, groups


async def check_what_the_model_declares(subject):
    unplaced, placed = (
        load(subject.version("half_plus_two"), *groups) for groups in ((), (InstanceGroup("CPU", 2),))
    )
    assert placed.signatures == unplaced.signatures
    assert placed.signature_defs == unplaced.signature_defs
    assert placed.platform == unplaced.platform == "tensorflow_savedmodel"


async def check_each_instance_keeps_to_its_device(subject):
    """The counter is a variable, which each device has for itself."""
    model = load(subject.version("counter"), InstanceGroup("CPU", 2), InstanceGroup("MODEL", 1))

    def count():
        return [infer(model, "incr_counter")["output"].tolist() for _ in range(2)]

    assert on_threads(3, count) == [[1, 2], [3, 4], [1, 2]]
    assert on_threads(3, count) == [[5, 6], [7, 8], [3, 4]]


async def check_a_missing_gpu(subject):
    groups = InstanceGroup("CPU"), InstanceGroup("GPU", gpus=[GPUS])
    with checks.Raises(ModelLoadError) as caught:
        load(subject.version("half_plus_two"), *groups)
    text = (
        f"m/config.pbtxt: instance_group[1].gpus: expected numbers from 0 to {GPUS - 1}, got {GPUS}"
        if GPUS
        else "m/config.pbtxt: instance_group[1].kind: KIND_GPU, but the backend finds no usable GPU"
    )
    assert str(caught.error) == text, caught.error


async def check_a_gpu_has_all_operations(subject):
    """Where they were saved for another device, too, and within functions. What it cannot do is done elsewhere."""

    def build():
        x = v1.placeholder(tf.float32, name="x")
        with tf.device("/device:GPU:0"):
            y = x + 1.0
        with tf.device("/device:CPU:0"):
            return {"serving_default": signature({"x": x}, {"y": y * 2.0})}

    tf_models.save(subject.scratch / "on_devices", build)
    model = SavedModel(subject.scratch / "on_devices", GPU_1)
    assert devices(model) == {"/device:GPU:1"}
    assert infer(model, x=floats(1))["y"].tolist() == [4]


async def check_functions_are_on_the_gpu_of_their_caller(subject):
    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
        def __call__(self, x):
            with tf.device("/device:CPU:0"):
                return {"y": x * 3.0}

    folder, module = subject.scratch / "function", Module()
    tf.saved_model.save(module, str(folder), signatures=module.__call__)
    nodes_on = {}
    for device in (CPU, GPU_1):
        model = SavedModel(folder, device)
        library = model._session.graph.as_graph_def().library
        nodes_on[device] = {node.device for function in library.function for node in function.node_def}
        assert infer(model, x=floats(1, 2))["y"].tolist() == [3, 6]
    assert any("CPU:0" in place for place in nodes_on[CPU]), nodes_on
    assert nodes_on[GPU_1] == {""}, nodes_on


async def check_a_cpu_session_has_no_gpu(subject):
    model = SavedModel(subject.version("half_plus_two"), CPU)
    assert {device.device_type for device in model._session.list_devices()} == {"CPU"}


async def check_variables_and_tables_on_a_gpu(subject):
    model = PlacedSavedModel(subject.version("tf2_vocabulary"), [CPU, GPU_1])

    def ask():
        return infer(model, x=floats(1), offset=floats(1))["y"].tolist()

    assert on_threads(2, ask) == [[3], [3]]


async def check_parameters_are_named_in_the_log(subject):
    with logged("triglot.backends") as lines:
        load(subject.version("half_plus_two"), parameters={"TF_NUM_INTRA_THREADS": "2"})
    assert lines == [
        "m/config.pbtxt: parameters: TF_NUM_INTRA_THREADS: unknown, ignored; the tensorflow backend knows "
        "TF_GRAPH_TAG"
    ], lines


async def check_close_frees_every_device(subject):
    model = load(subject.version("half_plus_two"), InstanceGroup("CPU"), InstanceGroup("MODEL"))
    on_threads(2, partial(infer, model, x=floats(1)))
    held = [
        weakref.ref(thing)
        for version in model._models.values()
        for thing in (version._session, version._session.graph)
    ]
    gc.disable()
    try:
        model.close()
        del model
        assert [thing() for thing in held] == [None] * 4
    finally:
        gc.enable()


async def check_a_device_that_fails_closes_the_others(subject):
    before = sessions()
    with checks.Raises(ModelLoadError) as caught:
        PlacedSavedModel(subject.version("half_plus_two"), [CPU, Device("GPU", -1)])
    assert sessions() == before, caught.error


if __name__ == "__main__":
    checks.run([sys.modules[__name__]], lambda: models_of(Path(sys.argv[1])))
