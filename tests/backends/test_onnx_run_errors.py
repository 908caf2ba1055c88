"""Errors of onnxruntime's runs: the client gets their text, as INVALID_ARGUMENT where its inputs are the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="the onnx package makes the models of these tests")
pytest.importorskip("onnxruntime")

import onnx
from onnxruntime.capi import onnxruntime_pybind11_state as errors

from tests.backends.onnx_graphs import FLOAT, INT64, node, rest_of, save_graph, sent, value
from triglot.backends.onnx import failure_of
from triglot.core.errors import Code

STRING = onnx.TensorProto.STRING
F = "FP32"
MATRICES = [value("a", FLOAT, ["n", "k"]), value("b", FLOAT, ["m", "l"])]
NARROW, WIDE = sent(F, [1, 3], [1.0] * 3, "a"), sent(F, [2, 2], [1.0] * 4, "b")
LIST = value("x", FLOAT, ["n"])
NUMBERS = value("i", INT64, ["k"])
ANY = value("y", FLOAT, None)
Case = tuple[Any, list[Any], list[Any], str]
CASES: dict[str, Case] = {
    "broadcast": (
        node("Add", ["a", "b"], ["y"]),
        MATRICES,
        [NARROW, sent(F, [1, 2], [1.0] * 2, "b")],
        "Attempting to broadcast an axis by a dimension other than 1. 2 by 3",
    ),
    "MatMul": (node("MatMul", ["a", "b"], ["y"]), MATRICES, [NARROW, WIDE], "dimension mismatch"),
    "Gemm": (node("Gemm", ["a", "b"], ["y"]), MATRICES, [NARROW, WIDE], "Dimension mismatch"),
    "Concat": (
        node("Concat", ["a", "b"], ["y"], axis=0),
        MATRICES,
        [NARROW, WIDE],
        "Non concat axis dimensions must match",
    ),
    "Reshape": (
        node("Reshape", ["x", "i"], ["y"]),
        [LIST, NUMBERS],
        [sent(F, [3], [1.0] * 3), sent("INT64", [2], [2, 2], "i")],
        "The input tensor cannot be reshaped to the requested shape. Input shape:{3}, requested shape:{2,2}",
    ),
    "Gather": (
        node("Gather", ["x", "i"], ["y"]),
        [LIST, NUMBERS],
        [sent(F, [3], [1.0] * 3), sent("INT64", [1], [7], "i")],
        "indices element out of data bounds, idx=7 must be within the inclusive range [-3,2]",
    ),
    "TopK": (
        node("TopK", ["x", "i"], ["y", "z"]),
        [LIST, value("i", INT64, [1])],
        [sent(F, [3], [1.0] * 3), sent("INT64", [1], [5], "i")],
        "k argument [5] should not be greater than specified axis dim value [3]",
    ),
    "text that is no number": (
        node("Cast", ["x"], ["y"], to=FLOAT),
        [value("x", STRING, ["n"])],
        [sent("BYTES", [1], ["five"])],
        "while running Cast node",
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_client_gets_the_text_and_the_next_call_runs(tmp_path: Path, name: str) -> None:
    operator, inputs, request, expected = CASES[name]
    save_graph(tmp_path / "model" / "model.onnx", [operator], inputs, [ANY])
    async with rest_of(tmp_path) as rest:
        for _ in range(2):
            status, text = await rest.infer("model", *request)
            assert status == 400
            assert text.startswith("onnx runtime error ")
            assert expected in text
            assert "::" not in text
            assert not any(part in text for part in (".h:", ".cc:", "onnxruntime/", str(tmp_path)))


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            errors.Fail(
                "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Expand node. Name:'' "
                "Status Message: /onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:360 void* onnxruntime::"
                "BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*) Failed to allocate memory for "
                "requested buffer of size 4398046511104\n"
            ),
            Code.INTERNAL,
            "onnx runtime error 1: Non-zero status code returned while running Expand node. Name:'' Status "
            "Message: Failed to allocate memory for requested buffer of size 4398046511104",
        ),
        (
            errors.RuntimeException(
                "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : CUDA failure 2: out of memory ; GPU=0 ; "
                "hostname=node-7 ; file=/onnxruntime_src/onnxruntime/core/providers/cuda/x.cc ; line=129 ; "
                "expr=cudaMalloc((void**)&p, size); "
            ),
            Code.INTERNAL,
            "onnx runtime error 6: CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);",
        ),
        (
            errors.NotImplemented("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : no kernel"),
            Code.INTERNAL,
            "onnx runtime error 9: no kernel",
        ),
        (
            errors.RuntimeException(
                "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : matmul_helper.h:59 Compute MatMul dimension mismatch"
            ),
            Code.INVALID_ARGUMENT,
            "onnx runtime error 6: Compute MatMul dimension mismatch",
        ),
    ],
    ids=["memory", "GPU", "not implemented", "an earlier release's class"],
)
def test_code_and_text_of_each_error(error: Exception, code: Code, text: str) -> None:
    failure = failure_of(error)
    assert (failure.code, failure.message) == (code, text)
