"""Requests that wait at the same time are executed together, on real threads. No test sleeps to win a race."""

from __future__ import annotations

import asyncio
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.scheduling.batched_models import FOREVER, Batched, Inputs, Site, call, first_values, rows
from tests.scheduling.scripted_models import idle
from tests.waiting import until
from triglot import Call, InvalidArgument
from triglot.core.errors import Internal, Unavailable
from triglot.model.scheduling import DynamicBatching, QueuePolicy


async def test_what_waits_while_the_instance_is_busy_is_executed_together() -> None:
    model = Batched(open_gate=False)
    site = Site(model)
    calls = [Call() for _ in range(4)]
    tasks = [site.ask(rows(0), calls[0])]
    await model.until_at("infer")
    tasks += [site.ask(rows(*values), own) for values, own in zip([[1], [2, 3], [4]], calls[1:], strict=True)]
    await site.until(3)
    model.open_point("infer")
    answers = await asyncio.gather(*tasks)
    assert model.batches == [[0], [1, 2, 3, 4]]
    assert [first_values(answer) for answer in answers] == [[0], [2], [4, 6], [8]]
    assert [own.batch_size for own in calls] == [1, 3, 3, 3]
    assert all(own.queue_seconds > 0 and own.compute_seconds > 0 for own in calls)
    assert site.closed() == {"no_delay": 2}
    assert (site.reading("batched_requests"), site.reading("batched_rows")) == (4, 5)
    await site.servable.close()


async def test_a_batch_is_no_larger_than_it_may_be() -> None:
    model = Batched(open_gate=False, max_batch_size=4)
    site = Site(model)
    tasks = [await site.busy(model), *await site.ask_and_wait(rows(1, 2), rows(3), rows(4, 5), rows(6, 7))]
    model.open_point("infer")
    await asyncio.gather(*tasks)
    assert model.batches == [[0], [1, 2, 3], [4, 5, 6, 7]]
    assert site.closed() == {"no_delay": 1, "full": 2}
    await site.servable.close()


async def test_idle_instance_waits_for_the_queue_delay() -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER, preferred_sizes=[3]))
    site = Site(model)
    tasks = []
    for value in range(6):
        tasks.append(site.ask(rows(value)))
        await site.until((value + 1) % 3)
    await asyncio.gather(*tasks)
    assert model.batches == [[0, 1, 2], [3, 4, 5]]
    assert site.closed() == {"preferred": 2}
    await site.servable.close()


async def test_after_the_delay_a_batch_is_run_as_it_is() -> None:
    model = Batched(DynamicBatching(max_queue_delay=0.01))
    site = Site(model)
    await site.ask(rows(1))
    assert site.closed() == {"delay": 1}
    await site.servable.close()


async def test_a_request_with_another_shape_leaves_the_others_together() -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER, preferred_sizes=[2]))
    site = Site(model)
    tasks = [site.ask(rows(1)), site.ask(rows(3, width=2)), site.ask(rows(2))]
    await asyncio.wait([tasks[0], tasks[2]])
    assert model.batches == [[1, 2]]
    await site.servable.close()
    assert [first_values(await task) for task in tasks] == [[2], [6], [4]]
    assert site.closed() == {"preferred": 1, "drained": 1}


