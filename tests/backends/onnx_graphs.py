"""ONNX files of several nodes, and a server of them with a REST client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from tests.protocol_clients.rest import Rest
from triglot import testing

FLOAT = onnx.TensorProto.FLOAT
INT64 = onnx.TensorProto.INT64
ML = "ai.onnx.ml"
value = helper.make_tensor_value_info
node = helper.make_node


def save_graph(
    file: Path, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], *, opset: int = 17
) -> Path:
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(ML, 2)]
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8 if opset < 19 else 10), file)
    return file


def classifier(scores: str, labels: Sequence[Any]) -> Any:
    """A node `x` [rows, 2] → `label` [rows], and the columns of `x`, once for each label, as `scores`."""
    kind = "classlabels_strings" if isinstance(labels[0], str) else "classlabels_ints"
    weights = [float(at % 2 == column) for at in range(len(labels)) for column in range(2)]
    options: dict[str, Any] = {"coefficients": weights, "intercepts": [0.0] * len(labels), kind: labels}
    return node("LinearClassifier", ["x"], ["label", scores], domain=ML, **options)


def sent(datatype: str, shape: Sequence[int], data: Sequence[Any], name: str = "x") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": list(data)}


class AsyncRest:
    """`Rest` beside the server's own event loop."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._rest = Rest(port)

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        return await asyncio.to_thread(self._rest.post, path, body)

    async def get(self, path: str) -> tuple[int, Any]:
        return await asyncio.to_thread(self._rest.get, path)

    async def infer(self, model: str, *inputs: dict[str, Any], **request: Any) -> tuple[int, Any]:
        """The status, and the outputs by name, or the error's text."""
        status, answer = await self.post(f"/v2/models/{model}/infer", {"inputs": inputs, **request})
        if status != 200:
            return status, answer["error"]
        return status, {output["name"]: (output["shape"], output.get("data")) for output in answer["outputs"]}

    async def shapes(self, model: str) -> dict[str, list[int]]:
        _, metadata = await self.get(f"/v2/models/{model}")
        return {tensor["name"]: tensor["shape"] for tensor in metadata["inputs"] + metadata["outputs"]}


@asynccontextmanager
async def rest_of(folder: Path, **options: Any) -> AsyncIterator[AsyncRest]:
    async with testing.serve(folder, **options) as server:
        yield AsyncRest(server.rest_port)
