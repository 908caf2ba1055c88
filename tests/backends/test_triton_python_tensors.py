"""The utilities that need no server: tensors, DLPack, datatypes, errors, responses."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tests.backends.triton_served import X_TO_Y, ints, serving, write_model
from triglot.backends.triton_python.datatypes import NUMBERS
from triglot.backends.triton_python.errors import TritonModelException
from triglot.backends.triton_python.names import utilities
from triglot.backends.triton_python.tensor import Tensor
from triglot.core.tensor import DATATYPES

PB: Any = type("pb_utils", (), {name: staticmethod(value) for name, value in utilities(None).items()})
NUMERIC = [name for name in NUMBERS if name != "BYTES"]


def sample(datatype: str) -> Any:
    return (np.arange(6) % 2).astype(DATATYPES[datatype].dtype).reshape(2, 3)


def test_a_tensor_of_a_request_may_be_written_to() -> None:
    original = np.arange(3)
    original.flags.writeable = False
    tensor = Tensor.of("X", original)
    array: Any = tensor.as_numpy()
    array += 1
    assert tensor.as_numpy() is array
    assert tensor.as_numpy().tolist() == [1, 2, 3]
    assert original.tolist() == [0, 1, 2]


def test_a_tensor_of_the_models_own_is_what_it_was_made_of() -> None:
    array = np.arange(3)
    tensor = Tensor("X", array)
    assert tensor.as_numpy() is array
    assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("X", [3], True)


@pytest.mark.parametrize("datatype", NUMBERS)
def test_datatypes_have_numbers_and_names(datatype: str) -> None:
    number = NUMBERS[datatype]
    kind = PB.triton_to_numpy_type(number)
    assert PB.numpy_to_triton_type(kind) == number
    config_type = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    assert PB.triton_string_to_numpy(config_type) is kind
    assert Tensor("X", np.zeros(1, kind)).triton_dtype() == number


def test_what_has_no_datatype() -> None:
    with pytest.raises(TritonModelException, match="has no datatype"):
        Tensor("X", np.zeros(1, "M8[s]")).triton_dtype()
    assert PB.numpy_to_triton_type(np.bytes_) == NUMBERS["BYTES"]


@pytest.mark.parametrize("datatype", NUMERIC)
def test_dlpack_between_tensors(datatype: str) -> None:
    array = sample(datatype)
    for given_ in (Tensor("X", array), Tensor("X", array).to_dlpack()):
        tensor = Tensor.from_dlpack("Y", given_)
        assert_array_equal(tensor.as_numpy(), array)
        assert tensor.as_numpy().dtype == array.dtype


def test_dlpack_shares_the_memory() -> None:
    array = np.zeros(2, np.float32)
    tensor = Tensor.from_dlpack("X", array)
    array[0] = 5
    assert tensor.array[0] == 5
    shared: Any = Tensor("X", array)
    assert np.from_dlpack(shared)[0] == 5
    own: Any = Tensor.of("X", array)
    assert np.from_dlpack(own)[0] == 5
    assert Tensor("X", array).__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("value", [1, "a", [1], np.zeros(1, "M8[s]"), np.array([b"a"], object)])
def test_what_is_no_dlpack(value: Any) -> None:
    with pytest.raises(TritonModelException, match="Tensor 'X': "):
        Tensor.from_dlpack("X", value)


def test_a_capsule_is_used_once() -> None:
    capsule = Tensor("X", np.zeros(1)).to_dlpack()
    Tensor.from_dlpack("X", capsule)
    with pytest.raises(TritonModelException, match="Tensor 'X': "):
        Tensor.from_dlpack("X", capsule)


def test_texts_have_no_dlpack() -> None:
    with pytest.raises(TritonModelException, match="does not have support for string tensors"):
        Tensor("X", np.array([b"a"], object)).to_dlpack()


async def test_the_datatypes_of_a_model_with_bf16(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        [x] = requests[0].inputs()
        y = pb_utils.Tensor.from_dlpack("Y", x.to_dlpack())
        return [pb_utils.InferenceResponse(output_tensors=[y])]
"""
    write_model(tmp_path, "m", code, X_TO_Y.replace("INT32", "BF16"))
    async with serving(tmp_path) as client:
        x = np.array([1, 2.5], ml_dtypes.bfloat16)
        assert_array_equal((await client.infer("m", {"X": x})).outputs["Y"], x)


@given(st.lists(st.binary(max_size=5), min_size=1))
def test_texts_in_one_piece(elements: list[bytes]) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    packed = PB.serialize_byte_tensor(array)
    assert PB.deserialize_bytes_tensor(packed.item()).tolist() == elements


@given(st.binary(max_size=20))
def test_what_may_be_no_texts(data: bytes) -> None:
    elements: Any = ()
    with suppress(ValueError):
        elements = PB.deserialize_bytes_tensor(data)
    fits = sum(4 + len(element) for element in elements) == len(data)
    if not fits:
        with pytest.raises(ValueError, match=f"got {len(data)} bytes"):
            PB.deserialize_bytes_tensor(data)


