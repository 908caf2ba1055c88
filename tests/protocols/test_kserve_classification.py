"""Outputs as their highest values with their labels (spec 2.7)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.protocols.kserve_served import Served, serve_models
from tests.protocols.tensor_places import INTERFACES, In, Outcome, ask
from triglot import testing
from triglot.core.errors import Code, InvalidArgument, ModelLoadError
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES, Array, datatype_of, object_array, unpack_bytes
from triglot.core.types import OutputOptions, OutputTensor
from triglot.protocols.kserve.classification import MAX_ELEMENTS, classify
from triglot.repository.manager.loader import MAX_LABEL_BYTES

EVERY = pytest.mark.parametrize("interface", INTERFACES)
in_module = pytest.mark.asyncio(loop_scope="module")


def texts(array: Array, classes: int, *labels: bytes, batched: bool = False) -> Any:
    """The elements, nested as they are."""
    found = classify(OutputTensor("y", datatype_of(array), array), classes, labels, batched=batched)
    assert (found.name, found.datatype) == ("y", "BYTES")
    return found.array.tolist()


def test_floats_have_six_decimals() -> None:
    assert texts(np.array([0.1, 3.3, -1], "f4"), 2) == [b"3.300000:1", b"0.100000:0"]
    assert texts(np.array([1e10, 2.5e-7]), 9) == [b"10000000000.000000:0", b"0.000000:1"]
    assert texts(np.array([16777216.0, 1 / 3], "f4"), 2) == [b"16777216.000000:0", b"0.333333:1"]
    odd = np.array([math.nan, math.inf, -math.inf, 0], "f4")
    assert texts(odd, 4) == [b"inf:1", b"0.000000:3", b"-inf:2", b"nan:0"]


def test_integers_are_plain() -> None:
    assert texts(np.array([-128, 127], "i1"), 2) == [b"127:1", b"-128:0"]
    assert texts(np.array([0, 2**64 - 1], "u8"), 1) == [b"18446744073709551615:1"]
    assert texts(np.array([-(2**63), 0, 2**63 - 1]), 3) == [
        b"9223372036854775807:2",
        b"0:1",
        b"-9223372036854775808:0",
    ]


def test_rows_of_a_batch() -> None:
    values = np.array([[[1, 2], [4, 3]], [[9, 9], [9, 10]]], "i4")
    assert texts(values, 2, batched=True) == [[b"4:2", b"3:3"], [b"10:3", b"9:0"]]
    assert texts(values, 2) == [b"10:7", b"9:4"]
    assert texts(np.array([5, 7], "i4"), 3, batched=True) == [[b"5:0"], [b"7:0"]]
    assert texts(values[::-1, :, ::-1], 1, batched=True) == [[b"10:2"], [b"4:3"]]


def test_no_elements() -> None:
    assert texts(np.empty(0, "f4"), 3) == []
    assert texts(np.empty((2, 0), "f4"), 3, batched=True) == [[], []]
    assert texts(np.empty((0, 5), "f4"), 3, batched=True) == []
    assert texts(np.array(2.0), 3) == [b"2.000000:0"]


def test_labels() -> None:
    values = np.array([1, 4, 3, 2], "i4")
    assert texts(values, 4, b"a", b"", "süß:".encode()) == [b"4:1", "3:2:süß:".encode(), b"2:3", b"1:0:a"]


@pytest.mark.parametrize("big", [False, True])
def test_other_layouts(big: bool) -> None:
    values = np.array([1, 300, 2], ">f4" if big else "<f4")
    assert texts(values, 2) == [b"300.000000:1", b"2.000000:2"]


@pytest.mark.parametrize(
    ("array", "datatype"),
    [
        (np.zeros(2, "f2"), "FP16"),
        (np.zeros(2, ml_dtypes.bfloat16), "BF16"),
        (np.zeros(2, bool), "BOOL"),
        (np.zeros(2, "c8"), "COMPLEX64"),
        (np.zeros(2, DATATYPES["QUINT8"].dtype), "QUINT8"),
        (object_array([b"1"], (1,)), "BYTES"),
    ],
)
def test_datatypes_that_have_no_classes(array: Array, datatype: str) -> None:
    text = f"class result not available for output 'y' due to unsupported type '{datatype}'"
    with pytest.raises(InvalidArgument) as caught:
        classify(OutputTensor("y", datatype, array), 1, (), batched=False)
    assert caught.value.message == text


def test_elements_are_limited() -> None:
    values = np.zeros(MAX_ELEMENTS + 1, "u1")
    with pytest.raises(InvalidArgument, match="output 'y': it has 1000001 elements, the limit is 1000000"):
        texts(values, 1)
    assert texts(values[:-1], 2) == [b"0:0", b"0:1"]


NUMBERS = sorted(set(DATATYPES) - {"BOOL", "BYTES", "FP16", "BF16", *TFSERVING_DATATYPES})


@st.composite
def rows(draw: st.DrawFn) -> Array:
    dtype = DATATYPES[draw(st.sampled_from(NUMBERS))].dtype
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=7))
    few = hnp.from_dtype(dtype)
    some: Array = draw(hnp.arrays(dtype, shape, elements=st.one_of(few, st.sampled_from([0, 1]))))
    if dtype.kind == "f" and draw(st.booleans()):
        some[some == 1] = -0.0
    return some


@given(rows(), st.integers(1, 60), st.booleans())
def test_as_sorting_by_hand_has_it(values: Array, classes: int, batched: bool) -> None:
    """Descending, equals by index, NaN last; 0 and -0 are equal."""
    flat = values.reshape(len(values) if batched else 1, -1)
    expected = []
    for row in flat.tolist():
        order = sorted(
            range(len(row)), key=lambda at: (math.isnan(row[at]), -row[at] if row[at] == row[at] else 0, at)
        )
        form = "%f:%d" if values.dtype.kind == "f" else "%d:%d"
        expected.append([(form % (row[at], at)).encode() for at in order[:classes]])
    assert texts(values, classes, batched=batched) == (expected if batched else expected[0])


# --- through real ports ---

MODEL = """
import numpy as np
import triglot


