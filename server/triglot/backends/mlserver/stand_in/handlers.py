"""MLServer's custom handlers: the paths of its REST interface that a model's methods answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class CustomHandler:
    """A path and its verb."""

    rest_path: str
    rest_method: str = "POST"


def custom_handler(rest_path: str, rest_method: str = "POST") -> Callable[[Method], Method]:
    """Mark a method as the handler of a path."""

    def mark(method: Method) -> Method:
        method.__custom_handler__ = CustomHandler(rest_path, rest_method)  # type: ignore[attr-defined]
        return method

    return mark
