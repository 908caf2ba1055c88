"""The torch inferer and converter of grps projects, with real TorchScript files."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.grps_tensor_messages import filled, floats, message, named, same
from triglot.backends.grps.context import GrpsContext
from triglot.core.errors import Internal, InvalidArgument, ModelLoadError
from triglot.core.tensor import Array
from triglot.pb.grps import grps_pb2 as pb

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.grps_torch_scripts import IDENTITY, SUM, script, trace
from triglot.backends.grps.torch_inferer import TorchModelInferer, TorchTensorConverter

CONVERTER = TorchTensorConverter()
THREADS = 8
ROUNDS = 25


def loaded(file: Path, device: str = "cpu", args: Any = None) -> TorchModelInferer:
    inferer = TorchModelInferer()
    inferer.init(str(file), device, args)
    assert inferer.load() is True
    return inferer


def infer(inferer: TorchModelInferer, inp: Any) -> Any:
    return inferer.infer(inp, GrpsContext())


def refused(device: Any, text: str, args: Any = None) -> None:
    with pytest.raises(ModelLoadError) as caught:
        TorchModelInferer().init("model.pt", device, args)
    assert str(caught.value) == text


# --- the converter ---


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [[], [2, 3]])
def test_tensors_round_trip(dtype: str, shape: list[int]) -> None:
    array = np.arange(max(1, np.prod(shape, dtype=int)), dtype=dtype).reshape(shape)
    tensors = CONVERTER.preprocess(message(filled(array, "x")), GrpsContext())
    assert isinstance(tensors["x"], torch.Tensor)
    same(tensors["x"].numpy(), array)
    tensors["x"] += 1
    same(named(CONVERTER.postprocess(tensors, GrpsContext()))["x"], array + array.dtype.type(1))


def test_strings_are_refused() -> None:
    text = pb.GenericTensor(dtype=pb.DT_STRING, shape=[1], flat_string=["x"])
    with pytest.raises(InvalidArgument, match=r"^tensor 0: expected dtype DT_UINT8, .*, got DT_STRING$"):
        CONVERTER.preprocess(message(text), GrpsContext())


def test_results_of_any_layout_and_history() -> None:
    grid = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    results = {
        "transposed": grid.t(),
        "every_other": grid[:, ::2],
        "expanded": torch.tensor([1]).expand(2, 2),
        "parameter": torch.nn.Parameter(grid),
        "conjugated": torch.complex(grid, grid).conj().imag,
        "scalar": torch.tensor(7, dtype=torch.int16),
        "empty": torch.empty(0, 4),
    }
    for name, array in named(CONVERTER.postprocess(results, GrpsContext())).items():
        same(array, results[name].detach().resolve_neg().numpy())


@pytest.mark.parametrize(
    ("result", "sent"),
    [
        (torch.tensor([1.5, -0.25], dtype=torch.bfloat16), np.array([1.5, -0.25], "f4")),
        (torch.tensor([True, False]), np.array([1, 0], "u1")),
    ],
    ids=["bfloat16", "bool"],
)
def test_other_datatypes_are_sent_as_wider_ones(result: Any, sent: Any) -> None:
    same(named(CONVERTER.postprocess(result, GrpsContext()))["output"], sent)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (torch.ones(1, dtype=torch.complex64), "output 'output': grps has no dtype for complex64"),
        ([torch.ones(1), [torch.ones(1)]], "output 'output_1': expected a tensor, got list"),
        (1.5, "expected a tensor, or a list, tuple or dict of tensors, got float"),
        (np.ones(1), "expected a tensor, or a list, tuple or dict of tensors, got ndarray"),
    ],
)
def test_results_that_have_no_form(result: Any, text: str) -> None:
    with pytest.raises(Internal) as caught:
        CONVERTER.postprocess(result, GrpsContext())
    assert caught.value.message == text


# --- what a model is called with ---

A, B = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])


@pytest.mark.parametrize("inp", [[A, B], (A, B), {"b": B, "a": A}], ids=["list", "tuple", "dict"])
def test_arguments_and_keywords(tmp_path: Path, inp: Any) -> None:
    inferer = loaded(script(tmp_path / "sum.pt", SUM))
    assert infer(inferer, inp).tolist() == [[11, 22]]
    assert list(inp) in ([A, B], ["b", "a"])


def test_one_tensor_and_what_is_no_tensor(tmp_path: Path) -> None:
    assert infer(loaded(script(tmp_path / "same.pt")), A).tolist() == A.tolist()
    source = "def forward(self, x: Tensor, times: int):\n    return x * times"
    assert infer(loaded(script(tmp_path / "times.pt", source)), [A, 3]).tolist() == [[3, 6]]


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("return x, x + 1", {"output_0": [1, 2], "output_1": [2, 3]}),
        ("return [x, x + 1]", {"output_0": [1, 2], "output_1": [2, 3]}),
        ("return {'y': x + 1}", {"y": [2, 3]}),
        ("return x.sum()", {"output": 3}),
    ],
)
def test_answers_come_as_the_model_gives_them(tmp_path: Path, body: str, answer: Any) -> None:
    inferer = loaded(script(tmp_path / "model.pt", f"def forward(self, x: Tensor):\n    {body}"))
    reply = infer(inferer, message(floats("x", [2], 1, 2)))
    assert {name: array.tolist() for name, array in named(reply).items()} == answer


def test_a_traced_module_and_a_frozen_one(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    x = torch.rand(4, 3)
    for frozen in (False, True):
        inferer = loaded(trace(tmp_path / f"{frozen}.pt", linear, x, frozen=frozen))
        answer = infer(inferer, x)
        assert not answer.requires_grad
        torch.testing.assert_close(answer, linear(x).detach())
        # It is the caller's own, to be changed in place.
        answer += 1


def test_a_model_is_not_in_training(tmp_path: Path) -> None:
    source = "def forward(self, x: Tensor):\n    return torch.dropout(x, 1.0, self.training)"
    assert infer(loaded(script(tmp_path / "dropout.pt", source)), A).tolist() == A.tolist()


def test_an_error_of_the_model(tmp_path: Path) -> None:
    inferer = loaded(script(tmp_path / "sum.pt", SUM))
    with pytest.raises(RuntimeError, match="missing value for argument 'b'"):
        infer(inferer, [A])
    with pytest.raises(RuntimeError, match="must match the size"):
        infer(inferer, message(floats("a", [2], 1, 2), floats("b", [3], 1, 2, 3)))


# --- messages ---


def test_without_a_converter_messages_go_in_and_come_out(tmp_path: Path) -> None:
    inferer = loaded(script(tmp_path / "sum.pt", SUM))
    for names in (("a", "b"), ("", "")):
        reply = infer(inferer, message(floats(names[0], [2], 1, 2), floats(names[1], [2], 10, 20)))
        assert reply == message(floats("output", [2], 11, 22))
    with pytest.raises(InvalidArgument, match="expected gtensors, got str_data"):
        infer(inferer, pb.GrpsMessage(str_data="x"))


def test_a_batch_of_messages(tmp_path: Path) -> None:
    inferer = loaded(script(tmp_path / "sum.pt", SUM))
    sent = [
        message(floats("a", [rows, 1], *range(rows)), floats("b", [rows, 1], *[10] * rows)) for rows in (1, 3, 2)
    ]
    replies = inferer.batch_infer(sent, [GrpsContext() for _ in sent])
    assert [named(reply)["output"].tolist() for reply in replies] == [[[10]], [[10], [11], [12]], [[10], [11]]]


def test_a_batch_of_tensors_is_one_call(tmp_path: Path) -> None:
    inferer = loaded(script(tmp_path / "sum.pt", SUM))
    contexts = [GrpsContext(), GrpsContext()]
    batch = CONVERTER.batch_preprocess([message(floats("", [1, 2], 1, 2), floats("", [1, 2], 3, 4))] * 2, contexts)
    replies = CONVERTER.batch_postprocess(inferer.batch_infer(batch, contexts), contexts)
    assert replies == [message(floats("output", [1, 2], 4, 6))] * 2


def test_a_subclass_that_does_not_call_our_constructor(tmp_path: Path) -> None:
    class Doubled(TorchModelInferer):
        def __init__(self) -> None:
            self.factor = 2

        def infer(self, inp: Any, context: Any) -> Any:
            return super().infer(inp, context) * self.factor

    inferer = Doubled()
    inferer.init(str(script(tmp_path / "sum.pt", SUM)), "cpu")
    assert inferer.load()
    assert infer(inferer, [A, B]).tolist() == [[22, 44]]
    assert inferer.batch_infer([A, B], [GrpsContext()]).tolist() == [[22, 44]]


def test_many_threads_at_a_time(tmp_path: Path) -> None:
    inferer = loaded(script(tmp_path / "sum.pt", SUM))
    wrong: list[Array] = []

    def call(number: int) -> None:
        for round_ in range(ROUNDS):
            sent = message(floats("a", [1], number), floats("b", [1], round_))
            output = named(infer(inferer, sent))["output"]
            if output.tolist() != [number + round_]:
                wrong.append(output)

    threads = [threading.Thread(target=call, args=[number]) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- devices, operations, files ---


def test_a_model_stays_where_it_was_saved(tmp_path: Path) -> None:
    source = "def forward(self, x: Tensor):\n    return x + self.offset"
    inferer = loaded(script(tmp_path / "offset.pt", source, offset=torch.ones(2)), "original_cpu")
    assert infer(inferer, A).tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("device", "model", "inputs"),
    [
        ("cpu", "cpu", "cpu"),
        ("GPU", "cuda:0", "cuda:0"),
        ("cuda:1", "cuda:1", "cuda:1"),
        ("gpu:3", "cuda:3", "cuda:3"),
        ("original_cpu", "original", "cpu"),
        ("original_gpu:1", "original", "cuda:1"),
    ],
)
def test_devices(device: str, model: str, inputs: str) -> None:
    inferer = TorchModelInferer()
    inferer.init("model.pt", device, {})
    assert (inferer._device, inferer._inp_device) == (model, inputs)


@pytest.mark.parametrize("device", [None, "", "tpu", "cpu:1"])
def test_missing_devices(device: Any) -> None:
    refused(device, f"device: expected cpu, cuda, gpu, cuda:N, gpu:N or original, got {device or ''!r}")


@pytest.mark.parametrize("device", ["original", "original_", "original_none"])
def test_an_original_device_needs_one_for_its_inputs(device: str) -> None:
    inputs = device.removeprefix("original").removeprefix("_")
    refused(device, f"inp_device: device original needs cpu, cuda, gpu, cuda:N or gpu:N, got {inputs!r}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu(tmp_path: Path) -> None:
    inferer = TorchModelInferer()
    file = script(tmp_path / "offset.pt", IDENTITY, offset=torch.ones(2))
    inferer.init(str(file), "cuda")
    with pytest.raises(ModelLoadError, match=f"^{file}: the model cannot be loaded: .*(CUDA|NVIDIA)"):
        inferer.load()


def test_libraries_of_operations_are_loaded() -> None:
    # Any shared library will do: what it registers is its own business.
    library = torch._C.__file__
    TorchModelInferer().init("model.pt", "cpu", {"customized_op_paths": [library]})
    assert library in torch.ops.loaded_libraries


def test_libraries_of_operations_that_are_none(tmp_path: Path) -> None:
    missing, text = tmp_path / "missing.so", tmp_path / "text.so"
    text.write_text("no library")
    refused("cpu", f"customized_op_paths: no such file: {missing}", {"customized_op_paths": [str(missing)]})
    refused("cpu", "customized_op_paths: expected a list of files, got 'x.so'", {"customized_op_paths": "x.so"})
    with pytest.raises(ModelLoadError, match=f"^{text}: the operations cannot be loaded: "):
        TorchModelInferer().init("model.pt", "cpu", {"customized_op_paths": [str(text)]})


def test_files_that_hold_no_model(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no model")
    for name in ("missing.pt", "text.pt"):
        inferer = TorchModelInferer()
        inferer.init(str(tmp_path / name), "cpu")
        with pytest.raises(ModelLoadError, match=f"^{tmp_path / name}: the model cannot be loaded: "):
            inferer.load()
