"""How a model's requests are recorded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recording:
    """`prefix` is the path that the names of the files begin with.

    `rate`, from 0 to 1, is the share of the requests that are recorded, each chosen by chance.
    """

    prefix: str
    rate: float
