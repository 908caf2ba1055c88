"""Instances of ONNX models: on which devices they are, what they share, and with which of Triton's parameters."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from tests.process import SECONDS
from tests.protocol_clients.channel import SERVICE
from triglot import backends, testing
from triglot.core.errors import ModelLoadError
from triglot.model.config import Device, InstanceGroup, ModelConfig
from triglot.pb.kserve import inference_pb2 as pb
from triglot.platform.cpus import thread_limit
from triglot.run import DEMO

onnxruntime = pytest.importorskip("onnxruntime")
onnx_backend = importlib.import_module("triglot.backends.onnx")

FILE = DEMO / "digits" / "1" / "model.onnx"
SOURCE = "m/config.pbtxt"
ON_CPUS = onnx_backend.gpu_count() == 0

without_gpu = pytest.mark.skipif(not ON_CPUS, reason="onnxruntime has a GPU here")


def load(groups: Sequence[InstanceGroup] = (), parameters: Mapping[str, str] | None = None) -> Any:
    config = ModelConfig(instance_groups=groups, parameters=parameters or {}, source=SOURCE)
    return backends.load("onnx", FILE, config)


def load_error(groups: Sequence[InstanceGroup] = (), parameters: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(groups, parameters)
    return str(caught.value)


def sessions() -> int:
    """How many there are in this process."""
    return sum(isinstance(held, onnxruntime.InferenceSession) for held in gc.get_objects())


def options(**parameters: str) -> Any:
    """What the model's session has made of the parameters."""
    return load(parameters=parameters)._placement.current().get_session_options()


# --- devices ---


def test_one_instance_without_groups() -> None:
    model = load()
    assert (model.instances, model.places_instances) == (1, False)


@pytest.mark.parametrize(
    ("groups", "instances"),
    [
        ([InstanceGroup("CPU")], 1),
        ([InstanceGroup("CPU", 3)], 3),
        ([InstanceGroup("CPU", 2), InstanceGroup("MODEL", 2)], 4),
        pytest.param([InstanceGroup("AUTO", 2)], 2, marks=without_gpu),
    ],
)
def test_instances_on_the_cpu_share_a_session(groups: list[InstanceGroup], instances: int) -> None:
    gc.collect()
    before = sessions()
    model = load(groups)
    assert (model.instances, model.places_instances) == (instances, True)
    assert sessions() == before + 1
    del model
    gc.collect()
    assert sessions() == before


@without_gpu
@pytest.mark.parametrize("gpus", [(), (0,)])
def test_missing_gpu(gpus: Sequence[int]) -> None:
    text = load_error([InstanceGroup("CPU"), InstanceGroup("GPU", gpus=gpus)])
    why = f"{SOURCE}: instance_group[1].kind: KIND_GPU, but the backend finds no usable GPU"
    if onnx_backend.GPU not in onnxruntime.get_available_providers():
        why += "; onnxruntime has no CUDAExecutionProvider here, run: pip install onnxruntime-gpu"
    assert text == why


@pytest.mark.skipif(
    onnx_backend.GPU in onnxruntime.get_available_providers(), reason="this onnxruntime can use a GPU"
)
def test_onnxruntime_takes_the_cpu_for_a_gpu() -> None:
    """It makes a session all the same, whose one provider is another than the wanted."""
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(ModelLoadError) as caught,
    ):
        onnx_backend.OnnxModel(FILE, [Device("GPU", 1)])
    assert str(caught.value).startswith(
        f"{FILE}: onnxruntime cannot run on GPU 1: expected a session of CUDAExecutionProvider, "
        "got one of CPUExecutionProvider"
    )


