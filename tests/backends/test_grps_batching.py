"""Dynamic batching inside a DAG, call by call: who is in a batch, and what is logged, counted and released."""

from __future__ import annotations

import gc
import logging
import time
from concurrent.futures import Future
from math import inf
from pathlib import Path
from typing import Any

import pytest

from tests.backends.grps_batches import NEVER, ODD, SIZES, in_dag
from tests.backends.grps_folders import (
    PATIENCE,
    GrpsCall,
    answer_of,
    batched,
    entry,
    opened,
    own_module,
    result,
    threads,
)
from triglot.backends.grps import batching
from triglot.backends.grps.logs import USER_LOGGER
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


def dag_of_one_model(folder: Path, code: str, size: int, timeout_us: int = NEVER, **server: Any) -> Any:
    return opened(in_dag(folder, code, entry(batching=batched(size, timeout_us)), **server))


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
    assert [call.batch_size for call in members] == [3] * 3


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


def test_requests_wait_for_a_slot_of_the_pool(tmp_path: Path) -> None:
    """More threads call than the pool has slots, and no call has a deadline."""
    with dag_of_one_model(tmp_path, SIZES, 100, max_concurrency=2) as model:
        assert answers_in(texts_of(model, *"abcd")) == [f"{text}@2" for text in "abcd"]


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


def test_each_member_raises_an_exception_of_its_own(tmp_path: Path) -> None:
    """For each goes through one thread only."""
    with dag_of_one_model(tmp_path, ODD, 2) as model:
        (_, first), (_, second) = texts_of(model, "raise", "a")
        assert first[0] == second[0] == "ValueError: boom"
        assert first[1] is not second[1]


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
