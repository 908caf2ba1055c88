"""The bench of storms, in small."""

from __future__ import annotations

import pytest

from bench import storms


@pytest.mark.parametrize("transport", storms.TRANSPORTS)
def test_storms(transport: str) -> None:
    results = storms.measure(transport, [20], 2)
    assert [storm.how for storm, _ in results] == ["deadlines", "deadlines", "cancels", "cancels", "reconnects"]
    assert all(result.good for _, result in results)
