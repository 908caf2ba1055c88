"""In the process: blocking code runs what the server sends, one call after the other."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from triglot.core.call import Call, ModelCall, ModelTask
from triglot.core.errors import Internal, Unavailable
from triglot.core.model import Model
from triglot.engine.batch import check_answers
from triglot.engine.declarations import function_of, takes_call
from triglot.engine.processes.answers import grouped, list_rows, text_of
from triglot.engine.processes.arena import Placed
from triglot.engine.processes.channel import Channel, Gone, Message
from triglot.engine.processes.conversation import Conversation
from triglot.engine.processes.failures import error_fields, failure_fields, load_failure_fields
from triglot.engine.processes.frames import FrameError, Kind
from triglot.engine.processes.page import Page
from triglot.engine.processes.remote_call import RemoteCall
from triglot.engine.processes.values import dumps


class InTurn:
    """Serves calls of a model whose code is no `async def`."""

    def __init__(self, channel: Channel, page: Page, name: str, model: Model, file: Path) -> None:
        self._channel = channel
        self._page = page
        self._name = name
        self._function = function_of(model)
        self._infer_batch = model.infer_batch
        self._no_call = None if takes_call(model.infer) else Call()
        self._start = model.start_instance
        self._file = file
        self._pid = os.getpid()
        self._current: Conversation | None = None

    def serve(self, message: Message) -> None:
        """Run one call to its end, and send what came of it. Raises `Gone`, also in a fork of the process."""
        if message.kind not in (Kind.CALL, Kind.START):
            raise Gone(f"expected a call, got {message.kind.name}")
        number = message.call
        conversation = self._current = Conversation(self._channel, self._page, number, self._name, self._own)
        kind, text, placed = Kind.DONE, b"", None
        try:
            fields = message.fields or {}
            if message.kind is Kind.START:
                self._start(RemoteCall(conversation, fields))
            elif "counts" in fields:
                placed, text = self._list(message, fields, conversation)
            else:
                answer = self._one(message, fields, conversation)
                if answer is not None:
                    placed, text = conversation.placed(answer)
                    del answer
        except Gone:
            raise
        except BaseException as error:  # A model that calls exit() fails this call, and goes on.
            kind, text, placed = *failed(message.kind, error, self._file), None
        if os.getpid() != self._pid:
            raise Gone("the model has forked, and only one of the two has the connection")
        self._current = None
        conversation.end()
        if message.named is not None:
            message.named.clear()  # So that their region can be used for the next call.
        try:
            self._channel.send(kind, call=number, text=text, placed=placed)
        except FrameError as error:
            told = Internal(f"model '{self._name}' returned outputs that cannot be handed over: {error}")
            self._channel.send(Kind.FAILED, call=number, text=dumps(error_fields(told)))

    def _own(self, _: Call, asked: ModelCall | ModelTask) -> Any:
        """What the model reaches on behalf of no request, on any thread. Raises `Unavailable` between calls."""
        conversation = self._current
        if conversation is None:
            raise Unavailable(f"model '{self._name}': its process reaches other models while it runs a request")
        return conversation.model(asked, None)

    def _one(self, message: Message, fields: Mapping[str, Any], conversation: Conversation) -> Any:
        """What `infer` gives as its last answer; the others have been sent."""
        result = self._function(message.tensors or {}, self._no_call or RemoteCall(conversation, fields))
        if isinstance(result, Generator):
            del message
            with closing(result) as answers:
                for answer in answers:
                    if not conversation.answer(answer):
                        break
            return None
        return result

    def _list(
        self, message: Message, fields: Mapping[str, Any], conversation: Conversation
    ) -> tuple[Placed, bytes]:
        """What `infer_batch` gives for each of several requests."""
        assert self._infer_batch is not None
        calls = RemoteCall(conversation, fields).members
        inputs = list(grouped(message.named or (), fields["counts"]))
        del message
        answers = check_answers(self._infer_batch(inputs, calls), len(calls))
        del inputs
        rows, beside = list_rows(answers, self._name)
        return self._channel.place_all(rows), text_of({"answers": beside}, self._name)


def failed(kind: Kind, error: BaseException, file: Path) -> tuple[Kind, bytes]:
    """What is sent in place of an answer, to a frame of this kind."""
    if kind is Kind.START:
        return Kind.UNLOADABLE, dumps(load_failure_fields(error, file))
    return Kind.FAILED, dumps(failure_fields(error))
