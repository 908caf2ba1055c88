"""ONNX files that declare other output shapes than they return: the result's shape counts, in every protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="the onnx package makes the models of these tests")
pytest.importorskip("onnxruntime")

from tests.backends.onnx_graphs import FLOAT, INT64, classifier, node, rest_of, save_graph, sent, value
from tests.protocol_clients import grps

BATCHED = "max_batch_size: 8 dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 50000 }"
X = [1.0, 2.0, 4.0, 3.0, 5.0, 6.0]
LABELS = [1, 0, 1]
"""Of the three rows of X, by `save_classifier`."""


def save_reshape(file: Path, declared: Any) -> Path:
    """`y` is `x` in the shape that the request says, so that no checker sees that the declared one is false."""
    inputs = [value("x", FLOAT, ["n"]), value("to", INT64, ["k"])]
    return save_graph(file, [node("Reshape", ["x", "to"], ["y"])], inputs, [value("y", FLOAT, declared)])


def save_classifier(file: Path, label: Any, scores: Any) -> Path:
    outputs = [value("label", INT64, label), value("scores", FLOAT, scores)]
    return save_graph(file, [classifier("scores", [0, 1])], [value("x", FLOAT, [None, 2])], outputs)


def configure(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text)


@pytest.mark.parametrize(
    ("declared", "returned"),
    [(["n"], [4, 1]), ([1], [4]), ([2], [4]), ([2, 2], [4]), (["n", 3], [2, 2]), ([], [4]), ([1, 1], [])],
    ids=str,
)
async def test_result_has_its_own_shape_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, declared: Any, returned: list[int]
) -> None:
    save_reshape(tmp_path / "model" / "model.onnx", declared)
    count = 4 if returned else 1
    inputs = sent("FP32", [count], X[:count]), sent("INT64", [len(returned)], returned, "to")
    async with rest_of(tmp_path) as rest:
        for _ in range(2):
            assert await rest.infer("model", *inputs) == (200, {"y": (returned, X[:count])})
    warnings = [record.message for record in caplog.records if "its signature says" in record.message]
    assert len(warnings) == 1
    assert warnings[0].endswith("; the result's shape counts")


@pytest.mark.parametrize(
    ("label", "scores"), [([1], [None, 2]), ([1], [1, 2]), ([None], [None, 3]), ([2], [2, 2])]
)
async def test_batch_is_split_by_rows(tmp_path: Path, label: Any, scores: Any) -> None:
    save_classifier(tmp_path / "model" / "1" / "model.onnx", label, scores)
    configure(tmp_path / "model", BATCHED)
    async with rest_of(tmp_path) as rest:
        rows = [1, 2, 3, 1, 1]
        answers = await asyncio.gather(
            *(rest.infer("model", sent("FP32", [count, 2], X[: 2 * count])) for count in rows)
        )
        _, statistics = await rest.get("/v2/models/model/stats")
    for count, answer in zip(rows, answers, strict=True):
        outputs = {"label": ([count], LABELS[:count]), "scores": ([count, 2], X[: 2 * count])}
        assert answer == (200, outputs)
    assert statistics["model_stats"][0]["execution_count"] < len(rows)


async def test_ensemble_passes_the_result_on(tmp_path: Path) -> None:
    save_reshape(tmp_path / "step" / "1" / "model.onnx", ["n"])
    configure(
        tmp_path / "model",
        """
        platform: "ensemble"
        input [ { name: "x" data_type: TYPE_FP32 dims: -1 }, { name: "to" data_type: TYPE_INT64 dims: -1 } ]
        output { name: "y" data_type: TYPE_FP32 dims: -1 }
        ensemble_scheduling { step { model_name: "step" model_version: -1
          input_map [ { key: "x" value: "x" }, { key: "to" value: "to" } ] output_map { key: "y" value: "y" } } }
        """,
    )
    inputs = sent("FP32", [4], X[:4]), sent("INT64", [2], [4, 1], "to")
    async with rest_of(tmp_path) as rest:
        assert await rest.infer("model", *inputs) == (200, {"y": ([4, 1], X[:4])})


async def test_other_protocols(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model" / "model.onnx", [1], [1, 2])
    rows = [X[:2], X[2:4], X[4:]]
    async with rest_of(tmp_path) as rest:
        status, answer = await rest.post("/v1/models/model:predict", {"instances": rows})
        predictions = [{"label": label, "scores": row} for label, row in zip(LABELS, rows, strict=True)]
        assert (status, answer) == (200, {"predictions": predictions})
        body = {
            "model": "model-1",
            "gtensors": {"tensors": [{"dtype": "DT_FLOAT32", "shape": [3, 2], "flat_float32": X}]},
        }
        status, answer = await asyncio.to_thread(grps.post, f"127.0.0.1:{rest.port}", body)
        assert (status, [tensor["shape"] for tensor in answer["gtensors"]["tensors"]]) == (200, [[3], [3, 2]])
