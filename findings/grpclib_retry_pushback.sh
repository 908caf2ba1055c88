#!/bin/bash
# grpclib 0.4.9: a server's hint when to retry, `grpc-retry-pushback-ms`, never reaches the client's code.
#
# gRPC's retry design (A6) has servers send that trailing metadata; grpcio, grpc-go, grpc-java and grpc-js show it with
# the error's other metadata. grpclib drops every name that begins with `grpc-`, and obeys the hint nowhere itself: a
# client that waits for what the trailing metadata says retries at once, or never.
#
# A server of grpcio ends a call with the hint, and with a name of its own.
# Output seen, on Python 3.11:
#   grpcio   RESOURCE_EXHAUSTED {'grpc-retry-pushback-ms': '2000', 'x-retry-ms': '2000'}
#   grpclib  RESOURCE_EXHAUSTED {'x-retry-ms': '2000'}
# Exits 0 while that is so, and 1 when both get both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check grpclib==0.4.9 grpcio==1.85.1
cat > run.py <<'PY'
import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

METHOD = "/busy.Busy/Call"
HINTS = (("grpc-retry-pushback-ms", "2000"), ("x-retry-ms", "2000"))


class Bytes(CodecBase):
    __content_subtype__ = "proto"

    def encode(self, message, message_type):
        return message

    def decode(self, data, message_type):
        return data


def refuse(request, context):
    context.set_trailing_metadata(HINTS)
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")


async def by_grpclib(port):
    async with Channel("127.0.0.1", port, codec=Bytes()) as channel:
        stream = UnaryUnaryMethod(channel, METHOD, bytes, bytes).open()
        try:
            async with stream:
                await stream.send_message(b"", end=True)
                await stream.recv_message()
        except GRPCError as error:
            return error.status.name, dict(stream.trailing_metadata)


def by_grpcio(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(METHOD)(b"")
        except grpc.RpcError as error:
            return error.code().name, dict(error.trailing_metadata())


server = grpc.server(ThreadPoolExecutor(1))
handlers = {"Call": grpc.unary_unary_rpc_method_handler(refuse)}
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("busy.Busy", handlers)])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
shown, dropped = by_grpcio(port), asyncio.run(by_grpclib(port))
server.stop(None)
print("grpcio  ", *shown)
print("grpclib ", *dropped)
raise SystemExit((shown[1], dropped[1]) != (dict(HINTS), {"x-retry-ms": "2000"}))
PY
venv/bin/python run.py
