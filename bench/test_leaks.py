"""The bench of memory: that it asks and counts, and tells what grows from what does not."""

import pickle

import pytest

from bench import leaks
from bench.leaks import CONTROL, SHAPES, SLICES, Growth, line, measure

FEW = 4 * SLICES


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_each_shape_is_asked(shape: leaks.Shape) -> None:
    growth = measure(shape, "h2", FEW)
    assert growth.slice_calls == 4
    assert len(growth.resident) == SLICES
    assert min(growth.resident) > 2**20
    assert 0 < growth.meant <= FEW


def test_lines_of_known_sizes() -> None:
    first, level = [50 * 2**20] * 4, 60 * 2**20
    flat = Growth(SHAPES[0], 1000, [*first, *[level] * 12], 16_000)
    assert (round(flat.slope), flat.right) == (0, True)
    steep = Growth(SHAPES[0], 1000, [*first, *[level + at * 2_000_000 for at in range(12)]], 16_000)
    assert (round(steep.slope), steep.right) == (2000, False)
    assert line(steep).endswith("50.0 → 81.0 MiB, WRONG")
    seen = [level + at * 4_200_000 for at in range(SLICES)]
    assert Growth(CONTROL, 1000, seen, 16_000).right
    assert not Growth(CONTROL, 1000, [level] * SLICES, 16_000).right
    assert pickle.loads(pickle.dumps(Growth(CONTROL, 1000, seen, 16_000))).right, "as it comes from a process"


def test_calls_that_ended_otherwise_show_nothing() -> None:
    few = Growth(SHAPES[0], 1000, [60 * 2**20] * SLICES, 10_000)
    assert not few.right
    assert "10000 of 16000 calls" in line(few)
