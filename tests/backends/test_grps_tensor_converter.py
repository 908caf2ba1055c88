"""The rules of the built-in converters of grps projects, with the one whose tensors are numpy's own arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.grps_tensor_messages import filled, floats, message, named, same, values
from triglot.backends.grps.context import GrpsContext
from triglot.backends.grps.tensor_converter import TrtTensorConverter
from triglot.backends.grps.tensor_inferer import device_name
from triglot.core.errors import Internal, InvalidArgument, ModelLoadError
from triglot.pb.grps import grps_pb2 as pb

CONVERTER = TrtTensorConverter()


def preprocess(*tensors: pb.GenericTensor) -> Any:
    return CONVERTER.preprocess(message(*tensors), GrpsContext())


def test_named_tensors_are_a_dict_in_their_order() -> None:
    arrays = preprocess(floats("b", [2], 1, 2), floats("a", [1, 1], 3))
    assert list(arrays) == ["b", "a"]
    assert values(arrays) == {"b": [1, 2], "a": [[3]]}
    assert all(isinstance(array, np.ndarray) for array in arrays.values())


def test_unnamed_tensors_are_a_list() -> None:
    assert values(preprocess(floats("", [], 7))) == [7.0]
    assert values(preprocess(floats("", [2], 1, 2), floats("", [1], 3))) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (pb.GrpsMessage(), "expected gtensors, got no data"),
        (pb.GrpsMessage(str_data="x"), "expected gtensors, got str_data"),
        (pb.GrpsMessage(ndarray=pb.NDArrayData()), "expected gtensors, got ndarray"),
        (message(), "gtensors: expected at least one tensor, got none"),
        (
            message(floats("a", [1], 1), floats("", [1], 1)),
            "gtensors: expected names for all of the tensors or for none, got both",
        ),
        (message(floats("a", [1], 1), floats("a", [1], 2)), "gtensors: two tensors have the name 'a'"),
        (
            message(floats("", [2, 3], 1)),
            "tensor 0: expected 6 elements for the shape [2, 3], got 1 in flat_float32",
        ),
        (
            message(floats("a", [], 1, 2)),
            "tensor 'a': expected 1 elements for the shape [], got 2 in flat_float32",
        ),
        (message(floats("a", [0, 3])), "tensor 'a': expected elements, got none (shape [0, 3])"),
        (
            message(pb.GenericTensor(name="a", dtype=pb.DT_FLOAT32, shape=[1], flat_int32=[1])),
            "tensor 'a': expected 1 elements for the shape [1], got 0 in flat_float32",
        ),
        (
            message(pb.GenericTensor(dtype=pb.DT_STRING, shape=[1], flat_string=["x"])),
            "tensor 0: expected dtype DT_UINT8, DT_INT8, DT_INT32, DT_FLOAT32, got DT_STRING",
        ),
        (
            message(pb.GenericTensor(dtype=pb.DT_INT8, shape=[1], flat_int8=[300])),
            "tensor 0: DT_INT8 cannot hold 300, which is in flat_int8",
        ),
    ],
)
def test_messages_that_are_refused(sent: pb.GrpsMessage, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        CONVERTER.preprocess(sent, GrpsContext())
    assert caught.value.message == text


X = np.ones((1, 2), np.float32)


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (X, ["output"]),
        ([X], ["output_0"]),
        ((X, X + 1), ["output_0", "output_1"]),
        ({"y": X, "x": X}, ["y", "x"]),
        ([], []),
    ],
)
def test_names_of_results(result: Any, names: list[str]) -> None:
    reply = CONVERTER.postprocess(result, GrpsContext())
    assert reply.WhichOneof("data_oneof") == "gtensors"
    assert [tensor.name for tensor in reply.gtensors.tensors] == names


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "expected a tensor, or a list, tuple or dict of tensors, got NoneType"),
        (1.5, "expected a tensor, or a list, tuple or dict of tensors, got float"),
        ([X, [X]], "output 'output_1': expected a tensor, got list"),
        ({"a": {"b": X}}, "output 'a': expected a tensor, got dict"),
        ({1: X}, "output 1: expected a string as its name, got int"),
        ({"a": X.astype("c8")}, "output 'a': grps has no dtype for complex64"),
    ],
)
def test_results_that_have_no_form(result: Any, text: str) -> None:
    with pytest.raises(Internal) as caught:
        CONVERTER.postprocess(result, GrpsContext())
    assert caught.value.message == text


# --- batches ---


def joined(*messages: pb.GrpsMessage) -> tuple[Any, list[GrpsContext]]:
    contexts = [GrpsContext() for _ in messages]
    return CONVERTER.batch_preprocess(list(messages), contexts), contexts


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
def test_batch_is_split_as_it_was_joined(sizes: list[int], with_names: bool) -> None:
    rows = np.arange(sum(sizes) * 2, dtype=np.float32).reshape(-1, 2)
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    names = ("a", "b") if with_names else ("", "")
    batch, contexts = joined(
        *(message(filled(part, names[0]), filled(part.astype("i4"), names[1])) for part in parts)
    )
    first, second = batch.values() if with_names else batch
    same(first, rows)
    same(second, rows.astype("i4"))
    replies = CONVERTER.batch_postprocess({"sum": first.sum(axis=1), "twice": second * 2}, contexts)
    for reply, part in zip(replies, parts, strict=True):
        same(named(reply)["sum"], part.sum(axis=1))
        same(named(reply)["twice"], part.astype("i4") * 2)


def test_named_tensors_of_a_batch_may_come_in_any_order() -> None:
    a, b = floats("a", [1, 1], 1), floats("b", [1, 1], 2)
    batch, _ = joined(message(a, b), message(b, a))
    assert values(batch) == {"a": [[1], [1]], "b": [[2], [2]]}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (
            [message(floats("", [1, 1], 1)), pb.GrpsMessage(str_data="x")],
            "request 2 of a batch of 2: expected gtensors, got str_data",
        ),
        (
            [message(floats("a", [2], 1, 2))],
            "request 1 of a batch of 1: tensor 'a': expected a batch dim and others, got the shape [2]",
        ),
        (
            [message(floats("", [1, 1], 1), floats("", [2, 1], 1, 2))],
            "request 1 of a batch of 1: expected the same first dim for all tensors, "
            "got {'tensor 0': 1, 'tensor 1': 2}",
        ),
        (
            [message(floats("a", [1, 1], 1)), message(floats("b", [1, 1], 1))],
            "request 2 of a batch of 2 has different tensors than the first request: "
            "tensor 'b' float32 [?,1], not tensor 'a' float32 [?,1]",
        ),
        (
            [message(floats("a", [1, 1], 1)), message(floats("", [1, 1], 1))],
            "request 2 of a batch of 2 has different tensors than the first request: "
            "tensor 0 float32 [?,1], not tensor 'a' float32 [?,1]",
        ),
        (
            [message(floats("", [1, 2], 1, 2)), message(floats("", [1, 1], 1))],
            "request 2 of a batch of 2 has different tensors than the first request: "
            "tensor 0 float32 [?,1], not tensor 0 float32 [?,2]",
        ),
        (
            [message(floats("", [1, 1], 1)), message(filled(np.ones((1, 1), "i4"), ""))],
            "request 2 of a batch of 2 has different tensors than the first request: "
            "tensor 0 int32 [?,1], not tensor 0 float32 [?,1]",
        ),
        (
            [message(floats("", [1, 1], 1)), message(floats("", [1, 1], 1), floats("", [1, 1], 1))],
            "request 2 of a batch of 2 has different tensors than the first request: "
            "tensor 0 float32 [?,1], tensor 1 float32 [?,1], not tensor 0 float32 [?,1]",
        ),
    ],
)
def test_requests_that_are_no_batch(messages: list[pb.GrpsMessage], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        joined(*messages)
    assert caught.value.message == text


def test_a_context_for_each_message() -> None:
    with pytest.raises(Internal, match=r"^expected a context for each of 1 messages, got 0$"):
        CONVERTER.batch_preprocess([message()], [])


@pytest.mark.parametrize("shape", [[], [1], [3, 1]])
def test_results_that_do_not_have_the_rows_of_the_batch(shape: list[int]) -> None:
    _, contexts = joined(*[message(floats("", [1, 1], 1))] * 2)
    with pytest.raises(Internal) as caught:
        CONVERTER.batch_postprocess(np.zeros(shape, np.float32), contexts)
    text = (
        f"output 'output' has the shape {shape}; its first dim must be 2, the rows of all 2 requests of the batch"
    )
    assert caught.value.message == text


def test_batch_size_that_was_not_put() -> None:
    with pytest.raises(Internal, match="no user data 'batch_size'"):
        CONVERTER.batch_postprocess(X, [GrpsContext()])


# --- inferers: what needs no library ---


@pytest.mark.parametrize(
    ("device", "name"),
    [("cpu", "cpu"), ("cuda", "cuda:0"), ("gpu", "cuda:0"), ("cuda:1", "cuda:1"), ("gpu:12", "cuda:12")],
)
def test_devices(device: str, name: str) -> None:
    assert device_name(device, "cuda") == name


@pytest.mark.parametrize("device", ["", "auto", "cuda:", "gpu:x", "cpu:0", "cuda:1 "])
def test_missing_devices(device: str) -> None:
    text = "device: expected cpu, cuda, gpu, cuda:N, gpu:N or original, got "
    with pytest.raises(ModelLoadError) as caught:
        device_name(device, "cuda")
    assert str(caught.value) == f"{text}{device!r}"
