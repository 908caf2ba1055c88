"""What asynchronous code in a process asks for is answered, whatever becomes of the question."""

from __future__ import annotations

import json
from typing import Any

from triglot.core.call import Call
from triglot.executors.process.callbacks import CallbackHandler
from triglot.executors.process.channel import Message
from triglot.executors.process.frames import Kind
from waiting import until


class Sent(list[tuple[Kind, int, str]]):
    """What the process gets: the kind, the question, and what a refusal says."""

    def __call__(self, kind: Kind, number: int, text: bytes = b"", answer: Any = None) -> None:
        self.append((kind, number, json.loads(text)["message"] if text else ""))


def asks(question: int) -> Message:
    return Message(Kind.MODEL, 1, json.dumps({"question": question, "member": None, "model": "m"}).encode(), None)


def handler(sent: Sent) -> CallbackHandler:
    return CallbackHandler(sent, Call())


REFUSED = (Kind.REFUSAL, 7, "the call was cancelled")


async def test_a_question_that_is_taken_back_at_once() -> None:
    sent = Sent()
    callbacks = handler(sent)
    callbacks.serve(asks(7))
    callbacks.serve(Message(Kind.STOP, 1, b'{"question": 7}', None))
    callbacks.close()
    await until(lambda: len(sent) == 1)
    assert sent == [REFUSED]


async def test_a_question_of_a_call_that_ends_at_once() -> None:
    sent = Sent()
    callbacks = handler(sent)
    callbacks.serve(asks(7))
    callbacks.close()
    await until(lambda: len(sent) == 1)
    assert sent == [REFUSED]
