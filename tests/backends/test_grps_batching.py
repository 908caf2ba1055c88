"""Dynamic batching inside a DAG: who shares a batch, the outcome of each member, and when it is released."""

from __future__ import annotations

import gc
import logging
import time
from concurrent.futures import Future
from math import inf
from pathlib import Path
from typing import Any

import pytest
from grps_batches import DOUBLES, NEVER, ODD, SINGLE, SIZES, STREAMS
from grps_folders import (
    IMPORTS,
    PATIENCE,
    GrpsCall,
    answer_of,
    batched,
    entry,
    opened,
    own_module,
    result,
    threads,
    write_project,
)

from triglot.backends.grps import batching
from triglot.backends.grps.logs import USER_LOGGER
from triglot.backends.grps.settings import ProjectSettings
from triglot.core.call import Call
from triglot.core.current_calls import CURRENT_CALLS
from triglot.core.errors import Cancelled, DeadlineExceeded, Internal
from triglot.pb.grps.grps_pb2 import GrpsMessage
from triglot.scheduling import thread_queue


def texts_of(model: Any, *texts: str) -> list[tuple[GrpsCall, Any]]:
    """A call for each text, all at once; what it gave, or the error it ended with."""
    calls = [GrpsCall(GrpsMessage(str_data=text)) for text in texts]
    with threads(len(calls)) as pool:
        futures = [pool.submit(model.infer, {}, call) for call in calls]
        return [(call, _outcome(future)) for call, future in zip(calls, futures, strict=True)]


def _outcome(future: Future[Any]) -> Any:
    error = future.exception(PATIENCE)
    if isinstance(error, Internal):
        return error.message, error
    return answer_of(result(future))


def answers_in(outcomes: list[tuple[GrpsCall, Any]]) -> list[Any]:
    return [outcome[0] if isinstance(outcome, tuple) else outcome for _, outcome in outcomes]


NEXT = """
class Next(Base):
    def infer(self, inp, context):
        return inp


inferer_register.register("next", Next())
"""


def in_dag(folder: Path, code: str, model: dict[str, Any], **keys: Any) -> ProjectSettings:
    """A project whose DAG has the batched model, and one that hands on what it gets."""
    models = [model, entry("next", inferer_name="next")]
    return write_project(folder, code + NEXT, models=models, nodes=["m-1.0.0", "next-1.0.0"], **keys)


def dag_of_one_model(folder: Path, code: str, size: int, timeout_us: int = NEVER, **server: Any) -> Any:
    return opened(in_dag(folder, code, entry(batching=batched(size, timeout_us)), **server))


def test_a_full_batch_runs_at_once(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 4) as model:
        outcomes = texts_of(model, *"abcd")
        assert answers_in(outcomes) == ["a@4", "b@4", "c@4", "d@4"]
        assert [call.batch_size for call, _ in outcomes] == [4] * 4


LOGS = SIZES.replace("        assert all", "        clogger.warning('ran')\n        assert all")


def test_what_a_batch_logs_belongs_to_all_its_members(tmp_path: Path) -> None:
    class Seen(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            calls.append(list(CURRENT_CALLS.get()))

    calls: list[list[Call]] = []
    logger, handler = logging.getLogger(USER_LOGGER), Seen()
    logger.addHandler(handler)
    try:
        with dag_of_one_model(tmp_path, LOGS, 3) as model:
            outcomes = texts_of(model, *"abc")
    finally:
        logger.removeHandler(handler)
    (members,) = calls
    assert set(members) == {call for call, _ in outcomes}


def test_several_batches_fill_up(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 2) as model:
        assert answers_in(texts_of(model, *"abcdef")) == [f"{text}@2" for text in "abcdef"]


def test_a_batch_of_one(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 1) as model:
        assert answers_in(texts_of(model, "a", "b")) == ["a@1", "b@1"]


def test_the_window_ends(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 100, timeout_us=1) as model:
        assert answers_in(texts_of(model, "a")) == ["a@1"]


def test_why_batches_were_closed_is_counted(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path / "full", SIZES, 2) as model:
        texts_of(model, *"abcd")
        assert list(model.own_batches) == ["m-1.0.0"]
        assert batch_counts(model) == {"full": 2, "batched_requests": 4, "batched_rows": 4}
    with dag_of_one_model(tmp_path / "window", SIZES, 100, timeout_us=1) as model:
        texts_of(model, "a")
        assert batch_counts(model) == {"delay": 1, "batched_requests": 1, "batched_rows": 1}


def test_a_batch_is_not_waited_for_when_a_deadline_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "latest_start_of", lambda deadline, now: now if deadline else inf)
    with dag_of_one_model(tmp_path, SIZES, 100) as model:
        call = GrpsCall(GrpsMessage(str_data="a"))
        call.deadline = time.monotonic() + PATIENCE
        assert answer_of(model.infer({}, call)) == "a@1"
        assert batch_counts(model)["deadline"] == 1


