"""`Reading`, one value of a metric that a part of the server reports: counters and gauges, read on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of one metric of one version of a model.

    `name` is without the server's prefix and, for a `counter` (it only grows), without `_total`; in base units.
    """

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    counter: bool = False