class Scores(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", {batch}[-1])]
    outputs = [triglot.TensorSpec("y", "FP32", {batch}[-1]), triglot.TensorSpec("z", "FP16", {batch}[-1])]

    def infer(self, inputs):
        {give} {{"y": inputs["x"], "z": np.clip(inputs["x"], 0, 9).astype(np.float16)}}
"""
LABELS = b"cat\r\ndog\n\nsmall bird\n"


def write(folder: Path, config: str = "", *, batched: bool = False, give: str = "return") -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(MODEL.format(batch="[-1] + " if batched else "", give=give))
    if config:
        (folder / "config.pbtxt").write_text(config)


def output(name: str, *, datatype: str = "TYPE_FP32") -> str:
    return f'output [{{ name: "y" data_type: {datatype} dims: [-1] label_filename: "{name}" }}]'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    write(repository / "plain")
    write(repository / "labelled", output("labels.txt"))
    (repository / "labelled" / "labels.txt").write_bytes(LABELS)
    write(repository / "batched", "max_batch_size: 4 " + output("sub/labels.txt"), batched=True)
    (repository / "batched" / "sub").mkdir()
    (repository / "batched" / "sub" / "labels.txt").write_bytes(LABELS)
    write(repository / "decoupled", output("labels.txt"), give="yield")
    (repository / "decoupled" / "labels.txt").write_bytes(LABELS)
    async with serve_models([repository], max_message_size=2**31 - 1) as opened:
        yield opened


ROW = np.array([1, 4, 3, 2], "f4")
FIRST = [b"4.000000:1:dog", b"3.000000:2", b"2.000000:3:small bird"]


def elements(outcome: Outcome) -> tuple[str, list[int], list[bytes]]:
    assert outcome.outputs is not None, outcome
    datatype, shape, raw = outcome.outputs["y"]
    return datatype, shape, unpack_bytes(raw, math.prod(shape))


@in_module
@EVERY
async def test_a_model_with_labels(interface: str, served: Served) -> None:
    outcome = await ask(served, interface, "labelled", [In("x", ROW)], {"y": OutputOptions(3)})
    assert elements(outcome) == ("BYTES", [3], FIRST)
    outcome = await ask(served, interface, "labelled", [In("x", ROW)], {"y": OutputOptions(2**40), "z": None})
    assert elements(outcome) == ("BYTES", [4], [*FIRST, b"1.000000:0:cat"])
    assert outcome.raw("z") == ROW.astype("f2").tobytes()
    outcome = await ask(served, interface, "plain", [In("x", ROW)], {"y": OutputOptions(1)})
    assert elements(outcome) == ("BYTES", [1], [b"4.000000:1"])


@in_module
@EVERY
async def test_a_model_that_batches(interface: str, served: Served) -> None:
    outcome = await ask(served, interface, "batched", [In("x", np.stack([ROW, -ROW]))], {"y": OutputOptions(1)})
    assert elements(outcome) == ("BYTES", [2, 1], [b"4.000000:1:dog", b"-1.000000:0:cat"])


@in_module
async def test_a_stream_of_answers(served: Served) -> None:
    outcome = await ask(served, "stream", "decoupled", [In("x", ROW)], {"y": OutputOptions(1)})
    assert elements(outcome) == ("BYTES", [1], FIRST[:1])


@in_module
async def test_texts_of_json(served: Served) -> None:
    body = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": ROW.tolist()}],
        "outputs": [{"name": "y", "parameters": {"classification": 2}}],
    }
    status, _, reply = await served.rest.call("POST", "/v2/models/labelled/infer", json.dumps(body).encode())
    texts = [label.decode() for label in FIRST[:2]]
    assert (status, json.loads(reply)["outputs"]) == (
        200,
        [{"name": "y", "datatype": "BYTES", "shape": [2], "data": texts}],
    )


@in_module
@EVERY
async def test_many_values(interface: str, served: Served) -> None:
    """Looked at elsewhere than on the loop."""
    many = np.arange(MAX_ELEMENTS, dtype="f4")
    outcome = await ask(served, interface, "plain", [In("x", many)], {"y": OutputOptions(2)})
    assert elements(outcome)[2] == [b"999999.000000:999999", b"999998.000000:999998"]
    outcome = await ask(served, interface, "plain", [In("x", np.append(many, many[:1]))], {"y": OutputOptions(2)})
    code = Code.UNKNOWN if interface == "stream" else Code.INVALID_ARGUMENT
    assert (outcome.code, outcome.text.endswith("it has 1000001 elements, the limit is 1000000")) == (code, True)


@in_module
@EVERY
async def test_an_output_that_has_no_classes(interface: str, served: Served) -> None:
    outcome = await ask(served, interface, "plain", [In("x", ROW)], {"z": OutputOptions(2)})
    code = Code.UNKNOWN if interface == "stream" else Code.INVALID_ARGUMENT
    assert outcome == Outcome(code, "class result not available for output 'z' due to unsupported type 'FP16'")


@in_module
async def test_the_extension_is_named(served: Served) -> None:
    _, _, reply = await served.rest.call("GET", "/v2")
    assert "classification" in json.loads(reply)["extensions"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none.txt", r"output\[0\].label_filename: expected a file in .*, got 'none.txt'"),
        ("../labels.txt", r"output\[0\].label_filename: expected a path inside .*, got '../labels.txt'"),
        ("1", r"output\[0\].label_filename: expected a file in .*, got '1'"),
        ("link.txt", "a symbolic link leads out of"),
        ("large.txt", f"large.txt: label_filename: expected at most {MAX_LABEL_BYTES} bytes"),
    ],
)
async def test_label_files_that_are_refused(name: str, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "m"
    write(folder, output(name))
    (tmp_path / "labels.txt").write_bytes(LABELS)
    (folder / "link.txt").symlink_to(tmp_path / "labels.txt")
    with (folder / "large.txt").open("wb") as file:
        file.truncate(MAX_LABEL_BYTES + 1)
    with pytest.raises(ModelLoadError) as caught:
        async with testing.serve(folder.parent):
            pass
    assert re.search(text, f"{caught.value} {caught.value.__cause__}")


async def test_labels_change_with_the_version(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write(folder, output("labels.txt"))
    (folder / "labels.txt").write_bytes(b"before\nbefore")
    async with serve_models([tmp_path], model_control_mode="explicit", load_model="m") as served:
        assert await first(served) == b"4.000000:1:before"
        (folder / "labels.txt").write_bytes(b"after\nafter")
        assert await first(served) == b"4.000000:1:before"
        code, _, _ = await served.grpc.call("RepositoryModelLoad", b"\x12\x01m")
        assert code is Code.OK
        assert await first(served) == b"4.000000:1:after"


ENSEMBLE = """
platform: "ensemble"
input [{ name: "x" data_type: TYPE_FP32 dims: [-1] }]
%s
ensemble_scheduling { step {
  model_name: "%s" input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
} }
"""


async def test_labels_of_an_ensemble(tmp_path: Path) -> None:
    """Its own, or those of the step that gives the output, through another ensemble, too, and of a new version."""
    write(tmp_path / "scores", output("labels.txt"))
    (tmp_path / "scores" / "labels.txt").write_bytes(b"before\nbefore")
    for name, step in (("m", "inner"), ("inner", "scores"), ("own", "inner")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "labels.txt").write_bytes(b"own\nown")
        output_text = output("labels.txt" if name == "own" else "")
        (tmp_path / name / "config.pbtxt").write_text(ENSEMBLE % (output_text, step))
    async with serve_models([tmp_path], model_control_mode="explicit", load_model="*") as served:
        assert [await first(served, name) for name in ("m", "own")] == [b"4.000000:1:before", b"4.000000:1:own"]
        (tmp_path / "scores" / "labels.txt").write_bytes(b"after\nafter")
        code, _, _ = await served.grpc.call("RepositoryModelLoad", b"\x12\x06scores")
        assert code is Code.OK
        assert [await first(served, name) for name in ("m", "own")] == [b"4.000000:1:after", b"4.000000:1:own"]


async def first(served: Served, model: str = "m") -> bytes:
    return elements(await ask(served, "grpc", model, [In("x", ROW)], {"y": OutputOptions(1)}))[2][0]
