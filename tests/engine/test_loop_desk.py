"""What asynchronous code in a process asks for is answered, whatever becomes of the question."""

from __future__ import annotations

import json
from typing import Any

from triglot.core.call import Call
from triglot.engine.processes.channel import Message
from triglot.engine.processes.frames import Kind
from triglot.engine.processes.loop_desk import LoopDesk


class Posted(list[tuple[Kind, int, str]]):
    """What the process gets: the kind, the question, and what a refusal says."""

    def __call__(self, kind: Kind, question: int, text: bytes, answer: Any) -> None:
        self.append((kind, question, json.loads(text)["message"] if text else ""))


def asks(question: int) -> Message:
    return Message(Kind.MODEL, 1, json.dumps({"question": question, "member": None, "model": "m"}).encode(), None)


REFUSED = (Kind.REFUSAL, 7, "nobody waits for the call any more")


async def test_a_question_that_is_taken_back_at_once() -> None:
    posted = Posted()
    desk = LoopDesk(posted, Call())
    assert desk.serve(asks(7))
    assert desk.serve(Message(Kind.STOP, 1, b'{"question": 7}', None))
    await desk.close()
    assert posted == [REFUSED]


async def test_a_question_of_a_call_that_ends_at_once() -> None:
    posted = Posted()
    desk = LoopDesk(posted, Call())
    assert desk.serve(asks(7))
    await desk.close()
    assert posted == [REFUSED]
