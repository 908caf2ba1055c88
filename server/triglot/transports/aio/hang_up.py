"""Closes a connection of grpc's core, which has no function for it: its socket is found by file descriptor."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

log = logging.getLogger(__name__)

_FILES = Path("/dev/fd")
Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def host_of(peer: str) -> str:
    """Returns the IP address of a client from grpc's name for it (ipv4:127.0.0.1:80); "" for a Unix socket."""
    family, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if family in ("ipv4", "ipv6") else ""


def hang_up(peer: str, port: int) -> None:
    """Shut down the connection to `port` from a client, given by grpc's name for it: ipv4:127.0.0.1:80.

    Does nothing for clients of a Unix socket, which have no such names.
    """
    family, _, address = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return
    host, _, number = address.rpartition(":")
    wanted = _address(host.strip("[]"), int(number))
    try:
        files = [int(file.name) for file in _FILES.iterdir()]
    except OSError as error:
        log.warning("cannot close the connection of %s: %s", peer, error)
        return
    for one in files:
        with suppress(OSError):  # Closed meanwhile, or not a connection.
            if not stat.S_ISSOCK(os.fstat(one).st_mode):
                continue
            # A duplicate descriptor, because the core keeps and closes its own.
            with socket.socket(fileno=os.dup(one)) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if found.getsockname()[1] == port and _address(*found.getpeername()[:2]) == wanted:
                    found.shutdown(socket.SHUT_RDWR)


def _address(host: str, port: int) -> Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, port
