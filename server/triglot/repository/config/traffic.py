"""How a model's calls are divided among its versions: weights, a shadow, and a rule that takes a version out.

In a model's `versions.toml`, in requests, and in what workers send each other:

traffic = { "3" = 90, "4" = 10 }
sticky = "x-user"
shadow = { version = "4", percent = 20 }
rollback = { errors = 0.05, p99_ms = 50, different = 0.01, calls = 100 }
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

KEYS: Final = ("traffic", "sticky", "shadow", "rollback")
TLS_KEYS: Final = ("ca", "certificate", "key")
MAX_WEIGHTS: Final = 100
"""Most versions of a model that have weights."""
MAX_NAME: Final = 128
MAX_PATH: Final = 4096
MAX_CALLS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Shadow:
    """Where copies of a model's calls go: another version, model, or server, by its gRPC address.

    `percent`: how many of the calls are copied. `tolerance`: how far numbers may differ, absolutely and relative
    to those of the version that served the call. `tls`: how the server at the address is verified, and what it is
    shown, as the files of `triglot.client.Tls`; None: no TLS. `token_file`: what it is sent as `authorization:
    Bearer`, read for each copy; "": nothing.
    """

    version: str = ""
    model: str = ""
    address: str = ""
    percent: float = 100.0
    tolerance: float = 1e-5
    tls: Mapping[str, str] | None = None
    token_file: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.address, self.model, self.version)))


@dataclass(frozen=True, slots=True)
class Rollback:
    """When a version loses its weight: shares from 0 to 1, and milliseconds; None: never because of that.

    `errors`: of its calls that fail through no fault of the client. `p99_ms`: of its calls' latency. `different`:
    of the shadow's responses that differ. `calls`: how many are needed to judge.
    """

    errors: float | None = None
    p99_ms: float | None = None
    different: float | None = None
    calls: int = 100


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """The settings of one model. `weights`: by number or name of the version; empty: all calls go to the default.

    `sticky`: the request parameter, or else the header, whose value decides; "": calls are divided one by one.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    sticky: str = ""
    shadow: Shadow | None = None
    rollback: Rollback | None = None


NO_TRAFFIC: Final = TrafficSettings()


def traffic_settings(content: Mapping[str, Any]) -> TrafficSettings:
    """Return the settings from parsed TOML or JSON. Raise `ValueError`, which names the key."""
    _check_keys("", content, KEYS)
    sticky = content.get("sticky") or ""
    if not isinstance(sticky, str) or len(sticky) > MAX_NAME:
        raise ValueError(f"sticky: expected the name of a header or parameter, got {sticky!r}")
    weights = content.get("traffic")
    return TrafficSettings(
        {} if weights is None else weights_of(weights),
        sticky,
        None if content.get("shadow") is None else _shadow(content["shadow"]),
        None if content.get("rollback") is None else _rollback(content["rollback"]),
    )


def traffic_fields(settings: TrafficSettings) -> dict[str, Any]:
    """Return the settings as JSON values; `traffic_settings` takes them."""
    return {
        "traffic": dict(settings.weights),
        "sticky": settings.sticky,
        "shadow": None if settings.shadow is None else asdict(settings.shadow),
        "rollback": None if settings.rollback is None else asdict(settings.rollback),
    }


def weights_of(weights: object) -> dict[str, float]:
    """Return weights by version. Raise `ValueError` for no such mapping."""
    if not isinstance(weights, Mapping) or len(weights) > MAX_WEIGHTS:
        raise ValueError(f"traffic: expected weights of up to {MAX_WEIGHTS} versions, got {_shown(weights)}")
    for version, weight in weights.items():
        if not 0 < len(version) <= MAX_NAME:
            raise ValueError(f"traffic: expected a version's number or name, got {_shown(version)}")
        if not _is_number(weight, 1e9):
            raise ValueError(f"traffic: {version}: expected a number from 0, got {_shown(weight)}")
    return dict(weights)


