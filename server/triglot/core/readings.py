"""What a part of the server says of itself to whoever watches: counters and gauges, read when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of one metric of one version of a model.

    `name` without the server's prefix and, of a `counter` (it only grows), without `_total`; base units.
    """

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    counter: bool = False