def test_what_one_batch_does_not_take_is_in_the_next(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 3, timeout_us=100_000) as model:
        answers = dict(answer.split("@") for answer in answers_in(texts_of(model, *"abcdefg")))
        assert sorted(answers) == list("abcdefg")
        assert set(answers.values()) <= {"1", "2", "3"}
        assert batch_counts(model)["batched_requests"] == 7


def test_a_batch_is_no_larger_than_the_pool(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 100, max_concurrency=2) as model:
        assert answers_in(texts_of(model, *"abcd")) == [f"{text}@2" for text in "abcd"]


def test_a_window_of_any_length_is_waited_for(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 2, timeout_us=10**18) as model:
        assert answers_in(texts_of(model, *"ab")) == ["a@2", "b@2"]


def test_when_nothing_can_be_decided_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise MemoryError("none left")

    monkeypatch.setattr(thread_queue, "form", fail)
    with dag_of_one_model(tmp_path, SIZES, 2) as model:
        outcomes = answers_in(texts_of(model, *"abc"))
        assert sorted("none left" in outcome for outcome in outcomes) == [False, False, True]


def test_nothing_holds_a_request_that_is_over(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 1) as model:
        gc.collect()
        gc.disable()
        try:
            texts_of(model, "a", "b")
            assert [found for found in gc.get_objects() if isinstance(found, batching.Member)] == []
        finally:
            gc.enable()


def batch_counts(model: Any) -> dict[str, float]:
    (counts,) = model.own_batches.values()
    return {reading.labels.get("reason", reading.name): reading.value for reading in counts.readings()}


def test_other_callers_share_the_batch(tmp_path: Path) -> None:
    """A call with arrays and one with a message."""
    with dag_of_one_model(tmp_path, SIZES, 2) as model, threads(2) as pool:
        arrays = pool.submit(model.infer, {}, GrpsCall().child())
        message = pool.submit(model.infer, {}, GrpsCall(GrpsMessage(str_data="a")))
        assert answer_of(result(message)) == "a@2"
        assert result(arrays)["str_data"].tolist() == [b"@2"]


def test_a_converter_works_on_batches(tmp_path: Path) -> None:
    converter = """
class Numbers(Converter):
    def init(self, path=None, args=None):
        super().init(path, args)

    def preprocess(self, inp, context):
        raise AssertionError

    postprocess = preprocess

    def batch_preprocess(self, inps, contexts):
        assert all(context.converter is self for context in contexts)
        numbers = []
        for inp, context in zip(inps, contexts):
            context.put_user_data("sign", "!" if inp.str_data == "2" else "")
            if inp.str_data == "bad":
                context.set_err_msg("no number")
            numbers.append(0 if inp.str_data == "bad" else int(inp.str_data))
        return numbers

    def batch_postprocess(self, numbers, contexts):
        return [
            GrpsMessage(str_data=f"{number}@{len(numbers)}{context.get_user_data('sign')}")
            for number, context in zip(numbers, contexts)
        ]


converter_register.register("numbers", Numbers())
"""
    numbers = entry(converter_type="customized", converter_name="numbers", batching=batched(2, NEVER))
    files = {"src/customized_converter.py": IMPORTS + converter}
    with opened(in_dag(tmp_path, DOUBLES, numbers, files=files)) as model:
        assert answers_in(texts_of(model, "1", "2")) == ["2@2", "4@2!"]
        assert answers_in(texts_of(model, "bad", "2")) == ["no number", "4@2!"]
        ran = list(own_module().ran)
        # With an error in every context the inferer is not called.
        assert answers_in(texts_of(model, "bad", "bad")) == ["no number"] * 2
        assert own_module().ran == ran
        assert (
            answers_in(texts_of(model, "1", "x"))
            == ["ValueError: invalid literal for int() with base 10: 'x'"] * 2
        )


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a", "err one"], ["a@2", "err one"]),
        (["err one", "err two"], ["err one", "err two"]),
        (["raise", "a"], ["ValueError: boom"] * 2),
        (["err one", "raise"], ["ValueError: boom"] * 2),
        (["more", "a"], ["ValueError: the batch has 3 outputs, expected 2, one per request"] * 2),
        (["none", "a"], ["Output type must be GrpsMessage."] * 2),
    ],
)
def test_members_get_their_own_outcomes(tmp_path: Path, texts: list[str], expected: list[str]) -> None:
    with dag_of_one_model(tmp_path, ODD, 2) as model:
        outcomes = texts_of(model, *texts)
        assert answers_in(outcomes) == expected
        # An exception goes through one thread only.
        errors = [outcome[1] for _, outcome in outcomes if isinstance(outcome, tuple)]
        assert len({id(error) for error in errors}) == len(errors)


