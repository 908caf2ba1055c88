"""The adaptive batcher against every fixed setting, in simulated time."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import numpy as np
import pytest
from batching_simulation import ClosedLoop, Fixed, Machine, OpenLoop, Outcome, Policy, Simulation, Turns
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from triglot import Call, DynamicBatching, Model, TensorSpec
from triglot.engine.adaptive import BatchCost, DelayTuner
from triglot.engine.servable import Servable

Load = ClosedLoop | OpenLoop | Turns

RELAXED = 0.05
"""An objective that nothing here comes near."""
MACHINE = Machine()
NOISY = Machine(noise=0.15)
JITTER = ClosedLoop(64, pause_chance=0.1, pause=0.01)
"""Some of the clients are away for a while."""
DOOR = ClosedLoop(64, door=0.0002)
"""The clients are held up elsewhere."""


def run(load: Load, policy: Policy, machine: Machine, seconds: float) -> Outcome:
    simulation = Simulation(machine, policy)
    load.start(simulation)
    return simulation.run(seconds)


@cache
def fixed_settings(clients: int) -> list[tuple[float, float]]:
    """The throughput and the p99 of each of a grid of fixed settings."""
    results = []
    for delay in (0.0, 0.001, 0.004, 0.008):
        for share in (0.5, 0.75, 0.9, 1.0) if delay else (1.0,):
            outcome = run(ClosedLoop(clients), Fixed(delay, round(share * clients)), MACHINE, 0.6)
            results.append((outcome.rate(0.2, 0.6), outcome.between(0.2, 0.6).p99))
    return results


def best(clients: int, p99: float = 1.0) -> float:
    """The highest throughput that a fixed setting has, of those that keep to this p99."""
    return max(rate for rate, its in fixed_settings(clients) if its <= p99)


def never_waiting(load: Load, machine: Machine, seconds: float) -> Outcome:
    """What comes of never waiting."""
    return run(load, Fixed(0.0, 1), machine, seconds)


@pytest.mark.parametrize("clients", [2, 8, 64, 256])
@pytest.mark.parametrize("machine", [MACHINE, NOISY], ids=["steady", "noisy"])
def test_finds_the_best_throughput(clients: int, machine: Machine) -> None:
    outcome = run(ClosedLoop(clients), DelayTuner(RELAXED, 256), machine, 5.0)
    assert outcome.rate(3.0, 5.0) >= 0.9 * best(clients)


@pytest.mark.parametrize(("clients", "objective"), [(64, 0.006), (64, 0.008), (256, 0.010), (256, 0.015)])
def test_keeps_the_objective(clients: int, objective: float) -> None:
    outcome = run(ClosedLoop(clients), DelayTuner(objective, 256), MACHINE, 6.0)
    assert outcome.between(4.0, 6.0).p99 <= objective
    assert outcome.rate(4.0, 6.0) >= 0.9 * best(clients, objective)


@pytest.mark.parametrize("objective", [0.001, 0.003])
def test_an_objective_that_cannot_be_kept_costs_no_throughput(objective: float) -> None:
    outcome = run(ClosedLoop(64), DelayTuner(objective, 256), MACHINE, 5.0)
    zero = never_waiting(ClosedLoop(64), MACHINE, 2.0)
    assert outcome.rate(3.0, 5.0) >= 0.97 * zero.rate(1.0, 2.0)


def test_a_lone_client_never_waits() -> None:
    outcome = run(ClosedLoop(1), DelayTuner(RELAXED, 256), MACHINE, 5.0)
    cost = MACHINE.fixed + MACHINE.per_row
    assert max(outcome.latencies) == pytest.approx(cost)


def test_a_lone_client_soon_does_not_wait_after_others_have_left() -> None:
    tuner = DelayTuner(RELAXED, 256)
    simulation = Simulation(MACHINE, tuner)
    ClosedLoop(64).start(simulation, 0.0, 3.0)
    simulation.run(3.0)
    assert tuner.delay > 0
    ClosedLoop(1).start(simulation, 3.1)
    alone = simulation.run(6.0).between(3.1, 6.0).latencies
    cost = MACHINE.fixed + MACHINE.per_row
    assert max(alone[16:]) == pytest.approx(cost)


def test_a_lone_client_soon_does_not_wait_whatever_rows_its_requests_have() -> None:
    tuner, waits = DelayTuner(RELAXED, 256), []
    for number in range(400):
        rows = 1 + number % 8
        tuner.observe(0.01 * number, rows, 0.002, [0.003], 0)
        waits.append(tuner.delay > 0)
    assert any(waits)
    assert not any(waits[200:])
    assert (tuner.size, tuner.most) == (1, 256)


@pytest.mark.parametrize("instances", [2, 4])
def test_shares_the_load_between_instances(instances: int) -> None:
    machine = Machine(instances=instances)
    outcome = run(ClosedLoop(64), DelayTuner(RELAXED, 256, instances), machine, 5.0)
    zero = never_waiting(ClosedLoop(64), machine, 1.0)
    assert outcome.rate(3.0, 5.0) >= 1.05 * zero.rate(0.2, 1.0)


@pytest.mark.parametrize("machine", [MACHINE, NOISY], ids=["steady", "noisy"])
@pytest.mark.parametrize(
    "load", [OpenLoop(100), OpenLoop(1000), OpenLoop(10_000), OpenLoop(20_000), DOOR], ids=str
)
def test_does_no_harm_where_waiting_is_of_no_use(load: Load, machine: Machine) -> None:
    start, end = (20.0, 40.0) if load == OpenLoop(100) else (3.0, 6.0)
    tuned = run(load, DelayTuner(RELAXED, 256), machine, end).between(start, end)
    zero = never_waiting(load, machine, end).between(start, end)
    assert tuned.mean <= 1.1 * zero.mean
    assert len(tuned.latencies) >= 0.97 * len(zero.latencies)


def test_learns_that_some_clients_come_late() -> None:
    outcome = run(JITTER, DelayTuner(RELAXED, 256), MACHINE, 5.0)
    zero = never_waiting(JITTER, MACHINE, 5.0)
    assert outcome.rate(3.0, 5.0) >= 1.1 * zero.rate(3.0, 5.0)


def test_follows_the_load() -> None:
    loads: list[Load] = [ClosedLoop(64), ClosedLoop(256), ClosedLoop(2), OpenLoop(1000), ClosedLoop(64)]
    simulation = Simulation(MACHINE, DelayTuner(RELAXED, 256))
    for number, load in enumerate(loads):
        begin, end = 4.0 * number, 4.0 * (number + 1)
        simulation.at(begin, lambda load=load, begin=begin, end=end: load.start(simulation, begin, end))  # type: ignore[misc]
    outcome = simulation.run(4.0 * len(loads))
    for number, load in enumerate(loads):
        begin, end = 4.0 * number + 2.0, 4.0 * (number + 1)
        if isinstance(load, ClosedLoop):
            assert outcome.rate(begin, end) >= 0.9 * best(load.clients), number
        else:
            zero = never_waiting(load, MACHINE, 2.0)
            assert outcome.between(begin, end).mean <= 1.1 * zero.mean


@cache
def best_together(clients: int, door: float) -> float:
    """The highest throughput of clients that come back together, who may be in parts."""
    load = Turns(clients, door)
    settings = [Fixed(0.0, 1), *[Fixed(0.01, clients // parts, clients // parts) for parts in (1, 2, 3)]]
    return max(run(load, setting, MACHINE, 1.0).rate(0.5, 1.0) for setting in settings)


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize(("clients", "door"), [(256, 2e-5), (256, 4e-5), (64, 5e-5)])
def test_clients_that_come_back_together_are_put_into_parts(clients: int, door: float, noise: float) -> None:
    machine, load = Machine(noise=noise), Turns(clients, door, noise=noise)
    outcome = run(load, DelayTuner(RELAXED, 256), machine, 6.0)
    zero = never_waiting(load, machine, 2.0)
    assert outcome.rate(4.0, 6.0) >= 0.9 * best_together(clients, door) > 1.1 * zero.rate(1.0, 2.0)


@pytest.mark.parametrize("clients", [8, 64, 256])
def test_clients_that_come_back_at_once_are_not_put_into_parts(clients: int) -> None:
    load = Turns(clients, 0.0)
    outcome = run(load, DelayTuner(RELAXED, 256), MACHINE, 5.0)
    assert outcome.rate(3.0, 5.0) >= 0.97 * never_waiting(load, MACHINE, 2.0).rate(1.0, 2.0)


def test_instances_share_clients_that_come_back_together() -> None:
    machine, load = Machine(instances=2), Turns(256, 2e-5)
    outcome = run(load, DelayTuner(RELAXED, 256, 2), machine, 6.0)
    assert outcome.rate(4.0, 6.0) >= 1.5 * never_waiting(load, machine, 2.0).rate(1.0, 2.0)


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_parts_are_given_up_with_another_load_and_found_again(noise: float) -> None:
    door, tuner = 2.7e-5, DelayTuner(RELAXED, 256)
    simulation = Simulation(Machine(noise=noise), tuner)
    for number, clients in enumerate((256, 8, 256)):
        load, begin, end = Turns(clients, door, noise=noise), 4.0 * number, 4.0 * (number + 1)
        simulation.at(begin, lambda load=load, begin=begin, end=end: load.start(simulation, begin, end))  # type: ignore[misc]
        outcome = simulation.run(end)
        assert outcome.rate(end - 2.0, end) >= 0.8 * best_together(clients, door), clients
        if clients == 8:
            assert outcome.rate(end - 3.5, end) >= 0.9 * best_together(8, door)
            assert (tuner.delay, tuner.most) == (0.0, 256)


class Watched(DelayTuner):
    """Counts the batches before which it waited."""

    waited: int = 0
    seen: int = 0

    def observe(self, *args: Any) -> None:
        """As the original."""
        self.seen += 1
        self.waited += self.delay > 0
        super().observe(*args)


def test_trials_become_few() -> None:
    tuner = Watched(RELAXED, 256)
    simulation = Simulation(MACHINE, tuner)
    OpenLoop(1000).start(simulation)
    simulation.run(10.0)
    waited, seen = tuner.waited, tuner.seen
    simulation.run(40.0)
    assert tuner.waited - waited <= 0.01 * (tuner.seen - seen)


def waiting_tuner(objective: float) -> DelayTuner:
    """One that has found out that it pays to wait."""
    tuner = DelayTuner(objective, 256)
    simulation = Simulation(MACHINE, tuner)
    ClosedLoop(64).start(simulation)
    end = 0.0
    while _reading(tuner, "adaptive_trials") < 1 or not tuner.delay:
        end += 0.05
        simulation.run(end)
        assert end < 5.0
    return tuner


def _reading(tuner: DelayTuner, name: str) -> float:
    return next(one.value for one in tuner.readings() if one.name == name)


def test_late_requests_end_the_waiting_at_once() -> None:
    tuner = waiting_tuner(0.008)
    for number in range(20):
        tuner.observe(100.0 + number, 64, 0.00328, [0.009] * 64, 0)
        if not tuner.delay:
            break
    assert number <= 3
    assert tuner.size == 1


def test_readings_say_what_was_chosen() -> None:
    tuner = DelayTuner(0.008, 256)
    said = ("adaptive_objective_seconds", "adaptive_most_rows")
    assert {one.value for one in tuner.readings() if one.name not in said} == {0.0, 1.0}
    assert _reading(tuner, "adaptive_most_rows") == 256
    outcome = run(ClosedLoop(64), tuner, MACHINE, 3.0)
    readings = {(one.name, *one.labels.values()): one.value for one in tuner.readings()}
    assert readings["adaptive_delay_seconds",] == tuner.delay > 0
    assert readings["adaptive_size_rows",] == tuner.size > 1
    assert readings["adaptive_objective_seconds",] == 0.008
    assert readings["adaptive_p99_seconds",] == pytest.approx(outcome.between(2.9, 3.0).p99, rel=0.1)
    assert readings["adaptive_rows_per_second",] == pytest.approx(outcome.rate(2.8, 3.0), rel=0.1)
    assert readings["adaptive_cost_seconds", "fixed"] == pytest.approx(MACHINE.fixed, rel=0.1)
    assert readings["adaptive_cost_seconds", "row"] == pytest.approx(MACHINE.per_row, rel=0.2)
    assert readings["adaptive_trials", "adopted"] >= 1
    assert readings["adaptive_back_offs",] == 0


class Doubles(Model):
    """What the batcher joins is doubled."""

    inputs = outputs = [TensorSpec("x", "FP32", [-1])]
    max_batch_size = 8
    dynamic_batching = DynamicBatching(max_queue_delay="auto", latency_objective=RELAXED)

    def infer(self, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {"x": inputs["x"] * 2}


async def test_a_model_asks_for_it() -> None:
    servable = Servable("doubles", 1, Doubles(), max_queue_size=100)

    async def client(value: int) -> None:
        for _ in range(100):
            answer = await servable.infer({"x": np.array([value], np.float32)}, Call())
            assert answer["x"].tolist() == [2 * value]

    with servable:
        await asyncio.gather(*[client(value) for value in range(5)])
        readings = {one.name: one.value for one in servable.readings()}
    await servable.close()
    assert readings["adaptive_objective_seconds"] == RELAXED
    assert readings["adaptive_p99_seconds"] > 0
    assert readings["adaptive_cost_seconds"] >= 0


def test_a_batch_without_requests_says_nothing() -> None:
    tuner = DelayTuner(RELAXED, 8)
    tuner.observe(1.0, 0, 0.0, [], 5)
    assert (tuner.delay, tuner.size) == (0.0, 1)


@given(
    fixed=st.floats(1e-5, 0.1),
    per_row=st.floats(1e-7, 0.01),
    sizes=st.lists(st.integers(1, 512), min_size=2, max_size=50).filter(lambda sizes: max(sizes) > 2 * min(sizes)),
)
def test_the_cost_of_a_batch_is_fitted(fixed: float, per_row: float, sizes: list[int]) -> None:
    cost = BatchCost()
    for size in sizes:
        cost.add(size, fixed + per_row * size)
    assert cost.fixed == pytest.approx(fixed, rel=1e-3, abs=1e-6)
    assert cost.per_row == pytest.approx(per_row, rel=1e-3, abs=1e-8)


@given(
    batches=st.lists(
        st.tuples(
            st.integers(1, 300),
            st.floats(0.0, 1.0),
            st.lists(st.floats(0.0, 2.0), max_size=20),
            st.integers(0, 500),
        ),
        max_size=300,
    ),
    objective=st.floats(1e-3, 1.0),
    max_batch_size=st.integers(1, 64),
)
def test_whatever_comes_the_choice_is_within_bounds(
    batches: list[tuple[int, float, list[float], int]], objective: float, max_batch_size: int
) -> None:
    tuner = DelayTuner(objective, max_batch_size)
    now = 0.0
    for rows, seconds, latencies, waiting in batches:
        now += seconds
        tuner.observe(now, rows, seconds, latencies, waiting)
        assert 0 <= tuner.delay <= objective
        assert 1 <= tuner.size <= tuner.most <= max_batch_size
