"""Reads the parameters `ray_…` of a model's configuration, for instances that are actors of a Ray cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from triglot.model.config import MAX_INSTANCES, NO_RAY_OPTIONS
from triglot.model.ray_options import PLACEMENTS, RayOptions
from triglot.repository.config.server_parameters import RAY, flag, wrong

MAX_INFLIGHT = 64
MAX_WAIT_MS = 60_000
_AMOUNT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,4})?")


def ray_options(parameters: Mapping[str, str]) -> RayOptions:
    """Returns the options that the parameters set. Raises `ValueError`, with the key, when one is invalid."""
    said = [name for name in RAY if name in parameters]
    if said and parameters.get("execution", "ray") != "ray":
        raise ValueError(f"parameters[{said[0]}]: expected execution 'ray', got {parameters['execution']!r}")
    sends = flag(parameters, "ray_send_files")
    gpus = parameters.get("ray_num_gpus")
    return RayOptions(
        num_cpus=_amount("ray_num_cpus", parameters.get("ray_num_cpus", f"{NO_RAY_OPTIONS.num_cpus:g}")),
        num_gpus=None if gpus is None else _amount("ray_num_gpus", gpus),
        resources=_resources(parameters.get("ray_resources", "")),
        placement=_placement(parameters.get("ray_placement", NO_RAY_OPTIONS.placement)),
        runtime_env=_environment(parameters.get("ray_runtime_env", "{}")),
        send_files=NO_RAY_OPTIONS.send_files if sends is None else sends,
        max_inflight=_count("ray_max_inflight", parameters, NO_RAY_OPTIONS.max_inflight, MAX_INFLIGHT),
        max_instances=_count("ray_max_instances", parameters, NO_RAY_OPTIONS.max_instances, MAX_INSTANCES),
        most_wait=_count("ray_max_wait_ms", parameters, round(1000 * NO_RAY_OPTIONS.most_wait), MAX_WAIT_MS)
        / 1000,
    )


def _amount(name: str, text: str) -> float:
    if not _AMOUNT.fullmatch(text):
        raise wrong(name, "a number like 1 or 0.5", text)
    return float(text)


def _resources(text: str) -> dict[str, float]:
    resources: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        resource, found, amount = part.rpartition("=")
        if not found or not resource.strip():
            raise wrong("ray_resources", "names and amounts like accelerator_type:A100=1,fast_disk=0.5", text)
        resources[resource.strip()] = _amount("ray_resources", amount.strip())
    return resources


def _placement(text: str) -> str:
    if text not in PLACEMENTS:
        raise wrong("ray_placement", " or ".join(PLACEMENTS), text, PLACEMENTS)
    return text


def _environment(text: str) -> dict[str, Any]:
    try:
        environment = json.loads(text)
    except ValueError:
        environment = None
    if not isinstance(environment, dict):
        raise wrong("ray_runtime_env", "a JSON object, as Ray's runtime_env", text)
    return environment


def _count(name: str, parameters: Mapping[str, str], otherwise: int, most: int) -> int:
    if (text := parameters.get(name)) is None:
        return otherwise
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise wrong(name, f"a number from 1 to {most}", text)
    return int(text)