def test_fewer_outputs_than_members(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, ODD, 2) as model:
        assert sorted(answers_in(texts_of(model, "fewer", "fewer"))) == [
            "Output type must be GrpsMessage.",
            "fewer@2",
        ]


def test_without_batch_methods(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SINGLE, 1) as model:
        text = "NotImplementedError: Single has no batch_infer, which dynamic batching needs"
        assert answers_in(texts_of(model, "a")) == [text]


@pytest.mark.parametrize("final_first", [True, False])
def test_a_final_answer_releases_its_request(tmp_path: Path, final_first: bool) -> None:
    """Nothing but its own answers is sent to it, whatever becomes of the batch."""
    with dag_of_one_model(tmp_path, STREAMS, 2) as model, threads(2) as pool:
        final = GrpsCall(GrpsMessage(str_data="f"), streaming=True)
        failing = GrpsCall(GrpsMessage(str_data="r"), streaming=True)
        calls = [final, failing] if final_first else [failing, final]
        futures = {id(call): pool.submit(model.infer, {}, call) for call in calls}
        assert own_module().sent.acquire(timeout=PATIENCE)
        assert final.finished.wait(PATIENCE)
        assert final.texts == ["f1", "f2"]
        own_module().gate.set()
        assert result(futures[id(final)]) is None
        with pytest.raises(Internal, match="ValueError: boom"):
            result(futures[id(failing)])
        assert final.texts == ["f1", "f2"]
        assert failing.texts == ["r1", "r2", "end"]
        assert not failing.finished.is_set()


class LeavesInTheQueue(GrpsCall):
    """Its caller is there when it gets its turn, and gone when its batch starts."""

    __slots__ = ("looks",)

    def __init__(self) -> None:
        super().__init__(GrpsMessage(str_data="gone"))
        self.looks = 0

    @property
    def cancelled(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_a_member_whose_caller_left_is_skipped(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 3) as model, threads(3) as pool:
        cancelled = pool.submit(model.infer, {}, LeavesInTheQueue())
        others = [pool.submit(model.infer, {}, GrpsCall(GrpsMessage(str_data=text))) for text in "ab"]
        with pytest.raises(Cancelled):
            result(cancelled)
        assert [answer_of(result(other)) for other in others] == ["a@2", "b@2"]
        assert batch_counts(model)["batched_requests"] == 2


class ExpiresInTheQueue(LeavesInTheQueue):
    """Its deadline passes before its batch starts."""

    __slots__ = ()

    @property
    def expired(self) -> bool:
        return self.looks > 1


def test_expired_member_gets_deadline_exceeded(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 2) as model, threads(2) as pool:
        late = pool.submit(model.infer, {}, ExpiresInTheQueue())
        other = pool.submit(model.infer, {}, GrpsCall(GrpsMessage(str_data="a")))
        with pytest.raises(DeadlineExceeded, match="waited for its batch"):
            result(late)
        assert answer_of(result(other)) == "a@1"


def test_nothing_runs_when_all_callers_left(tmp_path: Path) -> None:
    code = SIZES.replace("assert all", "ran.append(inps)\n        assert all")
    with dag_of_one_model(tmp_path, f"ran = []\n{code}", 2) as model, threads(2) as pool:
        for future in [pool.submit(model.infer, {}, LeavesInTheQueue()) for _ in range(2)]:
            with pytest.raises(Cancelled):
                result(future)
        assert own_module().ran == []
        assert answers_in(texts_of(model, "a", "b")) == ["a@2", "b@2"]


def test_several_batches_run_at_the_same_time(tmp_path: Path) -> None:
    code = """
both = threading.Barrier(2)


class Meets(Base):
    def infer(self, inp, context):
        raise AssertionError

    def batch_infer(self, inps, contexts):
        both.wait(30)
        return inps


inferer_register.register("inferer", Meets())
"""
    with dag_of_one_model(tmp_path, code, 2) as model:
        assert answers_in(texts_of(model, *"abcd")) == list("abcd")


def test_batches_are_no_larger_than_the_pool(tmp_path: Path) -> None:
    with dag_of_one_model(tmp_path, SIZES, 100, timeout_us=1000, max_concurrency=2) as model:
        outcomes = answers_in(texts_of(model, *"abcdef"))
        assert {int(outcome.partition("@")[2]) for outcome in outcomes} <= {1, 2}
