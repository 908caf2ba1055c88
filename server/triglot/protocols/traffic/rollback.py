"""The rule that takes a version's weight away, because of its errors, its latency or a shadow's differences."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from triglot.protocols.traffic.counts import Counts, quantile_ms
from triglot.repository.config.traffic import Rollback

SECONDS = 60
"""Time back to which calls are judged, one judgement a second; at most to the last change of the weights."""


class RollbackWatch:
    """Judges the versions of a model but the lowest, which serves on."""

    def __init__(self, rule: Rollback) -> None:
        self.rule = rule
        self._before: deque[tuple[Mapping[int, Counts], Counts]] = deque(maxlen=SECONDS)

    def judge(
        self, calls: Mapping[int, Counts], versions: Sequence[int], shadow: Counts, target: int
    ) -> tuple[int, str] | None:
        """Return the version that fails, and why; None if none does.

        `calls`: what each version did. `shadow`: its counts, and its `target`, 0 if it is no version of the model.
        Called once a second.
        """
        first_calls, first_shadow = self._before[0] if self._before else (calls, shadow)
        self._before.append((calls, shadow))
        for version in versions[1:]:
            if why := self._why(_since(calls.get(version), first_calls.get(version))):
                return version, why
            same, different = (shadow.get(key, 0) - first_shadow.get(key, 0) for key in ("same", "different"))
            limit, compared = self.rule.different, same + different
            if limit is None or version != target or compared < self.rule.calls:
                continue
            if (share := different / compared) > limit:
                return version, f"{share:.3g} of the shadow's responses differ, more than {limit:g}"
        return None

    def _why(self, counts: Counts) -> str:
        rule, requests = self.rule, counts["requests"]
        if requests < rule.calls:
            return ""
        if rule.errors is not None and (share := counts["errors"] / requests) > rule.errors:
            return f"{share:.3g} of the calls failed, more than {rule.errors:g}"
        p99 = quantile_ms(counts["latency"], 0.99)
        if rule.p99_ms is not None and p99 is not None and p99 > rule.p99_ms:
            return f"p99 is {p99:g} ms, more than {rule.p99_ms:g}"
        return ""


def _since(now: Counts | None, before: Counts | None) -> Counts:
    """Return the counts since an earlier reading."""
    if now is None:
        return {"requests": 0, "errors": 0, "latency": {}}
    if before is None:
        return now
    latency = {bucket: count - before["latency"].get(bucket, 0) for bucket, count in now["latency"].items()}
    return {
        "requests": now["requests"] - before["requests"],
        "errors": now["errors"] - before["errors"],
        "latency": {bucket: count for bucket, count in latency.items() if count},
    }
