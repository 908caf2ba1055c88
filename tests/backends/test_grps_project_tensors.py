"""Projects that are called with arrays: what they are given, and what becomes of their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.grps_folders import entry, opened, own_module, write_project
from triglot.backends.grps.model import arrays_of, message_of
from triglot.core.call import Call
from triglot.core.errors import Internal, InvalidArgument
from triglot.core.tensor import DATATYPES, object_array
from triglot.pb.grps import grps_pb2 as pb
from triglot.pb.grps.grps_pb2 import GenericTensor, GrpsMessage

KEPT = ("UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")
WIDENED = {"BOOL": "u1", "UINT16": "i4", "UINT32": "i8", "BF16": "f4"}
REFUSED = ("UINT64", "COMPLEX64", "COMPLEX128")


def gtensors(*tensors: GenericTensor) -> GrpsMessage:
    return GrpsMessage(gtensors=pb.GenericTensorData(tensors=tensors))


def floats(name: str, *values: float) -> GenericTensor:
    return GenericTensor(name=name, dtype=pb.DT_FLOAT32, shape=[len(values)], flat_float32=values)


@pytest.mark.parametrize("datatype", [*KEPT, *WIDENED])
def test_numbers_round_trip(datatype: str) -> None:
    dtype = DATATYPES[datatype].dtype
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    array.flags.writeable = False
    message = message_of({"x": array, "scalar": array[0, 1]})
    assert [tensor.name for tensor in message.gtensors.tensors] == ["x", "scalar"]
    arrays = arrays_of(message)
    assert arrays["x"].dtype == WIDENED.get(datatype, dtype)
    assert arrays["x"].tolist() == [[0, 1, 1], [1, 0, 1]]
    assert arrays["scalar"].shape == ()


def test_texts_round_trip() -> None:
    array = object_array(["é".encode(), b""], [2, 1])
    message = message_of({"x": array}, "m-1.0.0")
    assert message.model == "m-1.0.0"
    assert list(message.gtensors.tensors[0].flat_string) == ["é", ""]
    assert arrays_of(message)["x"].tolist() == array.tolist()


def test_no_inputs() -> None:
    assert message_of({}).WhichOneof("data_oneof") == "gtensors"
    assert arrays_of(message_of({})) == {}


@pytest.mark.parametrize("datatype", REFUSED)
def test_datatypes_that_grps_lacks(datatype: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^input 'x': grps has no dtype for"):
        message_of({"x": np.zeros(1, DATATYPES[datatype].dtype)})


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(InvalidArgument, match=r"^input 'x': DT_STRING takes UTF-8 only"):
        message_of({"x": object_array([b"\xff"], [1])})


def test_names_of_unnamed_tensors() -> None:
    assert list(arrays_of(gtensors(floats("", 1)))) == ["output"]
    assert list(arrays_of(gtensors(floats("", 1), floats("b", 2), floats("", 3)))) == ["output_0", "b", "output_2"]


def test_other_members() -> None:
    assert arrays_of(GrpsMessage(str_data="é"))["str_data"].tolist() == ["é".encode()]
    assert arrays_of(GrpsMessage(bin_data=b"\xff"))["bin_data"].tolist() == [b"\xff"]
    assert arrays_of(GrpsMessage()) == {}
    assert arrays_of(GrpsMessage(ndarray=pb.NDArrayData())) == {}
    entries = pb.GenericMapData(
        s_s={"text": "a"},
        s_b={"bytes": b"\xff"},
        s_i32={"i": 1},
        s_i64={"j": 1 << 60},
        s_f={"f": 0.5},
        s_d={"d": 0.1},
    )
    arrays = arrays_of(GrpsMessage(gmap=entries))
    assert {name: (array.dtype.name, array.tolist()) for name, array in arrays.items()} == {
        "text": ("object", [b"a"]),
        "bytes": ("object", [b"\xff"]),
        "i": ("int32", [1]),
        "j": ("int64", [1 << 60]),
        "f": ("float32", [0.5]),
        "d": ("float64", [0.1]),
    }


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (gtensors(floats("a", 1), floats("a", 2)), "two tensors named 'a'"),
        (gtensors(floats("", 1), floats("output_0", 2)), "two tensors named 'output_0'"),
        (GrpsMessage(gmap=pb.GenericMapData(s_f={"k": 1}, s_d={"k": 2})), "two tensors named 'k'"),
        (gtensors(GenericTensor(name="a", dtype=pb.DT_FLOAT32, shape=[2, 2], flat_float32=[1])),
         "tensor 'a': expected 4 elements for the shape [2, 2], got 1 in flat_float32"),
        (gtensors(GenericTensor(name="a", dtype=pb.DT_INT8, shape=[1], flat_float32=[1])),
         "tensor 'a': expected 1 elements for the shape [1], got 0 in flat_int8"),
        (gtensors(GenericTensor(name="a", dtype=pb.DT_UINT8, shape=[2], flat_uint8=[1, 256])),
         "tensor 'a': DT_UINT8 cannot hold 256, which is in flat_uint8"),
        (gtensors(GenericTensor(name="a", shape=[1])), "tensor 'a': expected dtype DT_UINT8, "),
    ],
)  # fmt: skip
def test_answers_that_are_no_tensors(message: GrpsMessage, text: str) -> None:
    with pytest.raises(Internal) as caught:
        arrays_of(message)
    assert caught.value.message.startswith("the model's response")
    assert text in caught.value.message


HALF_PLUS_TWO = """
class HalfPlusTwo(Base):
    def infer(self, inp, context):
        seen.append((inp.model, context.if_streaming(), context.get_http_request()))
        (x,) = inp.gtensors.tensors
        y = GenericTensor(name="y", dtype=x.dtype, shape=x.shape, flat_float32=[v / 2 + 2 for v in x.flat_float32])
        out = GrpsMessage()
        out.gtensors.tensors.append(y)
        return out


seen = []
inferer_register.register("inferer", HalfPlusTwo())
"""


@pytest.mark.parametrize("name", ["", "half"])
def test_a_project_answers_arrays(tmp_path: Path, name: str) -> None:
    settings = write_project(tmp_path, HALF_PLUS_TWO, models=[entry("half")])
    inputs: dict[str, Any] = {"x": np.array([[1, 2], [3, 4]], np.float32)}
    with opened(settings, name) as model:
        assert model.infer(inputs, Call())["y"].tolist() == [[2.5, 3.0], [3.5, 4.0]]
        assert own_module().seen == [("half-1.0.0" if name else "", False, None)]
        with pytest.raises(Internal, match=r"^ValueError: "):
            model.infer({**inputs, "z": inputs["x"]}, Call())
        with pytest.raises(InvalidArgument):
            model.infer({"x": np.zeros(1, np.complex64)}, Call())