async def test_a_request_with_another_shape_closes_the_batch_that_waits() -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER))
    site = Site(model)
    tasks = [site.ask(rows(1)), site.ask(rows(2))]
    await site.until(2)
    tasks.append(site.ask(rows(3, width=2)))
    await asyncio.wait(tasks[:2])
    assert model.batches == [[1, 2]]
    assert site.closed() == {"full": 1}
    assert not tasks[2].done()  # It waits for company of its own.
    await site.servable.close()
    await tasks[2]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ((rows(1), {}), (rows(2, width=2), {})),
        ((rows(1), {}), (rows(2, dtype="f8"), {})),
        ((rows(1), {"seed": 1}), (rows(2), {"seed": 2})),
        ((rows(1), {"seed": 1}), (rows(2), {"seed": True})),
        ((rows(1), {"seed": 1}), (rows(2), {})),
    ],
)
async def test_what_is_unlike_is_not_joined(first: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    model = Batched(open_gate=False)
    site = Site(model)
    tasks = [await site.busy(model)]
    tasks += [site.ask(inputs, call(**parameters)) for inputs, parameters in (first, other)]
    await site.until(2)
    model.open_point("infer")
    await asyncio.gather(*tasks)
    assert model.batches == [[0], [1], [2]]
    await site.servable.close()


async def test_requests_for_the_same_outputs_are_joined() -> None:
    """A model that takes the call may compute only these: another member's output must not fail them."""
    model = Batched(open_gate=False)
    site = Site(model)
    tasks = [await site.busy(model)]
    for at, outputs in enumerate([["y"], [], ["y"], [], ["y", "z"], ["z", "y"]]):
        own = call()
        own.requested_outputs = outputs
        tasks.append(site.ask(rows(at + 1), own))
    await site.until(6)
    model.open_point("infer")
    await asyncio.gather(*tasks)
    assert sorted(model.batches) == [[0], [1, 3], [2, 4], [5, 6]]
    assert [sorted(call.requested_outputs) for call in model.calls if len(call.members) == 2] == [
        ["y"],
        [],
        ["y", "z"],
    ]
    await site.servable.close()


@pytest.mark.parametrize("own", [{}, {"top": 5}], ids=["none of its own", "one of its own"])
async def test_protocol_parameters_do_not_split_batches(own: dict[str, Any]) -> None:
    model = Batched(open_gate=False)
    site = Site(model)
    tasks = [await site.busy(model)]
    protocols: list[dict[str, Any]] = [{"priority": 1, "timeout": 7, "binary_data_output": True}, {}]
    tasks += [site.ask(rows(at + 1), call(**own, **more)) for at, more in enumerate(protocols)]
    await site.until(2)
    model.open_point("infer")
    await asyncio.gather(*tasks)
    assert model.batches == [[0], [1, 2]]
    await site.servable.close()


async def test_requests_of_two_signatures_are_not_joined() -> None:
    model = Batched(open_gate=False)
    site = Site(model)
    calls = [Call(), Call()]
    calls[1].signature_name = "other"
    tasks = [await site.busy(model), *(site.ask(rows(1), own) for own in calls)]
    await site.until(2)
    model.open_point("infer")
    await asyncio.gather(*tasks)
    assert [len(batch) for batch in model.batches] == [1, 1, 1]
    assert {own.signature_name for own in model.calls} == {"", "other"}
    await site.servable.close()


async def test_single_request_is_passed_on_unchanged() -> None:
    model = Batched(answer=lambda inputs: {"y": inputs["x"]})
    site = Site(model)
    inputs = rows(1, 2)
    own = Call()
    answer = await site.ask(inputs, own)
    assert model.seen[0] is inputs["x"]
    assert np.shares_memory(answer["y"], inputs["x"])
    assert model.calls == [own]
    await site.servable.close()


async def test_a_model_may_keep_and_return_what_it_was_given() -> None:
    """The joined inputs' memory is used again only when neither the model nor an answer has a part of it."""
    model = Batched(open_gate=False, answer=lambda inputs: {"y": inputs["x"]})
    site = Site(model)
    answers = []
    for start in range(0, 60, 3):
        model.close_point("infer")
        busy = await site.busy(model)
        tasks = await site.ask_and_wait(*[rows(start + at, start + at, width=50) for at in range(3)])
        model.open_point("infer")
        answers += await asyncio.gather(*tasks)
        await busy
        assert not model.seen[-1].flags.writeable
    assert [first_values(answer) for answer in answers] == [[at, at] for at in range(60)]
    assert [array[:, 0].tolist() for array in model.seen] == model.batches
    await site.servable.close()


async def test_memory_is_used_again() -> None:
    model = Batched(open_gate=False)
    site = Site(model)
    places = []
    for _ in range(5):
        model.close_point("infer")
        busy = await site.busy(model)
        tasks = await site.ask_and_wait(rows(1, width=500), rows(2, width=500))
        model.open_point("infer")
        await asyncio.gather(busy, *tasks)
        places.append(model.seen[-1].__array_interface__["data"][0])
        model.seen.clear()
    assert len(set(places)) == 1
    await site.servable.close()


# --- instances ---


async def test_answers_leave_in_the_order_in_which_the_requests_came() -> None:
    gates = {1.0: threading.Event(), 2.0: threading.Event()}

    def answer(inputs: Inputs) -> Any:
        assert gates[float(inputs["x"][0, 0])].wait(30)
        if inputs["x"][0, 0] == 2:
            raise InvalidArgument("two")
        return {"y": inputs["x"]}

    model = Batched(DynamicBatching(preserve_ordering=True), instances=2, max_batch_size=1, answer=answer)
    site = Site(model)
    left: list[int] = []
    tasks = []

    def note(value: int, _: object) -> None:
        left.append(value)

    for value in (1, 2):
        tasks.append(site.ask(rows(value)))
        tasks[-1].add_done_callback(partial(note, value))
        await model.until_at("infer")
    cancelled = site.ask(rows(1))
    await site.until(1)
    cancelled.cancel()
    gates[2.0].set()
    # The second instance has ended with 2 when it runs the next request.
    third = site.ask(rows(1))
    await model.until_at("infer")
    assert left == []
    gates[1.0].set()
    results = await asyncio.gather(*tasks, third, return_exceptions=True)
    assert left == [1, 2]
    assert isinstance(results[1], InvalidArgument)
    await site.servable.close()


async def test_nothing_is_kept_of_a_request_cancelled_in_the_queue() -> None:
    model = Batched(DynamicBatching(preserve_ordering=True), open_gate=False)
    site = Site(model)
    first = await site.busy(model)
    inputs = [rows(at) for at in range(5)]
    arrays = [weakref.ref(tensor["x"]) for tensor in inputs]
    abandoned = await site.ask_and_wait(*inputs)
    for task in abandoned:
        task.cancel()
    await asyncio.wait(abandoned)
    del inputs, abandoned, task
    await until(lambda: not any(array() is not None for array in arrays))
    model.open_point("infer")
    await first
    await site.servable.close()


async def test_instances_are_started_for_waiting_batches() -> None:
    model = Batched(open_gate=False, instances=3, max_batch_size=2)
    site = Site(model)
    await until(lambda: idle(site.servable) == 1)
    tasks = []
    for running in range(1, 4):
        tasks.append(site.ask(rows(running, running)))
        await model.until_at("infer")
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("batched/1#")]
        assert len(names) == running
    tasks += await site.ask_and_wait(rows(4), rows(5))
    model.open_point("infer")
    await asyncio.gather(*tasks)
    assert model.batches[3:] == [[4, 5]]
    await site.servable.close()


