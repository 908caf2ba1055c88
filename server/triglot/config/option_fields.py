"""Describes and checks single options: the metadata of their fields, their form in help and docs, their limits."""

from __future__ import annotations

import difflib
import ipaddress
import sys
from collections.abc import Iterable
from dataclasses import Field, field
from typing import Any

_TYPES = {"str": str, "int": int, "float": float, "bool": bool}


def option(
    group: str,
    default: Any,
    help_text: str,
    *,
    value: str = "",
    least: float = 0,
    most: float = sys.float_info.max,
    choices: tuple[str, ...] = (),
    start: str = "",
) -> Any:
    """Return the dataclass field of an option.

    `group`: its heading in help and docs. `value`: the placeholder for its value there, see `value_name`. Numbers
    must be from `least` to `most`, texts one of the `choices` and, unless empty, begin with `start`.
    """
    limits = {"least": least, "most": most, "choices": choices, "start": start}
    return field(default=default, metadata={"group": group, "help": help_text, "value": value} | limits)


def option_type(option: Field[Any]) -> type:
    """Return the type of an option's values."""
    return _TYPES[str(option.type)]


def groups(options: Iterable[Field[Any]]) -> dict[str, list[str]]:
    """Return the names of the options by group."""
    found: dict[str, list[str]] = {}
    for option in options:
        found.setdefault(option.metadata["group"], []).append(option.name)
    return found


def value_name(option: Field[Any]) -> str:
    """Return the placeholder for an option's value: its choices, or its kind or unit; "" for a switch."""
    if option.metadata["choices"]:
        return f"{{{','.join(option.metadata['choices'])}}}"
    # All floats are durations.
    return option.metadata["value"] or {str: "TEXT", int: "N", float: "SECONDS", bool: ""}[option_type(option)]


def default_text(option: Field[Any]) -> str:
    """Return an option's default as in TOML, but without quotes; "" for an empty text."""
    if isinstance(option.default, bool):
        return str(option.default).lower()
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def flag_of(name: str) -> str:
    """Return an option's flag."""
    return f"--{name.replace('_', '-')}"


def problem_of(option: Field[Any], value: object) -> str:
    """Return what is wrong with an option's value; "" if it is valid."""
    expected, limits = option_type(option), option.metadata
    if type(value) is not expected and not (expected is float and type(value) is int):
        return f"expected {expected.__name__}, got {value!r}"
    if limits["choices"] and value not in (*limits["choices"], option.default):
        *others, last = limits["choices"]
        return f"expected {', '.join(others)} or {last}, got {value!r}"
    if isinstance(value, str) and value and not value.startswith(limits["start"]):
        return f"expected a text that begins with {limits['start']!r}, got {value!r}"
    if isinstance(value, int | float) and not limits["least"] <= value <= limits["most"]:
        bound = f"at most {limits['most']}" if value > limits["most"] else f"at least {limits['least']}"
        return f"expected {bound}, got {value}"
    return ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unknown(name: str, known: Iterable[str], kind: str = "option") -> str:
    """Return the error for an unknown name of an option, or of another `kind`, with the most similar one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"unknown {kind} {name!r}" + (f", did you mean {near[0]!r}?" if near else "")
