"""A server in this process whose models the test holds in its hand, behind its real ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc.aio

import triglot
from triglot import testing
from triglot.pb.kserve import inference_pb2 as pb

METHOD = "/inference.GRPCInferenceService/"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def streaming(channel: grpc.aio.Channel) -> Any:
    """ModelStreamInfer."""
    return channel.stream_stream(
        METHOD + "ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString
    )


class Live:
    """The server and a client for each protocol."""

    def __init__(
        self,
        server: triglot.Server,
        channel: grpc.aio.Channel,
        session: aiohttp.ClientSession,
        models: Mapping[str, triglot.Model | type[triglot.Model]],
    ) -> None:
        self.server = server
        self.models = models
        self.channel = channel
        self.infer = channel.unary_unary(METHOD + "ModelInfer")
        self.stream_infer = streaming(channel)
        self.session = session
        self.grpc_address = f"127.0.0.1:{server.grpc_port}"
        self.root = f"http://127.0.0.1:{server.rest_port}"
        self.url = f"{self.root}/v2"

    def client(self, name: str) -> testing.Client:
        """A client of `testing.CLIENTS`, which blocks."""
        address: Any = self.grpc_address if name.endswith("grpc") else self.root
        return testing.CLIENTS[name](address)

    @asynccontextmanager
    async def narrow(self) -> AsyncIterator[Any]:
        """`stream_infer` by a connection that has little in flight, however slow the machine is."""
        # gRPC widens its windows by what it measures.
        options = [*UNLIMITED, ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.grpc_address, options=options) as channel:
            yield streaming(channel)

    def leases(self) -> int:
        """Calls that hold a model at the moment."""
        return sum(
            version.servable.leases for version in self.server.manager.registry.versions() if version.servable
        )


@asynccontextmanager
async def live(models: Mapping[str, triglot.Model | type[triglot.Model]], **options: Any) -> AsyncIterator[Live]:
    """Serve `models` by name, with a client for each protocol."""
    async with (
        testing.serve(models, **options) as running,
        grpc.aio.insecure_channel(running.grpc_address, options=UNLIMITED) as channel,
        aiohttp.ClientSession() as session,
    ):
        yield Live(running.server, channel, session, models)


def request(
    model: str, raw: bytes, *, request_id: str = "", datatype: str = "FP32", shape: tuple[int, ...] | None = None
) -> bytes:
    """A serialized ModelInferRequest with the input `x`."""
    message = pb.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[raw])
    message.inputs.add(name="x", datatype=datatype, shape=shape or (len(raw) // 4,))
    return message.SerializeToString()
