"""Answers that are compressed, for a server that is told to (gRPC over HTTP/2: Message-Encoding)."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from triglot.core.scattered import Scattered
from triglot.protocols.rows import Kind
from triglot.transports.deflate import DEFLATED_WORK, WINDOW_BITS, Accepted, deflate
from triglot.transports.grpc_calls import Trailing
from triglot.transports.http2.core.requests import RpcHead, answer_head, compressed_head
from triglot.transports.http2.messages import Packed
from triglot.transports.http2.roles import Connected
from triglot.transports.http2.rpc import Rpc
from triglot.transports.off_loop import run_sized

COMPRESSED_FROM = 1024
"""Bytes; what is smaller fits into a packet or two as it is."""


class CompressingRpc(Rpc):
    """A call whose answers are compressed, where the client accepts that and it makes them much smaller."""

    __slots__ = ("_coding", "answer_head")

    def __init__(self, protocol: Connected, number: int, head: RpcHead, kind: Kind | None, handler: Any) -> None:
        super().__init__(protocol, number, head, kind, handler)
        preferred = protocol.server.compression
        accepted = [name.strip() for name in head.accepts.split(",")]
        self._coding = next((name for name in (preferred, *WINDOW_BITS) if name in accepted), "")
        # A stream says so before its first answer, whether that is worth it or not.
        self.answer_head = compressed_head(self._coding) if self._coding else answer_head()

    async def _packed(self, message: bytes | Scattered) -> bytes | Scattered | Packed:
        """The message as it is to be sent; on a thread when that takes long."""
        if not self._coding or len(message) < COMPRESSED_FROM or self.over:
            return message
        # Clients name all that they can read: that is no wish of theirs, see `deflate`.
        wish = Accepted(self._coding, asked=False)
        data = await run_sized(DEFLATED_WORK * len(message), deflate, bytes(message), wish)
        return message if data is None else Packed(data)

    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /, *, packed: bool = False) -> None:
        """See the base class."""
        if self._coding and len(message) >= COMPRESSED_FROM:
            # What ran the call has ended; this runs it now.
            self.task = self.run(self._respond_packed(message, trailing))
            return
        self.answer_head = answer_head()
        super().respond(message, trailing)

    async def _respond_packed(self, message: bytes | Scattered, trailing: Trailing) -> None:
        try:
            packed = await self._packed(message)
        except asyncio.CancelledError:
            self.cancelled()
            return
        if isinstance(packed, Packed):
            super().respond(bytes(packed.data), trailing, packed=True)
        else:
            self.answer_head = answer_head()
            super().respond(message, trailing)

    def offer(self, answers: deque[bytes]) -> None:
        """See the base class; to compress them may take a while."""
        if not self._coding:
            super().offer(answers)

    async def write(self, message: bytes | Scattered, /, *, packed: bool = False) -> None:
        """Send one answer of a stream; waits while the client does not read. Raises `StreamGone`."""
        made = await self._packed(message)
        if isinstance(made, Packed):
            await super().write(bytes(made.data), packed=True)
        else:
            await super().write(made)
