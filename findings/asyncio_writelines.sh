#!/bin/bash
# asyncio of CPython 3.12.1 and 3.13.0: `writelines` never calls `pause_writing`, and raises on a closing transport.
#
# Until 3.11 it joined the pieces and called `write`. Since 3.12 it appends them to the buffer itself, without what
# `write` does around that: a server that relies on `pause_writing` buffers without bound what a slow client does not
# read, and what is sent after the client's end of file has closed the transport raises TypeError. 3.14.10 does as
# `write` again (gh-127655, gh-136234). uvloop's transports are not affected.
#
# Output seen with PYTHON=python3.13 (3.13.0):
#   write       4194304 bytes: pause_writing called
#   writelines  4194304 bytes: pause_writing not called
#   writelines after close(): TypeError: 'NoneType' object is not callable
# Exits 0 while that is so, 1 when it differs, and 2 without an interpreter of 3.12 or 3.13. PYTHON names one.
set -euo pipefail
python=${PYTHON:-python3.13}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' || { echo "no $python" >&2; exit 2; }
"$python" -I - <<'PY'
import asyncio
import socket
import sys

PIECES = [bytes(1 << 20)] * 4


class Paused(asyncio.Protocol):
    paused = False

    def pause_writing(self):
        self.paused = True


async def connected():
    ours, theirs = socket.socketpair()
    transport, protocol = await asyncio.get_running_loop().create_connection(Paused, sock=ours)
    return transport, protocol, theirs


async def pauses(send):
    transport, protocol, theirs = await connected()
    send(transport)
    transport.abort()
    theirs.close()
    return protocol.paused


async def main():
    by_write = await pauses(lambda transport: transport.write(b"".join(PIECES)))
    by_writelines = await pauses(lambda transport: transport.writelines(PIECES))
    for name, paused in (("write", by_write), ("writelines", by_writelines)):
        print(f"{name:10}  {sum(map(len, PIECES))} bytes: pause_writing {'' if paused else 'not '}called")
    transport, _, theirs = await connected()
    transport.close()
    error = None
    try:
        transport.writelines(PIECES)
    except TypeError as raised:
        error = raised
    theirs.close()
    print(f"writelines after close(): {type(error).__name__}: {error}")
    sys.exit(not by_write or by_writelines or error is None)


print(sys.version.split()[0])
asyncio.run(main())
PY
