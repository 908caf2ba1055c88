"""TorchScript programs, called without a server."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

import gc
import logging
import threading
import warnings
import weakref
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.process import SECONDS
from triglot.core.errors import Code, Internal, InvalidArgument
from triglot.core.tensor import object_array
from triglot.model.config import InstanceGroup, ModelConfig, TensorConfig
from triglot.model.configure import configure

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.grps_torch_scripts import IDENTITY, SUM, script, trace
from tests.backends.torch_files import (
    ON_CPU,
    SAMPLES,
    WHERE_SAVED,
    Counter,
    config,
    forward,
    fp32,
    in_a_thread,
    lists,
    load,
    refused,
)
from tests.backends.triton_served import serving
from triglot.backends.torch import model as torch_model

A = fp32(1)
THREADS = 8
ROUNDS = 25
LOSS = "CUDA error: device-side assert triggered"
"""How torch's error begins for an index on a GPU that there is not."""
FRAGILE = forward(
    "x: Tensor",
    f"self.count.add_(x)\n    if bool((x > 5).any()):\n        raise RuntimeError('{LOSS}')\n"
    "    return self.count",
)
IN_A_PROCESS = """
platform: "pytorch_libtorch"
instance_group { kind: KIND_CPU }
parameters { key: "execution" value { string_value: "process" } }
"""
COUNTER = "def forward(self, x: Tensor):\n    self.count.add_(x)\n    return self.count"


# --- datatypes, shapes and memory ---


@pytest.mark.parametrize("datatype", SAMPLES)
def test_every_datatype(tmp_path: Path, datatype: str) -> None:
    model = load(script(tmp_path / "model.pt"))
    for array in (
        SAMPLES[datatype],
        SAMPLES[datatype][:0],
        SAMPLES[datatype][0:1].reshape(()),
        SAMPLES[datatype][None],
    ):
        answer = model.infer({"x": array})["OUTPUT__0"]
        assert answer.dtype == array.dtype
        assert answer.shape == array.shape
        assert answer.tobytes() == array.tobytes()


def test_bf16_is_computed_with(tmp_path: Path) -> None:
    model = load(script(tmp_path / "model.pt", SUM))
    sample = SAMPLES["BF16"][:1]
    (answer,) = model.infer({"a": sample, "b": sample}).values()
    assert (answer.dtype, answer.tolist()) == (sample.dtype, [-3.0])


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8"])
def test_another_byte_order(tmp_path: Path, dtype: str) -> None:
    (answer,) = load(script(tmp_path / "model.pt")).infer({"x": np.arange(3, dtype=dtype)}).values()
    assert answer.dtype.isnative
    assert answer.tolist() == [0, 1, 2]


def test_strings_are_refused(tmp_path: Path) -> None:
    model = load(script(tmp_path / "model.pt"))
    with pytest.raises(
        InvalidArgument, match=r"^input 'x' is BYTES, which torch does not support; expected one of BOOL"
    ):
        model.infer({"x": object_array([b"text"], (1,))})
    unfit = config(["x"], ["y"])
    text = ModelConfig(inputs=[TensorConfig("x", "BYTES", [1])], outputs=unfit.outputs, source=unfit.source)
    assert refused(tmp_path / "model.pt", text, Code.INVALID_ARGUMENT).startswith(
        "input 'x': torch does not support BYTES; expected one of "
    )


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2"])
def test_an_unaligned_array(tmp_path: Path, dtype: str) -> None:
    model = load(script(tmp_path / "model.pt", forward("x: Tensor", "return x + x")))
    array = np.arange(100, dtype=dtype)
    for offset in range(9):
        data = bytes(offset) + array.tobytes()
        (answer,) = model.infer({"x": np.frombuffer(data, dtype, offset=offset)}).values()
        assert answer.tolist() == (array + array).tolist()


