#!/bin/bash
# grpclib 0.4.9: leaving `async with … as stream` after a `break` waits for the end of the stream.
#
# Elsewhere an early exit ends a call: aiohttp's and httpx's blocks close the response, grpc.aio cancels a call that is
# dropped. Here the end of the block waits for the server's trailers, for as long as the server streams. Only
# `await stream.cancel()` ends the call.
#
# A server, grpclib's own, sends 10 messages in half a second; the client leaves after the first.
# Output seen, on Python 3.11:
#   break:             left after 0.5 s, 10 messages were sent
#   cancel and break:  left after 0.0 s, 1 messages were sent
# Exits 0 while that is so, and 1 when `break` alone ends the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check grpclib==0.4.9 h2==4.4.1
cat > run.py <<'PY'
import asyncio
import sys
import time

from grpclib.client import Channel
from grpclib.const import Cardinality, Handler
from grpclib.encoding.base import CodecBase
from grpclib.server import Server

MESSAGES, PATH = 10, "/t.T/Stream"


class Bytes(CodecBase):
    __content_subtype__ = "proto"

    def encode(self, message, message_type):
        return message

    def decode(self, data, message_type):
        return data


class Service:
    sent = 0

    async def stream(self, stream):
        await stream.recv_message()
        for _ in range(MESSAGES):
            await stream.send_message(b"x")
            self.sent += 1
            await asyncio.sleep(0.05)

    def __mapping__(self):
        return {PATH: Handler(self.stream, Cardinality.UNARY_STREAM, bytes, bytes)}


async def leave(port, cancels):
    async with Channel("127.0.0.1", port, codec=Bytes()) as channel:
        began = time.monotonic()
        async with channel.request(PATH, Cardinality.UNARY_STREAM, bytes, bytes) as stream:
            await stream.send_message(b"", end=True)
            async for _ in stream:
                if cancels:
                    await stream.cancel()
                break
        return time.monotonic() - began


async def main():
    sent = []
    for way in ("break", "cancel and break"):
        service = Service()
        server = Server([service], codec=Bytes())
        await server.start("127.0.0.1", 0)
        port = server._server.sockets[0].getsockname()[1]
        seconds = await leave(port, way != "break")
        sent.append(service.sent)
        print(f"{way + ':':18} left after {seconds:.1f} s, {service.sent} messages were sent")
        server.close()
        await server.wait_closed()
    return sent[0] == MESSAGES > sent[1]


sys.exit(not asyncio.run(main()))
PY
venv/bin/python run.py 2> log || { cat log; exit 1; }