@pytest.mark.skipif(ON_CPUS, reason="there is no GPU that onnxruntime could use")
def test_instances_on_a_gpu() -> None:
    model = load([InstanceGroup("GPU", 2, gpus=[0]), InstanceGroup("CPU", 1)])
    assert model.instances == 3
    assert model._placement.current().get_providers()[0] == onnx_backend.GPU
    images = np.random.default_rng(1).random((2, 1, 8, 8), dtype="f4")
    expected = load([InstanceGroup("CPU")]).infer({"image": images})["probabilities"]
    np.testing.assert_allclose(model.infer({"image": images})["probabilities"], expected, atol=1e-2)


# --- in a server ---


def repository(folder: Path, text: str) -> Path:
    """A repository with the model `m` and its config.pbtxt."""
    (folder / "m" / "1").mkdir(parents=True)
    shutil.copy(FILE, folder / "m" / "1")
    (folder / "m" / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{text}')
    return folder


def request(images: Any) -> bytes:
    image = pb.ModelInferRequest.InferInputTensor(name="image", datatype="FP32", shape=images.shape)
    return pb.ModelInferRequest(
        model_name="m", inputs=[image], raw_input_contents=[images.tobytes()]
    ).SerializeToString()


async def test_three_instances_answer_as_onnxruntime_does(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    asked = [random.random((1, 1, 8, 8), dtype="f4") for _ in range(6)]
    session = onnxruntime.InferenceSession(str(FILE), providers=["CPUExecutionProvider"])
    expected = [session.run(None, {"image": images})[0] for images in asked]
    models = repository(tmp_path, "instance_group [{ kind: KIND_CPU count: 3 }]\n")
    async with testing.serve(models) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        infer = channel.unary_unary(SERVICE + "ModelInfer")
        replies = await asyncio.gather(*(infer(request(images), timeout=SECONDS) for images in asked))
    for reply, scores in zip(replies, expected, strict=True):
        (content,) = pb.ModelInferResponse.FromString(reply).raw_output_contents
        np.testing.assert_allclose(np.frombuffer(content, "f4").reshape(scores.shape), scores, rtol=1e-5)


@without_gpu
async def test_server_does_not_start_with_a_missing_gpu(tmp_path: Path) -> None:
    models = repository(tmp_path, "instance_group [{ kind: KIND_GPU }]\n")
    with pytest.raises(ModelLoadError) as caught:
        async with testing.serve(models):
            pass
    assert "m/config.pbtxt: instance_group[0].kind: KIND_GPU, but the" in str(caught.value.__cause__)


# --- parameters ---


def test_threads_and_execution_mode() -> None:
    found = options(intra_op_thread_count="3", inter_op_thread_count="2", execution_mode="1")
    assert (found.intra_op_num_threads, found.inter_op_num_threads) == (3, 2)
    assert found.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert options(execution_mode="0").execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL


def test_what_onnxruntime_does_by_itself() -> None:
    own = onnxruntime.SessionOptions()
    assert options().intra_op_num_threads == thread_limit()
    found = options(intra_op_thread_count="0", inter_op_thread_count="0")
    for name in ("intra_op_num_threads", "inter_op_num_threads", "execution_mode"):
        assert getattr(found, name) == getattr(own, name)


@pytest.mark.parametrize("key", ["intra_op_thread_count", "inter_op_thread_count"])
@pytest.mark.parametrize("value", ["", "-1", "two", "1.5"])
def test_a_count_that_is_none(key: str, value: str) -> None:
    assert load_error(parameters={key: value}) == (
        f"{SOURCE}: parameters: {key}: expected a number of threads, got {value!r}"
    )


def test_an_execution_mode_that_is_none() -> None:
    assert load_error(parameters={"execution_mode": "parallel"}) == (
        f"{SOURCE}: parameters: execution_mode: expected 0 (sequential) or 1 (parallel), got 'parallel'"
    )


def test_other_parameters_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "triglot"):
        options(intra_op_thread_count="1", enable_mem_arena="0")
    assert caplog.messages == [
        f"{SOURCE}: parameters: enable_mem_arena: unknown, ignored; the onnx backend knows intra_op_thread_count, "
        "inter_op_thread_count, execution_mode"
    ]