def test_inputs_that_the_program_changes(tmp_path: Path) -> None:
    model = load(script(tmp_path / "model.pt", forward("x: Tensor", "x.mul_(2)\n    return x")))
    data = np.arange(3, dtype="f4").tobytes()
    kept = data[:]
    (answer,) = model.infer({"x": np.frombuffer(data, "f4")}).values()
    assert answer.tolist() == [0, 2, 4]
    assert data == kept == np.arange(3, dtype="f4").tobytes()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("x.t()", [[0, 3], [1, 4], [2, 5]]),
        ("x[:, ::2]", [[0, 2], [3, 5]]),
        ("x[:, 1:2].expand(2, 3)", [[1, 1, 1], [4, 4, 4]]),
        ("torch.complex(x, x).conj().imag", [[0, -1, -2], [-3, -4, -5]]),
        ("x.sum()", 15),
        ("x.to(torch.bfloat16).t()", [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_results_of_any_layout(tmp_path: Path, result: str, expected: Any) -> None:
    model = load(script(tmp_path / "model.pt", forward("x: Tensor", f"return {result}")))
    (answer,) = model.infer({"x": np.arange(6, dtype="f4").reshape(2, 3)}).values()
    assert answer.tolist() == expected


@pytest.mark.parametrize(
    "source",
    [
        COUNTER,
        "def forward(self, x: Tensor):\n    self.count += x\n    return self.count[:1]",
        "def forward(self, x: Tensor):\n    self.count.add_(x)\n    return {'count': self.count}",
    ],
)
def test_an_answer_stays_when_the_next_call_changes_the_program(tmp_path: Path, source: str) -> None:
    model = load(script(tmp_path / "model.pt", source, count=torch.zeros(1)))
    answers = [next(iter(model.infer({"x": fp32(1)}).values())) for _ in range(3)]
    assert [answer.tolist() for answer in answers] == [[1], [2], [3]]


def test_a_tensor_that_is_no_buffer(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Counter()).save(str(tmp_path / "model.pt"))
    model = load(tmp_path / "model.pt")
    first, second = (model.infer({"x": fp32(1)})["OUTPUT__0"] for _ in range(2))
    assert (first.tolist(), second.tolist()) == ([1], [2])


def test_parameters_as_answers(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 1, bias=False)
    model = load(trace(tmp_path / "model.pt", linear, torch.rand(1, 2)))
    (answer,) = model.infer({"input": np.eye(2, dtype="f4")}).values()
    assert answer[:, 0].tolist() == linear.weight.detach()[0].tolist()


def test_a_traced_module_and_a_frozen_one(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    x = torch.rand(4, 3)
    for frozen in (False, True):
        model = load(trace(tmp_path / f"{frozen}.pt", linear, x, frozen=frozen))
        np.testing.assert_allclose(model.infer({"input": x.numpy()})["OUTPUT__0"], linear(x).detach(), rtol=1e-6)


def test_a_program_is_not_in_training(tmp_path: Path) -> None:
    source = forward("x: Tensor", "return torch.dropout(x, 1.0, self.training)")
    model = load(script(tmp_path / "model.pt", source))
    assert lists(model.infer({"x": fp32(1, 2)})) == {"OUTPUT__0": [1, 2]}


# --- failures ---


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (SUM, "The size of tensor a (2) must match the size of tensor b (3) at non-singleton dimension 0"),
        (
            forward("a: Tensor, b: Tensor", "return a.sum(len(b) - 1)"),
            "Dimension out of range (expected to be in ",
        ),
        (
            forward("a: Tensor, b: Tensor", "if len(a) == 2:\n        raise ValueError('two rows')\n    return a"),
            "two rows",
        ),
    ],
)
def test_the_reason_of_a_failure(tmp_path: Path, source: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model = load(script(tmp_path / "model.pt", source))
    with pytest.raises(Internal) as caught:
        model.infer({"a": fp32(1, 2), "b": fp32(1, 2, 3)})
    assert caught.value.message.startswith(f"PyTorch execute failure: {text}")
    assert "\n" not in caught.value.message
    warning, trace = (record for record in caplog.records if str(tmp_path / "model.pt") in record.message)
    assert (warning.levelname, warning.message) == ("WARNING", f"{tmp_path / 'model.pt'}: {caught.value.message}")
    assert trace.levelname == "DEBUG"
    assert "Traceback of TorchScript" in trace.message
    (answer,) = model.infer({"a": fp32(1), "b": fp32(0)}).values()
    assert answer.tolist() in (1, [1])


# --- instances and devices ---


def test_instances_on_one_device_share_a_copy(tmp_path: Path) -> None:
    file = script(tmp_path / "model.pt", COUNTER, count=torch.zeros(1))
    configured = config(groups=[InstanceGroup("CPU", 2), ON_CPU])
    model = load(file, configured)
    configure(model, configured)
    assert (model.instances, model.places_instances) == (3, True)
    counts = [in_a_thread(lambda: model.infer({"x": A}))["OUTPUT__0"].item() for _ in range(3)]
    assert counts == [1, 2, 3]


def test_each_device_has_a_copy_of_its_own(tmp_path: Path) -> None:
    """The place where it was saved counts as another one than the CPU."""
    file = script(tmp_path / "model.pt", COUNTER, count=torch.zeros(1))
    model = load(file, config(groups=[ON_CPU, WHERE_SAVED]))
    assert model.instances == 2
    asked, done = threading.Barrier(3, timeout=SECONDS), threading.Barrier(3, timeout=SECONDS)
    counts: list[list[float]] = []

    def instance() -> None:
        first = model.infer({"x": A})["OUTPUT__0"].item()
        asked.wait()
        counts.append([first, model.infer({"x": A})["OUTPUT__0"].item()])
        done.wait()

    threads = [threading.Thread(target=instance) for _ in range(2)]
    for thread in threads:
        thread.start()
    asked.wait()
    done.wait()
    for thread in threads:
        thread.join()
    # With one copy for both a count would be above 2; a thread that changed its copy would see 1 twice.
    assert counts == [[1, 2], [1, 2]]


@pytest.mark.parametrize("groups", [[ON_CPU], [WHERE_SAVED], [InstanceGroup("AUTO")]])
def test_devices(tmp_path: Path, groups: list[InstanceGroup]) -> None:
    file = script(tmp_path / "model.pt", forward("x: Tensor", "return x + self.offset"), offset=torch.ones(1))
    assert lists(load(file, config(groups=groups)).infer({"x": A})) == {"OUTPUT__0": [2]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("group", [InstanceGroup("GPU"), InstanceGroup("GPU", 2, [1])])
def test_missing_gpu(tmp_path: Path, group: InstanceGroup) -> None:
    text = refused(script(tmp_path / "model.pt"), config(groups=[ON_CPU, group]))
    assert text == "instance_group[1].kind: KIND_GPU, but the backend finds no usable GPU"


def test_many_threads_at_a_time(tmp_path: Path) -> None:
    model = load(script(tmp_path / "model.pt", SUM), config(groups=[InstanceGroup("CPU", THREADS)]))
    wrong: list[Any] = []

    def call(number: int) -> None:
        for round_ in range(ROUNDS):
            answer = lists(model.infer({"a": fp32(number), "b": fp32(round_)}))
            if answer != {"OUTPUT__0": [number + round_]}:
                wrong.append(answer)

    threads = [threading.Thread(target=call, args=[number]) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_closing_frees_the_program(tmp_path: Path) -> None:
    model = load(script(tmp_path / "model.pt", COUNTER, count=torch.zeros(1)))
    module = weakref.ref(model._programs[0]._module)  # type: ignore[attr-defined]
    in_a_thread(lambda: model.infer({"x": A}))
    gc.disable()
    try:
        model.close()
        assert module() is None
    finally:
        gc.enable()


# --- errors that spoil CUDA for the process ---


def test_a_program_that_loses_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_model, "_cuda_lost", threading.Event())
    model = load(script(tmp_path / "model.pt", FRAGILE, count=torch.zeros(1)), config(groups=[ON_CPU]))
    with pytest.raises(
        Internal, match=f"^PyTorch execute failure: {LOSS}; no CUDA call works in this process until "
    ):
        model.infer({"x": fp32(9)})
    model.close()


async def test_its_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "config.pbtxt").write_text(IN_A_PROCESS)
    script(tmp_path / "1" / "model.pt", FRAGILE, count=torch.zeros(1))
    async with serving(tmp_path) as client:
        for _ in range(2):
            counts = [(await client.infer(tmp_path.name, {"x": A})).outputs["OUTPUT__0"].item() for _ in range(2)]
            assert counts == [1, 2]
            code, text = await client.failure(tmp_path.name, {"x": fp32(9)})
            assert code.name == "INTERNAL"
            assert text.startswith(f"PyTorch execute failure: {LOSS}; ")


async def test_result_has_its_own_shape_whatever_is_configured(tmp_path: Path) -> None:
    """As in Triton's backend (ReadOutputTensors)."""
    (tmp_path / "1").mkdir()
    tensor = '{ name: "%s" data_type: TYPE_FP32 dims: [ %s ] }'
    tensors = f"input {tensor % ('INPUT__0', '-1')} output {tensor % ('OUTPUT__0', '7')}"
    (tmp_path / "config.pbtxt").write_text(f'platform: "pytorch_libtorch" {tensors}')
    script(tmp_path / "1" / "model.pt", forward("x: Tensor", "return x.reshape(-1, 1)"))
    async with serving(tmp_path) as client:
        outputs = (await client.infer(tmp_path.name, {"INPUT__0": fp32(1, 2)})).outputs
    np.testing.assert_array_equal(outputs["OUTPUT__0"], fp32(1, 2).reshape(2, 1))


# --- files ---


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            forward("x: Tensor, n: int", "return x * n"),
            "its argument 'n' is int; expected Tensors, or one Dict[str, ",
        ),
        (forward("x: List[Tensor]", "return x[0]"), "its argument 'x' is List[Tensor]; expected Tensors, or one "),
        (
            forward("x: Tensor", "return 'text'"),
            "its result is str; expected a Tensor, a Tuple or List of Tensors, ",
        ),
        (forward("x: Tensor", "return (x, 2.0)"), "its result is Tuple[Tensor, float]; expected a Tensor, "),
        (
            forward("x: Tensor", "return (x, (x, x))"),
            "its result is Tuple[Tensor, Tuple[Tensor, Tensor]]; expected",
        ),
        (forward("x: Tensor", "return"), "its result is NoneType; expected a Tensor, "),
        ("def run(self, x: Tensor):\n    return x", "the program has no method forward"),
    ],
)
def test_programs_that_cannot_be_served(tmp_path: Path, source: str, text: str) -> None:
    found = refused(script(tmp_path / "model.pt", source))
    assert found.startswith(f"cannot load the TorchScript program: {text}")


