"""In the server: what a model asks for while its process runs a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Internal, ServingError, is_told
from triglot.engine.processes.channel import Channel, Gone, Message
from triglot.engine.processes.failures import description, error_fields
from triglot.engine.processes.frames import FrameError, Kind
from triglot.engine.processes.values import dumps


class Desk:
    """Answers for one call, one question after the other. To be closed with the call."""

    def __init__(self, channel: Channel, call: Call) -> None:
        self._channel = channel
        self._call = call
        self._streams: dict[int, Iterator[Any]] = {}

    def serve(self, message: Message) -> bool:
        """Whether the message was a question. Raises `Gone`."""
        if message.kind is Kind.METADATA:
            self._channel.send(Kind.REPLY, text=dumps(list(self._call.metadata.items())))
        elif message.kind is Kind.MODEL:
            self._reply(message)
        else:
            return False
        return True

    def _reply(self, message: Message) -> None:
        try:
            answer = self._answer(message)
            placed = None if answer is None else self._channel.place(answer)
        except Gone:
            raise
        except BaseException as error:  # The process waits for a reply, whatever it is.
            self._refuse(error if is_told(error) else Internal(f"{type(error).__name__}: {description(error)}"))
            return
        try:
            self._channel.send(Kind.REPLY, placed=placed)
        except FrameError as error:
            self._refuse(Internal(f"the answer cannot be handed over: {error}"))

    def _answer(self, message: Message) -> Any:
        """What another model answers; None at the end of a stream, and for what opens or closes one."""
        fields = message.fields
        number, begins = fields.pop("stream", 0), "model" in fields
        if not begins:
            if not fields["close"]:
                return next(self._streams[number], None)
            self._close(number)
            return None
        inputs = message.tensors or {}
        if not number:
            return self._call.infer(fields.pop("model"), inputs, **fields)
        self._streams[number] = iter(self._call.infer_stream(fields.pop("model"), inputs, **fields))
        return None

    def _refuse(self, error: ServingError) -> None:
        self._channel.send(Kind.REFUSAL, text=dumps(error_fields(error)))

    def _close(self, number: int) -> None:
        close = getattr(self._streams.pop(number, None), "close", None)
        if close is not None:
            close()

    def close(self) -> None:
        """End the streams that the model has left open."""
        for number in list(self._streams):
            with suppress(Exception):
                self._close(number)