def weights_in(text: str) -> dict[str, float]:
    """Return the weights in a text like "3=90, 4=10". Raise `ValueError`."""
    weights: dict[str, Any] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        version, _, weight = (part.strip() for part in item.partition("="))
        try:
            weights[version] = float(weight)
        except ValueError:
            raise ValueError(f"traffic: expected VERSION=WEIGHT, ..., got {item!r}") from None
    return weights_of(weights)


def with_weights(before: Mapping[str, float], default: str, changes: Mapping[str, float]) -> Mapping[str, float]:
    """Return the weights in percent after some have been set to a percentage; the others share the rest.

    They share it as before. Without weights before, all calls went to the version `default`. Raise `ValueError`
    for more than 100 percent, and for less with nothing left to share the rest.
    """
    given = sum(changes.values())
    others = {
        version: weight for version, weight in (before or {default: 100.0}).items() if version not in changes
    }
    total, rest = sum(others.values()), 100 - given
    if rest < 0:
        raise ValueError(f"traffic: expected at most 100 percent, got {given:g}")
    if rest and not total:
        raise ValueError(f"traffic: {given:g} percent, and no other version has a weight to take the rest")
    return {version: weight * rest / total if total else 0.0 for version, weight in others.items()} | dict(changes)


def _shadow(content: object) -> Shadow:
    shadow = Shadow(**_table("shadow", content, [at.name for at in fields(Shadow)]))
    for key in ("version", "model", "address", "token_file"):
        longest = MAX_PATH if key == "token_file" else MAX_NAME
        if not isinstance(value := getattr(shadow, key), str) or len(value) > longest:
            raise ValueError(f"shadow: {key}: expected a text, got {_shown(value)}")
    if not (shadow.version or shadow.model or shadow.address):
        raise ValueError("shadow: expected a version, a model or an address, got none")
    if not _is_number(shadow.percent, 100) or not shadow.percent:
        raise ValueError(f"shadow: percent: expected a number above 0, up to 100, got {_shown(shadow.percent)}")
    if not _is_number(shadow.tolerance, math.inf):
        raise ValueError(f"shadow: tolerance: expected a number from 0, got {_shown(shadow.tolerance)}")
    if shadow.tls is not None:
        _check_tls(_table("shadow: tls", shadow.tls, TLS_KEYS))
    for key in ("tls", "token_file"):
        if getattr(shadow, key) not in (None, "") and not shadow.address:
            raise ValueError(f"shadow: {key}: expected with an address, got none")
    return shadow


def _check_tls(files: Mapping[str, Any]) -> None:
    for key, file in files.items():
        if not isinstance(file, str) or not file:
            raise ValueError(f"shadow: tls: {key}: expected a PEM file, got {_shown(file)}")
    if ("certificate" in files) != ("key" in files):
        raise ValueError(f"shadow: tls: expected a certificate and its key, or neither, got {_shown(files)}")


def _rollback(content: object) -> Rollback:
    rule = Rollback(**_table("rollback", content, [at.name for at in fields(Rollback)]))
    limits = {"errors": 1.0, "different": 1.0, "p99_ms": 1e9}
    for key, most in limits.items():
        if (value := getattr(rule, key)) is not None and not _is_number(value, most):
            raise ValueError(f"rollback: {key}: expected a number from 0 to {most:g}, got {_shown(value)}")
    if all(getattr(rule, key) is None for key in limits):
        raise ValueError(f"rollback: expected {', '.join(limits)}, at least one of them")
    calls: Any = rule.calls
    if not (_is_number(calls, MAX_CALLS) and isinstance(calls, int) and calls):
        raise ValueError(f"rollback: calls: expected a number from 1 to {MAX_CALLS}, got {_shown(rule.calls)}")
    return rule


def _table(name: str, content: object, keys: Collection[str]) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{name}: expected a table of {', '.join(keys)}, got {_shown(content)}")
    _check_keys(f"{name}: ", content, keys)
    return content


def _check_keys(where: str, content: Mapping[str, Any], keys: Collection[str]) -> None:
    if unknown := sorted(content.keys() - set(keys)):
        raise ValueError(f"{where}unknown key {unknown[0]!r}, expected {', '.join(keys)}")


def _is_number(value: Any, most: float) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most and value < math.inf
    )


def _shown(value: object) -> str:
    return f"{value!r:.100}"
