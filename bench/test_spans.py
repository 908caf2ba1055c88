"""The bench of spans, in small: what a collector has not, the server counts as lost."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import servers, spans
from bench.rounds import Plan


@pytest.mark.parametrize("kind", [spans.SLOW, spans.BACK])
async def test_lost_is_counted(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "DELAY_MS", 20)  # Else a collector may be gone before there is anything to export.
    cores = servers.Cores(None, None, "")
    with ExitStack() as stack:
        healthy = spans.Traced(spans.SAMPLED, tmp_path, cores, stack, spans.SAMPLED)
        faulty = spans.Traced(kind, tmp_path, cores, stack, kind)
        measured = await spans.fault(healthy, faulty, kind, Plan(2, 0.3))
        sound = healthy.span_counts()
    assert sound.exported == sound.received > 0
    span_counts = measured.span_counts
    assert span_counts is not None
    # One that goes may have taken spans whose response never came.
    assert span_counts.received >= span_counts.exported > 0
    assert (span_counts.exported + span_counts.lost) % 3 == 0
    assert len(list(spans.fault_lines(measured))) == 3
