"""Whatever the code of a grps project raises: each request has its answer, and the project continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grps_folders import batched, entry, write_project
from grps_served import served

from triglot.pb.grps.grps_pb2 import GrpsMessage

CODE = """
import asyncio

class Own(BaseException):
    pass

class Raises(Base):
    def infer(self, inp, context):
        if inp.str_data == "raise":
            raise {error}
        answer = GrpsMessage(str_data="fine")
        context.stream_respond(answer)
        return answer

    def batch_infer(self, inp, context):
        return [self.infer(one, its) for one, its in zip(inp, context)]

inferer_register.register("inferer", Raises())
"""
ERRORS = [
    "GeneratorExit",
    "StopIteration(3)",
    "StopAsyncIteration",
    "asyncio.CancelledError",
    "KeyboardInterrupt",
    "SystemExit(3)",
    "Own",
]
FOLDERS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "in batches": {"models": [entry(batching=batched(2, 1000))]},
    "a DAG with batches": {
        "models": [entry(batching=batched(2, 1000)), entry("n", batching=batched(2, 1000))],
        "nodes": ["m-1.0.0", "n-1.0.0"],
    },
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", FOLDERS)
async def test_a_request_fails_and_the_next_is_answered(tmp_path: Path, kind: str, error: str) -> None:
    async with served(write_project(tmp_path, CODE.format(error=error), **FOLDERS[kind])) as server:
        for _ in range(2):
            failed = await server.predict(GrpsMessage(str_data="raise"))
            assert (failed.status.code, failed.status.status) == (500, failed.status.FAILURE)
            assert error.partition("(")[0].rpartition(".")[2] in failed.status.msg
            assert (await server.predict(GrpsMessage(str_data="well"))).str_data == "fine"
            (last,) = await server.stream(GrpsMessage(str_data="raise"))
            assert last.status.code == 500
            answers = await server.stream(GrpsMessage(str_data="well"))
            assert answers[0].str_data == "fine"
