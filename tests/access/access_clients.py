"""A server of small models with an access file, and its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio

import triglot
from tests.access.access_files import write
from tests.process import PLAIN_MODELS
from triglot import testing
from triglot.pb.kserve import inference_pb2 as pb


def infer_request() -> pb.ModelInferRequest:
    """A request that an identity answers."""
    request = pb.ModelInferRequest(model_name="identity_fp32", raw_input_contents=[b"\0" * 8])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    return request


class GuardedServer:
    """A server of small models with an access file."""

    def __init__(self, server: triglot.Server, file: Path, session: aiohttp.ClientSession) -> None:
        self.server, self.file, self.session = server, file, session
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        self.infer = self._stub("unary_unary", "ModelInfer", pb.ModelInferResponse)
        self.stream_infer = self._stub("stream_stream", "ModelStreamInfer", pb.ModelStreamInferResponse)
        self.server_metadata = self._stub("unary_unary", "ServerMetadata", pb.ServerMetadataResponse)
        self.url = f"http://127.0.0.1:{server.rest_port}"

    def _stub(self, kind: str, name: str, answer: Any) -> Any:
        path = f"/inference.GRPCInferenceService/{name}"
        return getattr(self.channel, kind)(
            path,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=answer.FromString,
        )

    async def code(self, headers: dict[str, str]) -> grpc.StatusCode:
        """What ModelInfer ends with over gRPC."""
        error = await self.error(headers)
        return grpc.StatusCode.OK if error is None else error.code()

    async def error(self, headers: dict[str, str]) -> grpc.aio.AioRpcError | None:
        """As `code`, with all that is said of it; None where it went well."""
        try:
            await self.infer(infer_request(), metadata=list(headers.items()))
        except grpc.aio.AioRpcError as error:
            return error
        return None

    async def status(self, headers: dict[str, str]) -> tuple[int, str, str]:
        """The status of the same call over REST, its text, and what it says of credentials."""
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
        url = f"{self.url}/v2/models/identity_fp32/infer"
        async with self.session.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.text(), answer.headers.get("www-authenticate", "")


@asynccontextmanager
async def guarded_server(
    folder: Path, *tables: str, models: Path | None = None, **options: Any
) -> AsyncIterator[GuardedServer]:
    """A server that reads these tables; `models`: a folder of further ones."""
    file = write(folder / "access.toml", *tables)
    paths = [PLAIN_MODELS, *([models] if models else [])]
    async with testing.serve(*paths, access=str(file), **options) as server, aiohttp.ClientSession() as session:
        here = GuardedServer(server.server, file, session)
        yield here
        await here.channel.close()
