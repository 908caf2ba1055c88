"""The sockets of a host and a port."""

from __future__ import annotations

import asyncio
import socket

BACKLOG = 1024


async def bind(host: str, port: int) -> list[socket.socket]:
    """One for each address of the host, all on one port; 0: any free one. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            bound.append(_bind(family, (address[0], port, *address[2:])))
            port = bound[0].getsockname()[1]
    except OSError as error:
        for one in bound:
            one.close()
        raise OSError(error.errno, f"cannot bind gRPC to {host} port {port}: {error.strerror}") from None
    return bound


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    # A second server on a used port is an error, not half of the calls: no SO_REUSEPORT.
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # The wildcard is for both; any other address is its own.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
