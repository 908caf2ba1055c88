"""Reads the parameters `ray_…` of a model's configuration, for instances that are actors of a Ray cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from triglot.model.config import MAX_INSTANCES
from triglot.model.ray_options import MAX_INFLIGHT, MAX_WAIT_SECONDS, PLACEMENTS
from triglot.repository.config.server_parameters import RAY, flag, wrong

_AMOUNT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,4})?")


def ray_options(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `RayOptions` that the parameters set.

    Raise `ValueError`, with the key, when a parameter is invalid.
    """
    given = [name for name in RAY if name in parameters]
    if given and parameters.get("execution", "ray") != "ray":
        raise ValueError(f"parameters[{given[0]}]: expected execution 'ray', got {parameters['execution']!r}")
    options = {
        "num_cpus": _amount(parameters, "ray_num_cpus"),
        "num_gpus": _amount(parameters, "ray_num_gpus"),
        "resources": _resources(parameters),
        "placement": _placement(parameters),
        "runtime_env": _environment(parameters),
        "send_files": flag(parameters, "ray_send_files"),
        "max_inflight": _count(parameters, "ray_max_inflight", MAX_INFLIGHT),
        "max_instances": _count(parameters, "ray_max_instances", MAX_INSTANCES),
    }
    milliseconds = _count(parameters, "ray_max_wait_ms", 1000 * MAX_WAIT_SECONDS)
    options["max_wait"] = None if milliseconds is None else milliseconds / 1000
    return {name: value for name, value in options.items() if value is not None}


def _amount(parameters: Mapping[str, str], name: str) -> float | None:
    return _number(name, parameters[name]) if name in parameters else None


def _number(name: str, text: str) -> float:
    if not _AMOUNT.fullmatch(text):
        raise wrong(name, "a number like 1 or 0.5", text)
    return float(text)


def _resources(parameters: Mapping[str, str]) -> dict[str, float] | None:
    if (text := parameters.get("ray_resources")) is None:
        return None
    resources: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        resource, found, amount = part.rpartition("=")
        if not found or not resource.strip():
            raise wrong("ray_resources", "names and amounts like accelerator_type:A100=1,fast_disk=0.5", text)
        resources[resource.strip()] = _number("ray_resources", amount.strip())
    return resources


def _placement(parameters: Mapping[str, str]) -> str | None:
    text = parameters.get("ray_placement")
    if text is not None and text not in PLACEMENTS:
        raise wrong("ray_placement", " or ".join(PLACEMENTS), text, PLACEMENTS)
    return text


def _environment(parameters: Mapping[str, str]) -> dict[str, Any] | None:
    if (text := parameters.get("ray_runtime_env")) is None:
        return None
    try:
        environment = json.loads(text)
    except ValueError:
        environment = None
    if not isinstance(environment, dict):
        raise wrong("ray_runtime_env", "a JSON object, as Ray's runtime_env", text)
    return environment


def _count(parameters: Mapping[str, str], name: str, most: int) -> int | None:
    if (text := parameters.get(name)) is None:
        return None
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise wrong(name, f"a number from 1 to {most}", text)
    return int(text)