def test_a_file_of_another_name(tmp_path: Path) -> None:
    for name in ("model.pt2", "program"):
        assert lists(load(script(tmp_path / name)).infer({"x": A})) == {"OUTPUT__0": [1]}


WANTED = (
    "expected a TorchScript program (torch.jit.save), an exported program (torch.export.save) or an "
    "AOTInductor package"
)


@pytest.mark.parametrize("saved", [torch.nn.Linear(1, 1), {"weight": torch.ones(1)}, torch.ones(1)])
def test_pickles_are_not_loaded(tmp_path: Path, saved: Any) -> None:
    file = tmp_path / "model.pt"
    torch.save(saved, file)
    assert refused(file) == f"this is a state dict or pickled module (torch.save); {WANTED}"
    torch.save(saved, file, _use_new_zipfile_serialization=False)
    assert refused(file) == f"this is a pickle, as torch.save wrote before PyTorch 1.6; {WANTED}"


def test_files_that_hold_no_program(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_text("no program")
    assert refused(file) == f"this is not a PyTorch archive; {WANTED}"
    file.write_bytes(b"")
    assert refused(file) == f"this is not a PyTorch archive; {WANTED}"
    file.unlink()
    assert "No such file" in refused(file)


def test_a_broken_program(tmp_path: Path) -> None:
    file = script(tmp_path / "model.pt", IDENTITY, weight=torch.ones(1000))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert refused(file) == f"this is not a PyTorch archive; {WANTED}"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/constants.pkl", b"")
    assert refused(file).startswith("cannot load the TorchScript program: ")
