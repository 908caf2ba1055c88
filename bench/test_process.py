"""The bench of processes runs, and counts what it says."""

from bench import losing, process
from bench.measure import Round
from bench.process import KINDS, ONE_PROCESS, Kind
from bench.rounds import Measured, Plan

PLAN = Plan(rounds=1, seconds=0.05)


def test_busy() -> None:
    measured = process.busy(PLAN, in_flight=2, steps=100)
    assert [measurement.setting for measurement in measured] == list(KINDS)
    assert all(measurement.rounds[0].rate > 0 for measurement in measured)
    assert "goal 1.7" in "\n".join(process.busy_lines(measured))


def test_hand_over() -> None:
    by_size = [(size, process.hand_over(PLAN, size)) for size in (64, 2**20)]
    assert all(
        0 < measurement.rounds[0].p50 <= measurement.rounds[0].p99
        for _, measured in by_size
        for measurement in measured
    )
    assert "1,048,576 bytes in and out" in "\n".join(process.hand_over_lines(by_size))


async def test_losing() -> None:
    losses = {name: await losing.lose(way, 1) for name, way in losing.WAYS.items()}
    assert all(0 < loss.failed_after < loss.replaced for found in losses.values() for loss in found)
    table = "\n".join(losing.lines(losses))
    assert "killed" in table
    assert "at the latest, goal 1" in table


def test_lines_of_known_rounds() -> None:
    def measured(kind: Kind, rate: float, p50: float) -> Measured[Kind]:
        return Measured(kind, [Round(rate, p50, 2 * p50)] * 3)

    all_kinds = [measured(kind, 100.0 * (1 + kind.instances), 0.01) for kind in KINDS]
    assert list(process.busy_lines(all_kinds))[-1] == "2 processes / 1 process: 1.50, goal 1.7"
    pair = [measured(Kind("thread", 1), 1.0, 100e-6), measured(ONE_PROCESS, 1.0, 350e-6)]
    assert (
        list(process.hand_over_lines([(4, pair)]))[-1] == "4 bytes in and out: 250 µs more than a thread, goal 300"
    )
    assert [str(kind) for kind in KINDS] == ["1 process", "2 processes", "1 thread", "2 threads"]
