"""Compression of gRPC responses, if the server is configured for it (gRPC over HTTP/2: Message-Encoding)."""

from __future__ import annotations

import asyncio
from collections import deque

from triglot.core.running import Sink
from triglot.core.tensor import Scattered
from triglot.transports.deflate import DEFLATED_WORK, WINDOW_BITS, Accepted, deflate
from triglot.transports.grpc_calls import GrpcRow, Trailing
from triglot.transports.http2.core.receiving import RpcHead
from triglot.transports.http2.core.sending import compressed_head, response_head
from triglot.transports.http2.messages import CompressedMessage
from triglot.transports.http2.roles import Connected
from triglot.transports.http2.rpc import Rpc
from triglot.transports.off_loop import run_sized

COMPRESSED_FROM = 1024
"""Size from which responses are compressed; smaller ones fit into one or two packets anyway."""


class CompressingRpc(Rpc):
    """A call whose responses are compressed if the client accepts it and they become much smaller."""

    __slots__ = ("_coding",)

    def __init__(self, protocol: Connected, number: int, head: RpcHead, row: GrpcRow | None) -> None:
        super().__init__(protocol, number, head, row)
        preferred = protocol.server.compression
        accepted = [name.strip() for name in head.accepts.split(",")]
        self._coding = next((name for name in (preferred, *WINDOW_BITS) if name in accepted), "")
        # The headers of a stream declare it before its first message, whether that is compressed or not.
        self.response_head = compressed_head(self._coding) if self._coding else response_head()

    async def _compress(self, message: bytes | Scattered) -> bytes | Scattered | CompressedMessage:
        """Return the message, compressed if that is worth it; on a thread if it takes long."""
        if not self._coding or len(message) < COMPRESSED_FROM or self.over:
            return message
        # Clients list every coding that they can read, which is not a request for it, see `deflate`.
        preference = Accepted(self._coding, asked=False)
        data = await run_sized(DEFLATED_WORK * len(message), deflate, bytes(message), preference)
        return message if data is None else CompressedMessage(data)

    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /, *, compressed: bool = False) -> None:
        if self._coding and len(message) >= COMPRESSED_FROM:
            # The task or call that ran so far has ended; this one takes its place.
            self.task = self.run(self._respond_compressed(message, trailing))
            return
        self.response_head = response_head()
        super().respond(message, trailing)

    async def _respond_compressed(self, message: bytes | Scattered, trailing: Trailing) -> None:
        try:
            compressed = await self._compress(message)
        except asyncio.CancelledError:
            self.cancelled()
            return
        if isinstance(compressed, CompressedMessage):
            super().respond(bytes(compressed.data), trailing, compressed=True)
        else:
            self.response_head = response_head()
            super().respond(message, trailing)

    def _is_slow(self, encoded: bytes | Scattered) -> bool:
        return bool(self._coding) and len(encoded) >= COMPRESSED_FROM

    async def _prepared(self, encoded: bytes | Scattered) -> bytes | Scattered | CompressedMessage:
        return await self._compress(encoded)

    def _send_next(self, encoded: bytes | Scattered | CompressedMessage) -> bool:
        if isinstance(encoded, CompressedMessage):
            return self.write(bytes(encoded.data), compressed=True)
        return self.write(encoded)

    def send_all(self, responses: deque[bytes], /) -> bool:
        """See `Sink`. Messages that may be compressed are sent one by one."""
        return Sink.send_all(self, responses) if self._coding else super().send_all(responses)
