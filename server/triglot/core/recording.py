"""`Recording`, the settings by which a model's requests are recorded to files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recording:
    """Where, and how many of, a model's requests are recorded.

    `prefix` is the common path prefix of the files. `rate`, from 0 to 1, is the share of the requests that are
    recorded, chosen at random.
    """

    prefix: str
    rate: float
