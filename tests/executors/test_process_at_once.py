"""`async def` models in processes: many calls at once; and what every process does before its first call."""

from __future__ import annotations

import asyncio
import threading
from ast import literal_eval
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_stream
from tests.executors.reporting_models import ON_LOOP, PLAIN, SECONDS, STREAM_ON_LOOP, code, reporting
from tests.waiting import until
from triglot import Call, ModelLoadError, ServingError, Unavailable
from triglot.core.call import ModelCall, ModelTask
from triglot.core.errors import Code, QueueFull
from triglot.executors.remote.channel import Channel
from triglot.executors.remote.frames import Kind
from triglot.executors.remote.remote_model import RemoteModel
from triglot.repository.manager.warm_up import warm_up

# --- many calls of `async def` code ---


async def test_async_code_runs_many_calls_at_once(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        arrives = "(folder / f'in-{int(inputs[\"n\"])}').touch()\n"
        waits = "while len(list(folder.glob('in-*'))) < 50: await asyncio.sleep(0.005)\nreturn os.getpid()"
        pids = await asyncio.gather(*(served.ask(arrives + waits, n=number) for number in range(50)))
        assert len(set(pids)) == 1


async def test_concurrent_streams_are_not_held_up_by_a_slow_reader(tmp_path: Path) -> None:
    async with reporting(tmp_path, STREAM_ON_LOOP) as served:
        slow = direct_stream(served.servable, code("np.zeros(50_000)[0]", count=1000), Call())
        assert int((await anext(slow))["number"]) == 0
        others = [direct_stream(served.servable, code("1", count=20), Call()) for _ in range(20)]
        firsts = await asyncio.gather(*(anext(other) for other in others))
        assert {int(answer["number"]) for answer in firsts} == {0}

        async def rest(answers: AsyncIterator[Any]) -> list[int]:
            return [int(answer["number"]) async for answer in answers]

        async with asyncio.timeout(SECONDS):
            assert await asyncio.gather(*map(rest, others)) == [list(range(1, 20))] * 20
            assert await rest(slow) == list(range(1, 1000))


async def test_calls_go_to_the_process_that_has_the_fewest(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP, more="\nReporting.instances = 3\n") as served:
        arrives = "(folder / f'in-{int(inputs[\"n\"])}').touch()\n"
        waits = "while len(list(folder.glob('in-*'))) < 9: await asyncio.sleep(0.005)\nreturn os.getpid()"
        pids = await asyncio.gather(*(served.ask(arrives + waits, n=number) for number in range(9)))
        assert sorted(pids.count(pid) for pid in set(pids)) == [3, 3, 3]


async def test_a_call_that_ends_its_process_before_the_server_knows_it_as_sent_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Channel.send

    def returns_when_all_is_over(self: Channel, kind: Kind, **more: Any) -> None:
        # Some that read may be over by the time that this is sent.
        readers = [thread for thread in threading.enumerate() if thread.name == "reporting reads"]
        send(self, kind, **more)
        if kind is Kind.CALL:
            readers[0].join()

    async with reporting(tmp_path, ON_LOOP, more="\nReporting.instances = 2\n") as served:
        monkeypatch.setattr(Channel, "send", returns_when_all_is_over)
        with pytest.raises(Unavailable, match="the process that ran the request exited with status 7"):
            await served.run("os._exit(7)")
        assert served.readings()["processes_lost ended"] == 1


async def test_all_calls_end_with_their_process(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        waits = "(folder / f'in-{int(inputs[\"n\"])}').touch()\nawait asyncio.sleep(600)"
        running = [asyncio.ensure_future(served.ask(waits, n=number)) for number in range(5)]
        await served.entered("in", 5)
        with pytest.raises(Unavailable, match=r"exited with status 7|ended on node"):
            await served.run("os._exit(7)")
        for call in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(call, Unavailable)
        assert await served.ask("return 'next'") == "next"
        wanted = {
            "processes": 1,
            "processes_wanted": 1,
            "processes_lost ended": 1,
            "processes_lost hung": 0,
        }
        assert served.readings().items() >= wanted.items()


async def test_a_call_that_leaves_leaves_the_others(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        text = (
            "(folder / f'in-{int(inputs[\"n\"])}').touch()\n"
            "while not (folder / 'go').exists(): await asyncio.sleep(0.005)\n"
            "return 'went'"
        )
        running = [asyncio.ensure_future(served.ask(text, n=number)) for number in range(3)]
        await served.entered("in", 3)
        running[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await running[1]
        await served.entered("ended")
        (tmp_path / "go").touch()
        assert [await running[0], await running[2]] == ["went", "went"]


async def test_a_call_ends_at_its_deadline_wherever_it_is(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        call = Call()
        call.limit(2.0, "the test")
        with pytest.raises(ServingError) as caught:
            await served.ask("await asyncio.sleep(600)", call)
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        await served.entered("ended")
        assert await served.ask("return 'next'") == "next"


async def test_abandoned_calls_are_counted(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP, more="\n    max_queue_size = 3\n") as served:
        while served.model.orphaned < 3:  # One that is too late before it is sent goes on nowhere.
            call = Call()
            call.limit(0.05, "the test")
            with pytest.raises(ServingError) as caught:
                await served.ask("while not (folder / 'go').exists(): time.sleep(0.005)", call)
            assert caught.value.code is Code.DEADLINE_EXCEEDED
        with (
            served.servable,
            pytest.raises(QueueFull, match="3 requests are running, the most that max_queue_size allows"),
        ):
            await served.ask("return 'next'")
        (tmp_path / "go").touch()
        await until(lambda: served.model.orphaned == 0)
        assert await served.ask("return 'next'") == "next"


async def test_async_code_that_blocks_holds_no_caller_beyond_its_deadline(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        call = Call()
        call.limit(2.0, "the test")
        text = "while not (folder / 'go').exists(): time.sleep(0.005)\nreturn 'went'"
        with pytest.raises(ServingError) as caught:
            await served.ask(text, call)
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        (tmp_path / "go").touch()
        assert await served.ask("return 'next'") == "next"
        assert served.readings() == {
            "processes": 1,
            "processes_wanted": 1,
            "processes_lost ended": 0,
            "processes_lost hung": 0,
        }


class Other:
    """Another model: answers when the test says so; its stream reports when it is closed.

    A queued answer leaves a file in `folder`, "answer" or "stream".
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        self.together = asyncio.Event()
        self.closed = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.asked: list[ModelCall | ModelTask] = []
        self.count = count

    def __call__(self, call: Call, asked: ModelCall | ModelTask) -> Any:
        self.asked.append(asked)
        if len(self.asked) == self.count:
            self.together.set()
        if isinstance(asked, ModelCall) and asked.stream:
            return self.stream()
        return self.answer()

    async def answer(self) -> Any:
        try:
            (self.folder / "answer").touch()
            await self.together.wait()
            return {"y": np.array(len(self.asked))}
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def stream(self) -> AsyncIterator[Any]:
        try:
            yield {"y": np.array(0)}
            (self.folder / "stream").touch()
            await asyncio.Event().wait()
        finally:
            self.closed.set()


async def test_one_call_asks_several_models_at_once(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        call, other = Call(), Other(5, tmp_path)
        call.reach = other
        asks = "answers = await asyncio.gather(*(call.infer('other', {'x': np.zeros(9_000)}) for _ in range(5)))\n"
        assert (
            await served.ask(f"{asks}return [int(answer['y']) for answer in answers]", call) == "[5, 5, 5, 5, 5]"
        )


async def test_what_async_code_does_not_wait_for_is_cancelled(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        call, other = Call(), Other(100, tmp_path)
        call.reach = other
        text = """
async def leave(asked, where):
    task = asyncio.ensure_future(asked)
    while not (folder / where).exists():
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])
await leave(call.infer('other', {}), 'answer')
answers = call.infer_stream('other', {})
first = await anext(answers)
await leave(anext(answers), 'stream')
return int(first['y'])"""
        assert await served.ask(text, call) == "0"
        async with asyncio.timeout(SECONDS):
            await other.cancelled.wait()
            await other.closed.wait()


async def test_a_question_that_is_taken_back_at_once_is_forgotten(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        call, other = Call(), Other(100, tmp_path)
        call.reach = other
        text = """
task = asyncio.ensure_future(call.infer('other', {}))
await asyncio.sleep(0)
task.cancel()
await asyncio.wait([task])
return task.cancelled()"""
        assert await served.ask(text, call) == "True"
        (process,) = served.model._pool.ready()
        await until(lambda: not process.calls._questions)
        assert await served.ask("return 'next'") == "next"


async def test_a_thread_that_waits_for_another_model_is_refused_when_its_call_ends(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        call, other = Call(), Other(100, tmp_path)
        call.reach = other
        text = """
def ask(call, folder):
    try:
        call.infer('other', {})
    except triglot.ServingError:
        (folder / 'refused').touch()
threading.Thread(target=ask, args=(call, folder)).start()
while not (folder / 'answer').exists():
    time.sleep(0.005)"""
        await served.run(text, call)
        await served.entered("refused")


async def test_threads_of_async_code_reach_others_too(tmp_path: Path) -> None:
    async with reporting(tmp_path, ON_LOOP) as served:
        call, other = Call(), Other(3, tmp_path)
        call.reach = other
        text = """
def ask():
    return int(call.infer('other', {})['y']), int(next(call.infer_stream('other', {}))['y'])
return await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(3)))"""
        answers = literal_eval(await served.ask(text, call))
        # The streams of those that are answered first may be open by then.
        assert all(count >= 3 and first == 0 for count, first in answers)
        assert len(answers) == 3
        await until(other.closed.is_set)


async def test_threads_of_plain_code_ask_at_the_same_time(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        call, other = Call(), Other(3, tmp_path)
        call.reach = other
        text = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(3) as threads:
    asked = [threads.submit(call.infer, "other", {}) for _ in range(3)]
    answer = [int(one.result()["y"]) for one in asked]"""
        assert await served.ask(text, call) == "[3, 3, 3]"


@pytest.mark.parametrize("kind", [ON_LOOP, PLAIN], ids=["on the loop", "plain"])
async def test_a_warm_up_reaches_every_process(tmp_path: Path, kind: str) -> None:
    more = """
Reporting.instances = 3
Reporting.any_tensors = False
Reporting.inputs = [triglot.TensorSpec("code", "BYTES", [1])]
Reporting.outputs = [triglot.TensorSpec("said", "BYTES", [1])]
Reporting.example = {"code": np.array([b"(folder / f'warm-{os.getpid()}').touch()"], object)}
Reporting.answer = lambda self, value: {"said": np.array([str(value)])}
"""
    async with reporting(tmp_path, kind, more=more) as served:
        await warm_up(served.servable)
        assert len(served.files("warm")) == 3
        with pytest.raises(Unavailable):
            await served.run("os._exit(0)", code=np.array([b"os._exit(0)"], object))
        await until(lambda: served.readings()["processes"] == 3)
        assert len(served.files("warm")) == 4


# --- instances that are started ---

STARTS = """
def start_instance(self, call):
    {does}
    (self.folder / f"started-{{os.getpid()}}-{{call.model_name}}").touch()
Reporting.start_instance = start_instance
"""


def start(model: RemoteModel, reach: Callable[[Call, Any], Any]) -> None:
    call = Call()
    call.reach, call.model_name, call.model_version = reach, "reporting", 1
    model.start_instance(call)


@pytest.mark.parametrize("infer", [PLAIN, ON_LOOP])
async def test_every_process_is_started_and_so_is_who_takes_its_place(tmp_path: Path, infer: str) -> None:
    async def reach(_: Call, asked: ModelCall | ModelTask) -> Any:
        return True if isinstance(asked, ModelTask) else {"y": np.array(3)}

    does = (
        "self.own = call.detached()\n"
        "    assert int(call.infer('other', {})['y']) == int(self.own.infer('other', {})['y']) == 3\n"
        "    assert call.reach(call, triglot.core.call.ModelTask('ready', 'other')) is True"
    )
    more = "\nReporting.instances = 2\n" + STARTS.format(does=does)
    async with reporting(tmp_path, infer, more=more) as served:
        await asyncio.to_thread(start, served.model, reach)
        assert [name.rpartition("-")[2] for name in served.files("started")] == ["reporting", "reporting"]
        with pytest.raises(Unavailable):
            await served.run("os._exit(0)")
        await until(lambda: served.readings()["processes"] == 2)
        assert len(served.files("started")) == 3


async def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    for infer in (PLAIN, ON_LOOP):
        folder = tmp_path / str(infer == PLAIN)
        async with reporting(folder, infer, more=STARTS.format(does="raise KeyError('no weights')")) as served:
            with pytest.raises(ModelLoadError, match=r"model\.py: KeyError: 'no weights'"):
                await asyncio.to_thread(start, served.model, lambda *_: None)
