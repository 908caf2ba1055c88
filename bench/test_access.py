"""Tokens and certificates are changed under load, as the bench does it, and nobody's call is lost."""

from bench import changes


async def test_changes_lose_no_call() -> None:
    changed = await changes.measure(3, None)
    assert changed.failed == []
    assert changed.answered > 3 * changes.CHANNELS
    assert (changed.changes, changed.streams_ended) == (3, 3)
    assert len(list(changes.lines(changed))) == 4