async def test_one_instance_forms_and_the_others_leave_it_its_requests() -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER), instances=3, max_batch_size=4)
    site = Site(model)
    await asyncio.gather(*[site.ask(rows(1, 1, 1, 1)) for _ in range(6)])
    tasks = []
    for value in range(8):
        tasks.append(site.ask(rows(value)))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert [len(batch) for batch in model.batches] == [4] * 8
    await site.servable.close()


@pytest.mark.parametrize("instances", [1, 4])
async def test_many_requests_on_many_threads_each_get_their_own_rows(instances: int) -> None:
    model = Batched(
        DynamicBatching(max_queue_delay=0.0005, preferred_sizes=[5, 8]),
        instances=instances,
        answer=lambda inputs: {"y": inputs["x"]},
    )
    site = Site(model, max_queue_size=5000)

    async def ask(value: int) -> None:
        inputs = rows(*range(value, value + 1 + value % 3), width=1 + value % 2)
        answer = await site.ask(inputs)
        np.testing.assert_array_equal(answer["y"], inputs["x"])

    await asyncio.gather(*[ask(value) for value in range(2000)])
    assert site.reading("batched_requests") == 2000
    assert sum(map(len, model.batches)) == site.reading("batched_rows")
    await site.servable.close()


async def test_closing_runs_what_waits_and_ends_the_threads() -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER), instances=2)
    site = Site(model)
    tasks = await site.ask_and_wait(rows(1), rows(2))
    await site.servable.close()
    assert [first_values(answer) for answer in await asyncio.gather(*tasks)] == [[2], [4]]
    assert site.closed() == {"drained": 1}
    assert not site.servable.alive
    with pytest.raises(Unavailable, match="unloaded"):
        await site.ask(rows(3))


async def test_a_warm_up_runs_on_every_instance() -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER, policy=QueuePolicy(max_queue_size=1)), instances=3)
    site = Site(model, max_queue_size=1)
    threads: set[int] = set()

    def around(function: Any, inputs: Inputs, own: Call) -> None:
        threads.add(threading.get_ident())
        function(inputs, own)

    for _ in range(3):
        await site.servable.on_every_instance(rows(1, 2), around, lambda error: Internal(str(error)))
    assert len(threads) == 3
    assert model.batches == [[1, 2]] * 9
    await site.servable.close()


async def test_a_lone_request_gets_as_many_rows_as_it_has() -> None:
    site = Site(Batched(answer=lambda inputs: {"y": inputs["x"][:1]}))
    with pytest.raises(Internal, match="for a batch of 2 rows, expected 2 as its first dim"):
        await site.ask(rows(1, 2))
    await site.servable.close()