def test_what_is_no_texts() -> None:
    assert PB.serialize_byte_tensor(np.zeros(2)) is None
    assert PB.serialize_byte_tensor(np.zeros(0)).tolist() == []
    assert PB.serialize_byte_tensor(np.array([b"a"])).item() == b"\1\0\0\0a"


def test_responses() -> None:
    response = PB.InferenceResponse([Tensor("Y", ints(1))], parameters={"a": 1})
    assert (response.has_error(), response.error()) == (False, None)
    assert PB.get_output_tensor_by_name(response, "Y").as_numpy().tolist() == [1]
    assert PB.get_output_tensor_by_name(response, "Z") is None
    assert json.loads(response.parameters()) == {"a": 1}
    error = PB.TritonError("so", PB.TritonError.NOT_FOUND)
    failed = PB.InferenceResponse(error=error)
    assert (failed.has_error(), failed.output_tensors(), failed.error()) == (True, [], error)
    assert (error.code(), error.message(), str(error)) == (PB.TritonError.NOT_FOUND, "so", "so")
    assert PB.TritonError("so").code() == PB.TritonError.INTERNAL
    assert json.loads(PB.InferenceResponse().parameters()) == {}


@pytest.mark.parametrize("wrong", [("so", 12), (1,)])
def test_what_is_no_error(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="TritonError: "):
        PB.TritonError(*wrong)


def test_a_request_of_the_models_own() -> None:
    request = PB.InferenceRequest(
        "id", 7, [Tensor("X", ints(1))], ["Y"], "other", 2, flags=1, timeout=5, parameters={"a": True}
    )
    request.set_flags(PB.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START | PB.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert (request.request_id(), request.correlation_id(), request.flags()) == ("id", 7, 3)
    assert (request.model_name(), request.model_version(), request.timeout()) == ("other", 2, 5)
    assert (request.requested_output_names(), json.loads(request.parameters())) == (["Y"], {"a": True})
    assert PB.get_input_tensor_by_name(request, "X").as_numpy().tolist() == [1]
    assert PB.get_input_tensor_by_name(request, "Z") is None
    assert not request.is_cancelled()
    memory = PB.PreferredMemory(PB.TRITONSERVER_MEMORY_GPU, 0)
    assert PB.InferenceRequest(inputs=[], preferred_memory=memory).priority() == 0


def test_tensors_of_a_configuration_and_kinds_of_memory() -> None:
    config = {"input": [{"name": "X", "dims": [1]}], "output": [{"name": "X", "dims": [2]}, {"name": "Y"}]}
    assert PB.get_input_config_by_name(config, "X") == {"name": "X", "dims": [1]}
    assert PB.get_output_config_by_name(config, "X") == {"name": "X", "dims": [2]}
    assert PB.get_input_config_by_name(config, "Y") is None
    assert PB.get_output_config_by_name({}, "Y") is None
    kinds = (PB.TRITONSERVER_MEMORY_CPU, PB.TRITONSERVER_MEMORY_CPU_PINNED, PB.TRITONSERVER_MEMORY_GPU)
    assert [int(kind) for kind in kinds] == [0, 1, 2]
    assert PB.PreferredMemory(kinds[2], 3).preferred_device_id == 3


def test_names_may_be_elements_of_a_tensor() -> None:
    name = Tensor("NAME", np.array([b"Y"], object)).as_numpy()[0]
    request = PB.InferenceRequest(
        name, inputs=[Tensor(name, ints(1))], requested_output_names=[name], model_name=name
    )
    assert (request.request_id(), request.model_name(), request.requested_output_names()) == ("Y", "Y", ["Y"])
    assert PB.get_input_tensor_by_name(request, "Y").name() == "Y"
    assert PB.TritonError(b"so").message() == "so"
    for wrong in ({"model_name": 1}, {"request_id": None}, {"requested_output_names": [1]}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}: expected a str or bytes, got (int|NoneType)"):
            PB.InferenceRequest(inputs=[], **wrong)


def test_what_belongs_to_no_model() -> None:
    for call in (PB.get_model_dir, lambda: PB.is_model_ready("m"), PB.InferenceRequest(model_name="m").exec):
        with pytest.raises(
            TritonModelException, match="can only be called from the code of a loaded Triton Python model"
        ):
            call()


def test_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    logger = PB.Logger
    for write in (logger.log_info, logger.log_warn, logger.log_error, logger.log_verbose, logger.log):
        write("100 %s")
    logger.log("last", logger.WARNING)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "100 %s"),
        ("WARNING", "100 %s"),
        ("ERROR", "100 %s"),
        ("DEBUG", "100 %s"),
        ("INFO", "100 %s"),
        ("WARNING", "last"),
    ]
    assert all(record.filename == Path(__file__).name for record in caplog.records)
