"""Programs of PyTorch on a GPU: where they run, what they return, and whose memory it is afterwards."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.process import FREE_PORTS, Triglot
from tests.protocol_clients.rest import Rest
from tests.waiting import until
from triglot.model.config import Device, InstanceGroup, ModelConfig

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.grps_torch_scripts import IDENTITY, SUM, script
from tests.backends.torch_files import (
    ON_CPU,
    SAMPLES,
    WHERE_SAVED,
    Counter,
    Program,
    config,
    export,
    forward,
    fp32,
    in_a_thread,
    lists,
    load,
    refused,
    skip_unless_exported,
)
from tests.backends.triton_served import GrpcClient, serving
from triglot.backends.torch.tensors import tensor_of

__test__ = torch.cuda.is_available()
"""No test that is skipped where there is no GPU: who runs these files wants all to run."""

MIB = 1 << 20
ON_GPU = InstanceGroup("GPU")
FIRST = Device("GPU", 0)
GPUS = [Device("GPU", number) for number in range(torch.cuda.device_count())]
CALLS = 64
WEIGHTS = 64 * MIB
ROWS = torch.export.Dim("rows", min=1, max=1 << 20)
OUTER = "return (x.reshape(-1, 1) * x.reshape(1, -1)).sum().reshape(1), torch.tensor([x.is_cuda])"
"""Takes the square of its input's memory, and says whether it was a GPU's."""
TOO_MANY = 1 << 19
"""Elements whose square is 1 TiB."""
PLACED = """
platform: "pytorch_libtorch"
max_batch_size: 16
input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}
output [{{ name: "y" data_type: TYPE_FP32 dims: 4 }}, {{ name: "on_gpu" data_type: TYPE_BOOL dims: 1 }}]
instance_group [{{ {group} }}]
{more}
"""
PRODUCT = forward("x: Tensor", "return x @ self.weight, torch.full([x.size(0), 1], x.is_cuda, dtype=torch.bool)")
COMPILED = """
platform: "torch_aoti"
max_batch_size: 16
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def used() -> tuple[int, int]:
    """Bytes of tensors, and bytes that torch has of the driver."""
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.fixture
def returned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], bool]]:
    """Whether all memory is given back that was taken since the test began."""
    free()
    before = used()
    logging.disable(logging.ERROR)  # pytest keeps what is logged, and with it the traces' frames.
    yield lambda: used() == before
    logging.disable(logging.NOTSET)


def devices(model: Any) -> list[str]:
    """Where each instance is."""
    return [str(program.device) for program in model._programs]


def folder(place: Path, name: str, text: str = "") -> Path:
    """Of version 1 of a model."""
    version = place / name / "1"
    version.mkdir(parents=True)
    if text:
        (place / name / "config.pbtxt").write_text(text)
    return version


async def unload(client: GrpcClient, name: str) -> None:
    url = f"http://127.0.0.1:{client.server.rest_port}/v2/repository/models/{name}/unload"
    async with aiohttp.ClientSession() as session, session.post(url, json={}) as response:
        assert response.status == 200, await response.text()


# --- datatypes ---


@pytest.mark.parametrize("kind", ["script", "export"])
@pytest.mark.parametrize("datatype", SAMPLES)
def test_every_datatype(tmp_path: Path, datatype: str, kind: str) -> None:
    array = SAMPLES[datatype]
    if kind == "script":
        model = load(script(tmp_path / "model.pt", forward("x: Tensor", "return x.clone(), x.cpu()")))
    else:
        skip_unless_exported(datatype)
        zeros = torch.zeros(3, dtype=tensor_of("x", array).dtype)
        model = load(export(tmp_path / "model.pt2", Program(lambda _, x: (x.clone(), x.cpu())), zeros))
    assert devices(model) == [f"cuda:{gpu.id}" for gpu in GPUS]
    for answer in model.infer({"x": array}).values():
        assert (answer.dtype, answer.shape) == (array.dtype, array.shape)
        assert answer.tobytes() == array.tobytes()


async def test_datatypes_of_the_protocol(tmp_path: Path) -> None:
    script(folder(tmp_path, "same") / "model.pt", IDENTITY)
    async with serving(tmp_path) as client:
        for datatype, array in SAMPLES.items():
            if not datatype.startswith("COMPLEX"):
                (answer,) = (await client.infer("same", {"x": array})).outputs.values()
                assert (answer.dtype, answer.tobytes()) == (array.dtype, array.tobytes())


