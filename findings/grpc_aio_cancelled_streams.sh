#!/bin/bash
# grpcio 1.85.1: a grpc.aio server keeps about 300 bytes of each response stream that its client cancels.
#
# Whoever serves tokens or events over grpc.aio, and whose clients stop when they have read enough, sees the server's
# resident size grow without end: 300 MB for a million such calls. The size of the messages makes no difference, and
# calls that are read to the end leave nothing.
#
# Output seen, on Python 3.11, x86-64, after a minute (MiB after each 2,000 calls):
#   read to the end:       2 bytes a call [34.89, 34.91, 34.91, 34.91, 34.92, 34.92, 34.93]
#   cancelled:           308 bytes a call [35.55, 36.08, 36.7, 37.25, 37.88, 38.44, 39.02]
# Exits 0 while that is so, and 1 when cancelled calls leave no more than others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check grpcio==1.85.1
cat > run.py <<'PY'
import asyncio
import subprocess
import sys

import grpc.aio

EACH, SLICES, UNCOUNTED = 2000, 7, 2


async def serve():
    async def count(request, context):
        for _ in range(int(request)):
            yield bytes(100)

    handler = grpc.method_handlers_generic_handler("t.T", {"Count": grpc.unary_stream_rpc_method_handler(count)})
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


async def call(stub, cut):
    if not cut:
        assert len([message async for message in stub(b"20")]) == 20
        return
    answers = stub(b"1000")
    for _ in range(20):
        await answers.read()
    answers.cancel()


async def measure(cut):
    server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE)
    try:
        port, sizes = int(server.stdout.readline()), []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = channel.unary_stream("/t.T/Count")
            for _ in range(SLICES):
                numbers = iter(range(EACH))

                async def work():
                    for _ in numbers:
                        await call(stub, cut)

                await asyncio.gather(*(work() for _ in range(8)))
                sizes.append(resident(server.pid))
    finally:
        server.kill()
        server.wait()
    return (sizes[-1] - sizes[UNCOUNTED - 1]) / (SLICES - UNCOUNTED) / EACH, [round(s / 2**20, 2) for s in sizes]


if sys.argv[1:] == ["serve"]:
    asyncio.run(serve())
whole, sizes = asyncio.run(measure(False))
print(f"read to the end:   {whole:5.0f} bytes a call", sizes)
cut, sizes = asyncio.run(measure(True))
print(f"cancelled:         {cut:5.0f} bytes a call", sizes)
sys.exit(not (cut > 150 and whole < 50))
PY
venv/bin/python run.py 2> log || { cat log; exit 1; }
