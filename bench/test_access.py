"""The bench of access, in small: under changes, and beside strangers, no call is lost."""

from contextlib import ExitStack
from pathlib import Path

from bench import access, changes, strangers
from bench.rounds import Plan


async def test_changes_lose_no_call() -> None:
    changed = await changes.measure(3, None)
    assert changed.failed == []
    assert changed.answered > 3 * changes.CHANNELS
    assert (changed.changes, changed.closed_streams) == (3, 3)
    assert len(list(changes.lines(changed))) == 4


async def test_strangers_come_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        here = access.Servers(tmp_path, None, stack)
        _, port = here.start("--access", str(here.access))
        measured = await access.strange(port, Plan(1, 0.5), frozenset())
    assert measured.refused >= 2 * strangers.STRANGERS
    assert (len(measured.undisturbed), len(measured.disturbed)) == (1, 1)
    assert len(list(access.strange_lines(measured))) == 2