# --- devices ---


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], GPUS),
        ([ON_GPU], GPUS),
        ([InstanceGroup("AUTO", 2)], [gpu for gpu in GPUS for _ in range(2)]),
        ([InstanceGroup("GPU", 2, gpus=[0]), ON_CPU], [FIRST, FIRST, Device("CPU")]),
        ([WHERE_SAVED], [Device("CPU")]),
    ],
)
def test_instances_are_where_the_configuration_says(
    tmp_path: Path, groups: Sequence[InstanceGroup], expected: list[Device]
) -> None:
    settings = config(["x"], ["y"], groups=groups)
    for file in (
        script(tmp_path / "model.pt", weight=torch.ones(1)),
        export(tmp_path / "model.pt2", Program(lambda self, x: x + self.count + self.offset - 1), torch.ones(1)),
    ):
        model = load(file, settings)
        assert devices(model) == [f"cuda:{at.id}" if at.kind == "GPU" else "cpu" for at in expected]
        assert model.places_instances is bool(groups)
        answers = [in_a_thread(lambda: lists(model.infer({"x": fp32(3)}))) for _ in expected]  # noqa: B023
        assert answers == [{"y": [3]}] * len(expected)


def test_a_program_that_was_saved_on_a_gpu(tmp_path: Path) -> None:
    on_gpu = torch.full([1], 2.0, device="cuda")
    scaled = forward("x: Tensor", "return x * self.weight")
    file = script(tmp_path / "model.pt", scaled, weight=on_gpu)
    program = Program(lambda self, x: x + self.count + self.offset).cuda()
    program.offset = on_gpu
    moved = export(tmp_path / "model.pt2", program, on_gpu)
    for group, expected in ((WHERE_SAVED, "cuda:0"), (ON_GPU, "cuda:0"), (ON_CPU, "cpu")):
        for saved, answer in ((file, [6]), (moved, [5])):
            model = load(saved, config(["x"], ["y"], groups=[group]))
            assert devices(model)[0] == expected
            assert lists(model.infer({"x": fp32(3)})) == {"y": answer}


def test_missing_gpu(tmp_path: Path) -> None:
    file, count = script(tmp_path / "model.pt"), len(GPUS)
    text = refused(file, config(["x"], ["y"], groups=[InstanceGroup("GPU", gpus=[0, count])]))
    assert text == f"instance_group[0].gpus: expected numbers from 0 to {count - 1}, got {count}"


