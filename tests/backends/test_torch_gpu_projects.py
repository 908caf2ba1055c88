"""Triton Python models and grps projects whose code uses PyTorch on a GPU."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import grpc
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.backends.grps_folders import entry, write_project
from tests.backends.grps_served import served
from tests.backends.grps_tensor_messages import floats, message, named
from tests.waiting import until

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.grps_torch_scripts import SUM, script
from tests.backends.triton_served import X_TO_Y, ints, serving, write_model
from triglot.backends.grps.gpu import GpuMonitor, limit_memory
from triglot.backends.grps.server_settings import GpuSettings
from triglot.backends.torch.tensors import tensor_of
from triglot.backends.triton_python.datatypes import NUMBERS
from triglot.backends.triton_python.tensor import Tensor
from triglot.core.tensor import DATATYPES
from triglot.telemetry.monitor import Monitor

__test__ = torch.cuda.is_available()
"""No test that is skipped where there is no GPU: who runs these files wants all to run."""

MIB = 1 << 20
CALLS = 32
NUMERIC = [name for name in NUMBERS if name != "BYTES"]
ON_GPU = X_TO_Y + "instance_group { kind: KIND_GPU gpus: [ 0 ] count: 2 }\n"
IN_PROCESSES = 'parameters { key: "execution" value { string_value: "process" } }\n'


@pytest.fixture
def taken() -> Iterator[Callable[[], int]]:
    """Bytes of tensors that were made since the test began, and are still there."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    logging.disable(logging.ERROR)  # pytest keeps what is logged, and with it the traces' frames.
    yield lambda: int(torch.cuda.memory_allocated() - before)
    logging.disable(logging.NOTSET)


# --- Triton Python models ---


@pytest.mark.parametrize("datatype", NUMERIC)
def test_every_datatype_round_trip(datatype: str) -> None:
    array = (np.arange(6) % 2).astype(DATATYPES[datatype].dtype).reshape(2, 3)
    on_gpu = torch.from_dlpack(Tensor("X", array).to_dlpack()).cuda()
    for value in (on_gpu, torch.utils.dlpack.to_dlpack(on_gpu), on_gpu.t().contiguous().t(), on_gpu[:, ::2]):
        expected = array[:, ::2] if value is not on_gpu and tuple(getattr(value, "shape", ())) == (2, 2) else array
        back = Tensor.from_dlpack("Y", value)
        assert back.is_cpu()
        assert back.as_numpy().dtype == array.dtype
        assert_array_equal(back.as_numpy(), expected)


def test_tensors_of_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for module in ("cupy", "jax.numpy", "torch"):
        if find_spec(module.partition(".")[0]) is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of their own parts.
            library = importlib.import_module(module)
            for datatype in ("BOOL", "INT32", "FP16", "FP32", "BF16"):
                numbers = np.array([[0, 1], [1, 0]], DATATYPES[datatype].dtype)
                if module == "torch":
                    value = tensor_of("X", numbers).cuda()
                elif module == "cupy" and datatype == "BF16":
                    continue  # Not before its version 14.
                else:
                    value = library.asarray(numbers)
                assert value.__dlpack_device__()[0] == 2
                back = Tensor.from_dlpack("Y", value).as_numpy()
                assert back.dtype == numbers.dtype
                assert_array_equal(back, numbers)


DOUBLES = """
class TritonPythonModel:
    def initialize(self, args):
        assert args["model_instance_kind"] == "GPU", args
        self.device = torch.device("cuda", int(args["model_instance_device_id"]))
        self.factor = torch.full([1 << 22], 2, dtype=torch.int32, device=self.device)

    def execute(self, requests):
        responses = []
        for request in requests:
            [x] = request.inputs()
            assert x.is_cpu()
            there = torch.from_dlpack(x.to_dlpack()).to(self.device)
            if there[0] < 0:
                there = torch.ones([1 << 40], dtype=torch.int8, device=self.device)
            y = there * self.factor[0]
            assert y.is_cuda
            given = y if there[0] % 2 else torch.utils.dlpack.to_dlpack(y)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", given)]))
        return responses
"""


@pytest.mark.parametrize("where", ["", IN_PROCESSES], ids=["threads", "processes"])
async def test_model_that_computes_on_the_gpu(tmp_path: Path, where: str, taken: Callable[[], int]) -> None:
    write_model(tmp_path, "doubles", DOUBLES, ON_GPU + where, imports="import torch")
    async with serving(tmp_path, model_control_mode="explicit", load_model="*") as client:
        replies = await asyncio.gather(*(client.infer("doubles", {"X": ints(n, 7)}, 60) for n in range(CALLS)))
        assert [reply.outputs["Y"].tolist() for reply in replies] == [[2 * n, 14] for n in range(CALLS)]
        held = taken()
        assert held == (0 if where else 32 * MIB)
        for _ in range(2):
            code, text = await client.failure("doubles", {"X": ints(-1)}, timeout=60)
            assert code is grpc.StatusCode.INTERNAL
            assert "message: OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 GiB." in text
            assert (await client.infer("doubles", {"X": ints(1)}, 60)).outputs["Y"].tolist() == [2]
        await until(lambda: taken() == held, "the failed calls hold memory", lambda: str(taken()))
        url = f"http://127.0.0.1:{client.server.rest_port}/v2/repository/models/doubles/unload"
        async with aiohttp.ClientSession() as session, session.post(url, json={}) as response:
            assert response.status == 200
        await until(lambda: taken() == 0, "memory is not given back", lambda: str(taken()))


# --- grps ---


@pytest.mark.parametrize("device", ["gpu", "cuda:0", "original"])
@pytest.mark.parametrize("converter", ["torch", "none"])
async def test_a_project_on_a_gpu(tmp_path: Path, device: str, converter: str) -> None:
    weight = torch.ones(1, device="cuda" if device == "original" else "cpu")
    source = SUM.replace("a + b", "a + b + self.weight + 100 * int(a.is_cuda)")
    script(tmp_path / "sum.pt", source, weight=weight)
    placed = {"device": device, "inp_device": "gpu"} if device == "original" else {"device": device}
    file = str(tmp_path / "sum.pt")
    model = entry(inferer_type="torch", inferer_path=file, converter_type=converter, **placed)
    async with served(write_project(tmp_path, models=[model])) as project:
        reply = await project.predict(message(floats("a", [1, 2], 1, 2), floats("b", [1, 2], 10, 20)))
        assert named(reply)["output"].tolist() == [[112, 123]]
        lost = message(floats("a", [2], 1, 2), floats("b", [3], 1, 2, 3))
        status = (await project.predict(lost)).status
        assert "The size of tensor a (2) must match the size of tensor b (3)" in status.msg
        reply = await project.predict(message(floats("a", [1], 1), floats("b", [1], 10)))
        assert named(reply)["output"].tolist() == [112]


def test_memory_that_a_project_may_take() -> None:
    settings = GpuSettings((0,), "torch", 256, 3600)
    gc.collect()
    torch.cuda.empty_cache()
    limit_memory(settings)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 512\.00 MiB"):
            torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        limit_memory(GpuSettings((0,), "torch", 1 << 30))
        kept = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        del kept
        assert torch.cuda.memory_reserved() >= 512 * MIB
        with GpuMonitor(GpuSettings((0,), "torch", None, 3600), Monitor(), read=list) as watch:
            assert watch.collect(watch.freed + 3600)
        assert torch.cuda.memory_reserved() < 512 * MIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
