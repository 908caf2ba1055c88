"""GrpsContext: streaming, errors, user data; thread by thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.backends.grps_folders import (
    PATIENCE,
    GrpsCall,
    ask,
    opened,
    own_module,
    result,
    stream,
    threads,
    write_project,
)
from triglot.backends.grps.context import GrpsContext
from triglot.core.errors import Internal
from triglot.pb.grps.grps_pb2 import GrpsMessage, Status

STREAMS = """
class Streams(Base):
    def infer(self, inp, context):
        for part in inp.str_data.split():
            if not context.if_streaming():
                break
            if part == "err":
                context.set_err_msg("my error")
                break
            if part == "raise":
                raise ValueError("boom")
            context.stream_respond(GrpsMessage(str_data=part), final=part == "last")
        return inp


inferer_register.register("inferer", Streams())
"""


def of(call: GrpsCall) -> GrpsContext:
    return GrpsContext.of(call)


def test_without_a_call(tmp_path: Path) -> None:
    context = GrpsContext()
    assert not context.if_streaming()
    assert not context.if_disconnected()
    assert not context.has_err()
    assert context.get_err_msg() == ""
    assert context.get_user_data("nothing") is None
    assert context.get_http_request() is None
    assert context.get_http_response() is None
    assert context.converter is None
    assert context.inferer is None
    context.stream_respond(GrpsMessage(str_data="to nobody"), final=True)
    assert not context.finished


def test_user_data() -> None:
    context = GrpsContext()
    value: list[int] = []
    context.put_user_data("key", value)
    context.put_user_data(3, "three")
    assert context.get_user_data("key") is value
    assert context.get_user_data(3) == "three"


def test_errors() -> None:
    context = GrpsContext()
    context.set_has_err(True)
    assert context.has_err()
    assert context.get_err_msg() == ""
    context.set_has_err(False)
    assert not context.has_err()
    context.set_err_msg("wrong")
    assert context.has_err()
    assert context.get_err_msg() == "wrong"


def test_answers_carry_success_unless_they_fail() -> None:
    call = GrpsCall(streaming=True)
    context = of(call)
    context.stream_respond(GrpsMessage(str_data="a"))
    context.stream_respond(GrpsMessage(status=Status(code=201, msg="odd", status=Status.UNKNOWN)))
    context.stream_respond(GrpsMessage(status=Status(code=418, msg="teapot", status=Status.FAILURE)))
    statuses = [GrpsMessage.FromString(answer).status for answer in call.answers]
    assert [(status.code, status.msg, status.status) for status in statuses] == [
        (200, "OK", Status.SUCCESS),
        (200, "OK", Status.SUCCESS),
        (418, "teapot", Status.FAILURE),
    ]


def test_unary_call_sends_no_stream_message() -> None:
    call = GrpsCall()
    context = of(call)
    assert not context.if_streaming()
    message = GrpsMessage(str_data="a")
    context.stream_respond(message, final=True)
    assert call.answers == []
    assert not call.finished.is_set()
    assert not context.finished
    assert message.status.status == Status.SUCCESS


@pytest.mark.parametrize("answer", [None, {}, "text", b"bytes", GrpsMessage, Status()])
def test_only_messages_are_streamed(answer: Any) -> None:
    for call in (GrpsCall(), GrpsCall(streaming=True)):
        with pytest.raises(ValueError, match="stream_respond: expected a GrpsMessage, got"):
            of(call).stream_respond(answer)
        assert call.answers == []


def test_postprocessing_needs_a_converter() -> None:
    class Upper:
        def postprocess(self, out: str, context: GrpsContext) -> GrpsMessage:
            assert context.converter is self
            return GrpsMessage(str_data=out.upper())

    call = GrpsCall(streaming=True)
    context = of(call)
    with pytest.raises(ValueError, match="the model has no converter"):
        context.stream_respond_with_postprocess("a")
    inferer, converter = object(), Upper()
    context.enter(inferer, converter)
    assert context.inferer is inferer
    context.stream_respond_with_postprocess("a")
    context.stream_respond_with_postprocess("b", final=True)
    assert call.texts == ["A", "B"]
    assert call.finished.is_set()


def test_nothing_follows_the_final_answer(tmp_path: Path) -> None:
    with opened(write_project(tmp_path, STREAMS)) as model:
        call = stream(model, "one last two raise")
        assert call.texts == ["one", "last"]
        assert call.finished.is_set()
        assert ask(model, "one last two") == "one last two"


def test_errors_after_the_final_answer_are_not_sent(tmp_path: Path) -> None:
    code = STREAMS.replace("return inp", "raise ValueError('too late')")
    with opened(write_project(tmp_path, code)) as model:
        assert stream(model, "one last").texts == ["one", "last"]
        with pytest.raises(Internal, match="too late"):
            stream(model, "one")


def test_errors_end_a_stream(tmp_path: Path) -> None:
    with opened(write_project(tmp_path, STREAMS)) as model:
        for end, text in (("err", "my error"), ("raise", "ValueError: boom")):
            call = GrpsCall(GrpsMessage(str_data=f"one {end}"), streaming=True)
            with pytest.raises(Internal) as caught:
                model.infer({}, call)
            assert caught.value.message == text
            assert call.texts == ["one"]


def test_a_reader_who_leaves() -> None:
    call = GrpsCall(streaming=True, leave_after=2)
    context = of(call)
    for _ in range(2):
        context.stream_respond(GrpsMessage())
        assert not context.if_disconnected()
    context.stream_respond(GrpsMessage())
    assert context.if_disconnected()
    unary = GrpsCall()
    assert not of(unary).if_disconnected()
    unary.cancel()
    assert of(unary).if_disconnected()


def test_many_threads_respond() -> None:
    call = GrpsCall(streaming=True)
    context = of(call)
    start = threading.Barrier(4)

    def respond(number: int) -> None:
        start.wait(PATIENCE)
        for at in range(200):
            context.stream_respond(GrpsMessage(str_data=f"{number} {at}"))
        # The call refuses whatever comes after the final answer.
        context.stream_respond(GrpsMessage(str_data="end"), final=True)

    with threads(4) as pool:
        for future in [pool.submit(respond, number) for number in range(4)]:
            result(future)
    sent = [text.split() for text in call.texts[:-1]]
    assert call.texts[-1] == "end"
    for number in range(4):
        own = [int(at) for who, at in sent if who == str(number)]
        assert own == list(range(len(own)))
    assert max(len([1 for who, _ in sent if who == str(number)]) for number in range(4)) == 200


def test_another_thread_may_answer(tmp_path: Path) -> None:
    code = """
class Worker(Base):
    def infer(self, inp, context):
        def work():
            for part in inp.str_data.split():
                context.stream_respond(GrpsMessage(str_data=part))

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()


inferer_register.register("inferer", Worker())
"""
    with opened(write_project(tmp_path, code)) as model:
        assert stream(model, "a b c").texts == ["a", "b", "c"]


def test_a_project_polls_for_its_reader(tmp_path: Path) -> None:
    code = """
begun, left = threading.Event(), threading.Event()


class Polls(Base):
    def infer(self, inp, context):
        begun.set()
        while not context.if_disconnected():
            context.stream_respond(GrpsMessage(str_data="more"))
        left.set()


inferer_register.register("inferer", Polls())
"""
    with opened(write_project(tmp_path, code)) as model, threads(1) as pool:
        call = GrpsCall(streaming=True)
        running = pool.submit(model.infer, {}, call)
        assert own_module().begun.wait(PATIENCE)
        call.cancel()
        assert own_module().left.wait(PATIENCE)
        assert result(running) is None