def test_instances_share_the_weights_of_their_device(tmp_path: Path, returned: Callable[[], bool]) -> None:
    weight = torch.ones(WEIGHTS // 4)
    file = script(tmp_path / "model.pt", forward("x: Tensor", "return x + self.weight[0]"), weight=weight)
    before = torch.cuda.memory_allocated()
    model = load(file, config(["x"], ["y"], groups=[InstanceGroup("GPU", 3, gpus=[0])]))
    assert WEIGHTS <= torch.cuda.memory_allocated() - before < 2 * WEIGHTS
    assert lists(model.infer({"x": fp32(3)})) == {"y": [4]}
    model.close()
    assert returned()


def test_what_a_program_changes_in_place(tmp_path: Path) -> None:
    counter = forward("x: Tensor", "self.count.add_(x)\n    x.zero_()\n    return self.count, x")
    given = fp32(1)
    for model in (
        load(script(tmp_path / "model.pt", counter, count=torch.zeros(1))),
        load(export(tmp_path / "model.pt2", Program(_count_steps), torch.ones(1))),
    ):
        answers = [model.infer({"x": given}) for _ in range(3)]
        assert [lists(answer) for answer in answers] == [
            {"OUTPUT__0": [count], "OUTPUT__1": [0]} for count in (1, 2, 3)
        ]
        assert given.tolist() == [1]


def _count_steps(self: Any, x: Any) -> Any:
    self.count.add_(x)
    return self.count, x.zero_()


def test_a_tensor_that_is_no_buffer_moves_along(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Counter()).save(str(tmp_path / "model.pt"))
    model = load(tmp_path / "model.pt")
    assert [lists(model.infer({"x": fp32(2)})) for _ in range(2)] == [{"OUTPUT__0": [2]}, {"OUTPUT__0": [4]}]


# --- in a server ---


@pytest.mark.parametrize(
    ("group", "more"),
    [
        ("kind: KIND_GPU count: 2", ""),
        ("kind: KIND_AUTO", "dynamic_batching { max_queue_delay_microseconds: 1000 }"),
        (
            "kind: KIND_GPU gpus: [ 0 ] count: 2",
            'parameters { key: "execution" value { string_value: "process" } }',
        ),
    ],
    ids=["two", "batched", "processes"],
)
async def test_many_calls_at_a_time(tmp_path: Path, group: str, more: str) -> None:
    weight = torch.arange(16, dtype=torch.float32).reshape(4, 4)
    file = folder(tmp_path, "product", PLACED.format(group=group, more=more)) / "model.pt"
    script(file, PRODUCT, weight=weight)
    random = np.random.default_rng(1)
    asked = [random.random((1 + number % 4, 4), dtype="f4") for number in range(CALLS)]
    async with serving(tmp_path / "product") as client:
        replies = await asyncio.gather(*(client.infer("product", {"x": rows}, 60) for rows in asked))
    for rows, reply in zip(asked, replies, strict=True):
        assert_allclose(reply.outputs["y"], rows @ weight.numpy(), rtol=1e-5)
        assert reply.outputs["on_gpu"].tolist() == [[True]] * len(rows)


@pytest.mark.parametrize("kind", ["script", "export"])
async def test_a_call_that_takes_too_much_memory(tmp_path: Path, kind: str, returned: Callable[[], bool]) -> None:
    if kind == "script":
        script(folder(tmp_path, "outer") / "model.pt", forward("x: Tensor", OUTER))
    else:
        file = folder(tmp_path, "outer") / "model.pt2"
        outer = Program(lambda _, x: ((x.reshape(-1, 1) * x.reshape(1, -1)).sum().reshape(1), x.clone()))
        export(file, outer, torch.ones(8), dims=({0: ROWS},))
    async with serving(tmp_path, model_control_mode="explicit", load_model="*") as client:
        for _ in range(2):
            code, text = await client.failure("outer", {"x": np.ones(TOO_MANY, "f4")}, timeout=60)
            assert code is grpc.StatusCode.INTERNAL
            assert text.startswith("PyTorch execute failure: CUDA out of memory. Tried to allocate 1024.00 GiB.")
            answer = (await client.infer("outer", {"x": np.full(3, 2, "f4")}, 60)).outputs
            assert answer["OUTPUT__0"].tolist() == [36]
            assert answer["OUTPUT__1"].all()
        await unload(client, "outer")
        await until(returned, "memory is not given back", lambda: str(used()))


@pytest.mark.parametrize("kind", ["script", "export"])
async def test_unloading_frees_the_memory(tmp_path: Path, kind: str, returned: Callable[[], bool]) -> None:
    weight = torch.ones(WEIGHTS // 4)
    if kind == "script":
        kept = f"self.left = torch.ones({WEIGHTS // 4}, device=x.device)\n    "
        source = forward("x: Tensor", kept + "return (x + self.weight + self.left)[:1]")
        script(folder(tmp_path, "big") / "model.pt", source, weight=weight, left=weight[:1])
    else:
        program = Program(lambda self, x: (x + self.count + self.offset)[:1])
        program.count, program.offset = weight, weight
        export(folder(tmp_path, "big") / "model.pt2", program, torch.ones(1))
    async with serving(tmp_path, model_control_mode="explicit", load_model="*") as client:
        for _ in range(2):
            assert (await client.infer("big", {"x": fp32(1)}, 60)).outputs["OUTPUT__0"].tolist() == [3]
        assert used()[0] >= WEIGHTS
        await unload(client, "big")
        await until(returned, "memory is not given back", lambda: str(used()))


async def test_two_models_that_add_on_two_kinds_of_devices(tmp_path: Path) -> None:
    for name, kind in (("cpu", "KIND_CPU"), ("gpu", "KIND_GPU")):
        text = f'platform: "pytorch_libtorch"\ninstance_group {{ kind: {kind} }}\n'
        script(folder(tmp_path, name, text) / "model.pt", SUM)
    big = np.float32(2**24)
    async with serving(tmp_path) as client:
        for name in ("cpu", "gpu"):
            answer = await client.infer(name, {"a": np.array([big, 1]), "b": np.array([1, 2], "f4")})
            assert answer.outputs["OUTPUT__0"].tolist() == [big, 3]
            code, text = await client.failure(name, {"a": fp32(1, 2), "b": fp32(1, 2, 3)})
            assert code is grpc.StatusCode.INTERNAL
            assert text.startswith("PyTorch execute failure: The size of tensor a (2) must match the size of ")


# --- errors that spoil CUDA for the process ---

ROW = """
platform: "pytorch_libtorch"
input { name: "x" data_type: TYPE_INT64 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
instance_group { kind: KIND_GPU gpus: [ 0 ] }
"""
LOOKED_UP = forward("x: Tensor", "return torch.nn.functional.embedding(x, self.table)[:, 0]")
LOSS = (
    "PyTorch execute failure: CUDA error: device-side assert triggered; no CUDA call works in this process until"
)


def write_table(place: Path, name: str, more: str = "") -> None:
    script(folder(place, name, ROW + more) / "model.pt", LOOKED_UP, table=torch.arange(40.0).reshape(10, 4))


async def test_wrong_index_costs_one_process(tmp_path: Path) -> None:
    write_table(tmp_path, "table", 'parameters { key: "execution" value { string_value: "process" } }')
    write_table(tmp_path, "other")
    async with serving(tmp_path) as client:
        for _ in range(2):
            for name in ("table", "other"):
                reply = await client.infer(name, {"x": np.array([1, 2])}, 60)
                assert reply.outputs["y"].tolist() == [4, 8]
            code, text = await client.failure("table", {"x": np.array([99])}, timeout=60)
            assert (code, text[: len(LOSS)]) == (grpc.StatusCode.INTERNAL, LOSS)


def test_wrong_index_costs_the_server(tmp_path: Path) -> None:
    """One of its own: its threads share the CUDA that is lost."""
    write_table(tmp_path, "table")
    write_table(tmp_path, "other")
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0") as server:
        rest = Rest(server.ports()[1])

        def infer(name: str, index: int) -> tuple[int, Any]:
            tensor = {"name": "x", "datatype": "INT64", "shape": [1], "data": [index]}
            return rest.post(f"/v2/models/{name}/infer", {"inputs": [tensor]})

        def ready() -> list[int]:
            return [rest.get(f"/v2/models/{name}/ready")[0] for name in ("table", "other")]

        assert infer("table", 2)[1]["outputs"][0]["data"] == [8]
        assert ready() == [200, 200]
        for name, index in (("table", 99), ("table", 2), ("other", 2)):
            status, answer = infer(name, index)
            assert (status, answer["error"][: len(LOSS)]) == (500, LOSS)
        assert 200 not in ready()
        server.stop()
        assert "failed to close" not in server.stderr.text()


# --- AOTInductor ---

if hasattr(torch._inductor, "aoti_compile_and_package") and shutil.which("g++") is not None:

    @pytest.fixture(scope="module")
    def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Compiled once: that takes a minute."""
        file = tmp_path_factory.mktemp("compiled") / "model.pt2"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of torch's own parts.
            scaled = Program(lambda self, x: {"y": x * 2 + self.count}).cuda()
            dims = ({0: torch.export.Dim("rows", min=1, max=16)},)
            program = torch.export.export(scaled, (torch.rand(4, 4, device="cuda"),), dynamic_shapes=dims)
            torch._inductor.aoti_compile_and_package(program, package_path=str(file))
        return file

    @pytest.mark.parametrize("group", ["", "instance_group { kind: KIND_GPU count: 2 }"])
    async def test_a_compiled_program(
        package: Path, tmp_path: Path, group: str, returned: Callable[[], bool]
    ) -> None:
        shutil.copy(package, folder(tmp_path, "compiled", COMPILED + group) / "model.pt2")
        x = np.arange(8, dtype="f4").reshape(2, 4)
        async with serving(tmp_path, model_control_mode="explicit", load_model="*") as client:
            replies = await asyncio.gather(*(client.infer("compiled", {"x": x + n}, 60) for n in range(CALLS)))
            assert [reply.outputs["y"].tolist() for reply in replies] == [
                (2 * (x + number)).tolist() for number in range(CALLS)
            ]
            await unload(client, "compiled")
            await until(returned, "memory is not given back", lambda: str(used()))

    def test_a_compiled_program_stays_on_its_kind_of_device(package: Path) -> None:
        text = refused(package, ModelConfig(instance_groups=[ON_CPU]))
        assert text.endswith("it was compiled for cuda, and cannot run on cpu")
