"""What the JSON of one request may be: one budget for every route, checked before values are made of it."""

from __future__ import annotations

from dataclasses import dataclass

from triglot.core.errors import PayloadTooLarge

SIZE_OPTION, VALUES_OPTION = "max_json_size", "max_json_values"
MAX_DEPTH = 1000
"""How deep lists and objects may be nested, about: the parsers' own limits are 1,000 to 1,024."""
NUMBER_COST, VALUE_COST, CONTAINER_COST = 1, 16, 64
"""What values count in the budget, by the memory that they take: in an array a number is 8 bytes.

No text counts more than `CONTAINER_COST` a byte.
"""


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """The bounds of one request's JSON: `size` in bytes, inflated; `values` as `max_json_values` counts them."""

    size: int = 64 * 1024 * 1024
    values: int = 8 * 1024 * 1024

    def check_size(self, size: int) -> None:
        """Raises `PayloadTooLarge`."""
        if size > self.size:
            raise PayloadTooLarge(
                f"the JSON of the request has {size} bytes, the limit is {self.size} (option {SIZE_OPTION}); send "
                "large tensors as binary data"
            )

    def check_text(self, size: int) -> None:
        """Of one string, which is parsed in one go. Raises `PayloadTooLarge`."""
        if size > self.size // 4:
            raise PayloadTooLarge(
                f"a string in the JSON of the request has more than {self.size // 4} bytes, a quarter of option "
                f"{SIZE_OPTION}; send large tensors as binary data"
            )

    def check_cost(self, cost: int) -> None:
        """Raises `PayloadTooLarge`."""
        if cost > self.values:
            raise PayloadTooLarge(
                f"the JSON of the request has too many values, the limit is {self.values} (option "
                f"{VALUES_OPTION}: a number in a list of numbers counts {NUMBER_COST}, any other value or key "
                f"{VALUE_COST}, a list or an object {CONTAINER_COST}); send large tensors as binary data"
            )


DEFAULT_LIMITS = JsonLimits()
