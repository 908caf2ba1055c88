"""Limits on the JSON of one request: one budget for all routes, checked before values are created."""

from __future__ import annotations

from dataclasses import dataclass

from triglot.core.errors import PayloadTooLarge

SIZE_OPTION, VALUES_OPTION = "max_json_size", "max_json_values"
MAX_DEPTH = 1000
"""Approximate limit on nested lists and objects: the parsers' own limits are 1,000 to 1,024."""
NUMBER_COST, VALUE_COST, CONTAINER_COST = 1, 16, 64
"""Costs of values in the budget, by the memory that they take: a number in an array has 8 bytes.

No text costs more than `CONTAINER_COST` per byte.
"""


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits on one request's JSON: `size` in bytes, decompressed; `values` as `max_json_values` counts them."""

    size: int = 64 * 1024 * 1024
    values: int = 8 * 1024 * 1024

    def check_size(self, size: int) -> None:
        """Raise `PayloadTooLarge` for a text of this size."""
        if size > self.size:
            raise PayloadTooLarge(
                f"the JSON of the request has {size} bytes, the limit is {self.size} (option {SIZE_OPTION}); send "
                "large tensors as binary data"
            )

    def check_text(self, size: int) -> None:
        """Raise `PayloadTooLarge` for a string of this size, which is parsed at once."""
        if size > self.size // 4:
            raise PayloadTooLarge(
                f"a string in the JSON of the request has more than {self.size // 4} bytes, a quarter of option "
                f"{SIZE_OPTION}; send large tensors as binary data"
            )

    def check_cost(self, cost: int) -> None:
        """Raise `PayloadTooLarge` for values of this cost."""
        if cost > self.values:
            raise PayloadTooLarge(
                f"the JSON of the request has too many values, the limit is {self.values} (option "
                f"{VALUES_OPTION}: a number in a list of numbers counts {NUMBER_COST}, any other value or key "
                f"{VALUE_COST}, a list or an object {CONTAINER_COST}); send large tensors as binary data"
            )


DEFAULT_LIMITS = JsonLimits()
