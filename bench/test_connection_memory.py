"""The bench of what a connection can hold: that its clients do what they are meant to."""

import pytest

from bench.connection_memory import WAYS, Way, measure

CONNECTIONS = 2
SOME = [way for way in WAYS if way.name in ("remembered", "unread_statuses")]


@pytest.mark.parametrize("way", SOME, ids=lambda way: way.name)
def test_connections_are_made_and_stay(way: Way) -> None:
    held, stayed = measure(way, CONNECTIONS)
    assert stayed == CONNECTIONS
    assert held > 0
