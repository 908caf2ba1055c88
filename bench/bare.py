"""Baseline servers, which only receive a request and send a canned reply.

They show what the transport library alone costs, on the same machine in the same minute. Each is a process:
`python -m bench.bare grpc|rest|rest-json --port N --reply FILE`. They are stock; `--loop` and `--channel` show
what tuning gains.
"""

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio
import numpy as np
import uvloop
from aiohttp import web

LIMIT = 2**31 - 1
ChannelArgument: TypeAlias = tuple[str, int | str]


async def serve_grpc(
    port: int, reply: bytes, messages: int, arguments: Sequence[ChannelArgument]
) -> grpc.aio.Server:
    """Start a grpc.aio server that sends `reply` to the calls of each protocol.

    PredictStreaming sends it `messages` times, ModelStreamInfer once for each request.
    """

    async def infer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return reply

    async def stream(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        for _ in range(messages):
            yield reply

    async def both_ways(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield reply

    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            *arguments,
        ]
    )
    for service, method in (
        ("inference.GRPCInferenceService", "ModelInfer"),
        ("tensorflow.serving.PredictionService", "Predict"),
        ("grps.protos.v1.GrpsService", "Predict"),
    ):
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(infer),
            "PredictStreaming": grpc.unary_stream_rpc_method_handler(stream),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(both_ways),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    if server.add_insecure_port(f"127.0.0.1:{port}") != port:
        raise SystemExit(f"port {port} is taken")
    await server.start()
    return server


async def serve_rest(port: int, reply: bytes, headers: dict[str, str], through_json: bool) -> web.AppRunner:
    """Start a stock aiohttp server; `through_json`: it decodes and encodes the tensor in the most obvious way."""

    async def canned(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=reply, headers=headers)

    async def plain_json(request: web.Request) -> web.Response:
        message = json.loads(await request.read())
        given = message["inputs"][0]
        values = np.array(given["data"], np.float32).reshape(given["shape"])
        output = {
            "name": "y",
            "datatype": "FP32",
            "shape": list(values.shape),
            "data": values.ravel().tolist(),
        }
        model = request.match_info["model"]
        named = {"id": message["id"]} if "id" in message else {}
        text = json.dumps({"model_name": model, "model_version": "1", **named, "outputs": [output]})
        return web.Response(body=text.encode(), headers=headers)

    async def plain_predict(request: web.Request) -> web.Response:
        values = np.array(json.loads(await request.read())["instances"], np.float32)
        return web.Response(body=json.dumps({"predictions": values.tolist()}).encode(), headers=headers)

    app = web.Application(client_max_size=LIMIT)
    app.router.add_post("/v2/models/{model}/infer", plain_json if through_json else canned)
    app.router.add_post("/v1/models/{model}:predict", plain_predict if through_json else canned)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_port=False).start()
    return runner


async def main(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    reply = arguments.reply.read_bytes()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if arguments.kind == "grpc":
        server = await serve_grpc(arguments.port, reply, arguments.messages, arguments.channel)
        await stop.wait()
        await server.stop(None)
    else:
        through_json = arguments.kind == "rest-json"
        runner = await serve_rest(arguments.port, reply, arguments.headers, through_json)
        await stop.wait()
        await runner.cleanup()


def argument(text: str) -> ChannelArgument:
    """Parse NAME=VALUE; a numeric value becomes an integer. Raise `argparse.ArgumentTypeError` without "="."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, int(value) if value.removeprefix("-").isdigit() else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["grpc", "rest", "rest-json"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--reply", type=Path, required=True, help="file with the canned reply")
    parser.add_argument("--headers", type=json.loads, default={}, help="headers of the reply, a JSON object")
    parser.add_argument("--messages", type=int, default=1, help="how often a stream repeats the reply")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument(
        "--channel",
        type=argument,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of grpc's server",
    )
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if arguments.loop == "uvloop" else None) as runner:
        runner.run(main(arguments))
