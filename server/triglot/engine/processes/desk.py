"""In the server: what a model asks for while its process runs a call, where calls take turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Internal, ServingError, is_told
from triglot.engine.processes.answers import aside
from triglot.engine.processes.channel import Channel, Gone, Message
from triglot.engine.processes.failures import description, error_fields
from triglot.engine.processes.frames import FrameError, Kind
from triglot.engine.processes.remote_call import asked_of
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
            call = member_of(self._call, (message.fields or {}).get("member"))
            self._channel.send(Kind.REPLY, text=dumps(list(call.metadata.items())))
        elif message.kind is Kind.MODEL:
            self._reply(message)
        else:
            return False
        return True

    def _reply(self, message: Message) -> None:
        try:
            answer = self._answer(message)
            text = beside_text(answer)
            placed = self._channel.place(answer) if isinstance(answer, Mapping) else None
        except Gone:
            raise
        except BaseException as error:  # The process waits for a reply, whatever it is.
            self._refuse(told(error))
            return
        try:
            self._channel.send(Kind.REPLY, text=text, placed=placed)
        except FrameError as error:
            self._refuse(Internal(f"the answer cannot be handed over: {error}"))

    def _answer(self, message: Message) -> Any:
        """What another model answers; None at the end of a stream, and for what opens or closes one."""
        fields = message.fields
        number, begins = fields.pop("stream", 0), "member" in fields
        if not begins:
            if not fields["close"]:
                return next(self._streams[number], None)
            self._close(number)
            return None
        call = member_of(self._call, fields.pop("member"))
        asked = asked_of(fields, message.tensors or {}, stream=bool(number))
        answer = call.reach(call, asked)
        if not number:
            return answer
        self._streams[number] = iter(answer)
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


def member_of(call: Call, member: int | None) -> Call:
    """The one of a call's members that a question is asked on behalf of; None: the call itself."""
    return call if member is None else call.members[member]


def beside_text(answer: object) -> bytes:
    """What belongs to a reply besides its tensors; a `ModelTask`'s is nothing else."""
    beside = {"said": answer} if isinstance(answer, bool) else aside(answer)
    return dumps(beside) if beside else b""


def told(error: BaseException) -> ServingError:
    """What a model is told of an error of another."""
    return error if is_told(error) else Internal(f"{type(error).__name__}: {description(error)}")
