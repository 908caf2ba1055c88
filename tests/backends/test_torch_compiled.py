"""Packages of AOTInductor."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

import inspect
import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kept_files import kept_files
from tests.process import outcome, start_python
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.model.config import InstanceGroup, ModelConfig

torch = pytest.importorskip("torch", reason="the torch environment has it")
if not hasattr(torch._inductor, "aoti_compile_and_package") or shutil.which("g++") is None:
    pytest.skip("AOTInductor needs torch 2.6 and g++", allow_module_level=True)

from tests.backends.torch_files import ON_CPU, VERSION, config, fp32, lists, load, refused
from tests.backends.triton_served import serving

CONFIG = """
platform: "torch_aoti"
max_batch_size: 8
input [{ name: "A" data_type: TYPE_FP32 dims: 2 }, { name: "B" data_type: TYPE_FP32 dims: 2 }]
output [{ name: "total" data_type: TYPE_FP32 dims: 2 }, { name: "less" data_type: TYPE_FP32 dims: 2 }]
"""


class SumAndDifference(torch.nn.Module):  # type: ignore[name-defined, misc]
    """Gives a dict."""

    def forward(self, a: Any, more: Any) -> Any:
        return {"total": a + more["b"], "less": a - more["b"]}


def compile_into(folder: Path) -> None:
    """Takes a minute."""
    example = torch.rand(4, 2), {"b": torch.rand(4, 2)}
    rows = torch.export.Dim("rows", min=1, max=16)
    dims = ({0: rows}, {"b": {0: rows}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch's own parts.
        program = torch.export.export(SumAndDifference(), example, dynamic_shapes=dims)
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))


@pytest.fixture(scope="module")
def package() -> Path:
    source = torch.__version__ + inspect.getsource(SumAndDifference) + inspect.getsource(compile_into)
    return kept_files(Path(sys.prefix), "compiled", source, compile_into) / "model.pt2"


ONE, OTHER = fp32(1, 2).reshape(1, 2), fp32(3, 5).reshape(1, 2)


def test_names_and_outcome(package: Path) -> None:
    model = load(package, config(["INPUT__0", "INPUT__1"], ["total", "less"]))
    assert model.platform == "torch_aoti"
    assert not model.any_tensors
    assert lists(model.infer({"INPUT__0": ONE, "INPUT__1": OTHER})) == {"total": [[4, 7]], "less": [[-2, -3]]}
    model.close()


def test_configured_names(package: Path) -> None:
    model = load(package, config(["left", "right"], ["less"], groups=[ON_CPU]))
    assert [spec.name for spec in model.inputs] == ["left", "right"]
    assert lists(model.infer({"left": ONE, "right": OTHER})) == {"less": [[-2, -3]]}


@pytest.mark.skipif(VERSION < (2, 13), reason="torch says why since 2.13")
def test_with_its_own_checks(package: Path) -> None:
    """The code looks once at the variable: a process of its own."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.backends.torch_files import ON_CPU, config, load
import numpy as np
from pathlib import Path
from triglot.core.errors import InvalidArgument
model = load(Path({str(package)!r}), config(["a", "b"], ["less"], groups=[ON_CPU]))
for shape in ((2, 3), (3, 2)):
    try:
        model.infer({{"a": np.ones((2, 2), "f4"), "b": np.ones(shape, "f4")}})
    except InvalidArgument as error:
        print(error)
print(model.infer({{"a": np.ones((2, 2), "f4"), "b": np.ones((2, 2), "f4")}})["less"].tolist())
"""
    ran = outcome(start_python(["-c", code], environment={"AOTI_RUNTIME_CHECK_INPUTS": "1"}))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "input_handles[1]: unmatched dim value at 1, expected: 2, but got: 3",
        "expected size 3==2, stride 2==2 at dim=0",
        "[[0.0, 0.0], [0.0, 0.0]]",
    ]


def test_what_cannot_be_loaded(package: Path, tmp_path: Path) -> None:
    text = refused(package, code=Code.INVALID_ARGUMENT)
    assert text.startswith("expected inputs and outputs in a config.pbtxt: an AOTInductor package does not")
    text = refused(package, config(["one"], ["less"]), Code.INVALID_ARGUMENT)
    assert text == "input: expected the program's INPUT__0, INPUT__1; got one: missing INPUT__1"
    damaged = tmp_path / "model.pt2"
    with zipfile.ZipFile(package) as original, zipfile.ZipFile(damaged, "w") as archive:
        for name in original.namelist():
            archive.writestr(name, b"" if name.endswith(".so") else original.read(name))
    assert refused(damaged).startswith("cannot load the AOTInductor package: ")


if torch.cuda.is_available():  # No test that is skipped where there is no GPU: who runs these wants all to run.

    def test_on_another_kind_of_device(package: Path) -> None:
        text = refused(package, ModelConfig(instance_groups=[InstanceGroup("GPU")]))
        assert text.endswith("it was compiled for cpu, and cannot run on cuda")
        assert load(package, config(["a", "b"], ["less"])).instances == 1


async def test_behind_a_server_as_triton_configures_it(package: Path, tmp_path: Path) -> None:
    (tmp_path / "sums" / "1").mkdir(parents=True)
    shutil.copy(package, tmp_path / "sums" / "1" / "model.pt2")
    (tmp_path / "sums" / "config.pbtxt").write_text(CONFIG)
    async with serving(tmp_path / "sums") as client:
        rows = np.arange(6, dtype="f4").reshape(3, 2)
        reply = await client.infer("sums", {"A": rows, "B": rows})
        assert lists(reply.outputs) == {"total": (2 * rows).tolist(), "less": np.zeros((3, 2)).tolist()}
        code, text = await client.failure("sums", {"A": rows, "B": rows[:, :1]})
        assert (code.name, "unexpected shape for input 'B'" in text) == ("INVALID_ARGUMENT", True)
        assert client.server.dataplane.metadata(EVERYTHING, "sums").platform == "torch_aoti"
