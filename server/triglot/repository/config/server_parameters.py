"""Configuration parameters that the server itself uses; all others are for the model's own code."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triglot.model.config import EXECUTIONS, INLINE_REMOVED
from triglot.model.scheduling import AUTO_REMOVED
from triglot.repository.config.traffic import weights_in

ENVIRONMENT = "EXECUTION_ENV_PATH"
"""Triton's parameter for the Python environment of a model, a folder or an archive."""
TRAFFIC = "traffic"
RAY = (
    "ray_num_cpus",
    "ray_num_gpus",
    "ray_resources",
    "ray_placement",
    "ray_runtime_env",
    "ray_send_files",
    "ray_max_inflight",
    "ray_max_instances",
    "ray_max_wait_ms",
)
OWN = (
    "execution",
    "cpus",
    "hang_seconds",
    "longest_run_seconds",
    "idempotent",
    "inputs_in_place",
    ENVIRONMENT,
    TRAFFIC,
    *RAY,
)
REMOVED = ("max_queue_delay", "latency_objective_ms")
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
"""Placeholder for the model's folder in that path."""
MAX_CPU = 4095
MISSPELT = 0.9
"""Similarity to one of our names from which a name counts as misspelt."""
_LIST = re.compile(r"[0-9]+(-[0-9]+)?(\s*,\s*[0-9]+(-[0-9]+)?)*")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class ServerParameters:
    """The values of these parameters; `execution` "" means unset.

    `hang_seconds`, `longest_run`, `idempotent` and `inputs_in_place` as in `Model`, None if unset. `traffic`:
    weights by version.
    """

    execution: str = ""
    cpus: Sequence[int] = ()
    hang_seconds: float | None = None
    longest_run: float | None = None
    idempotent: bool | None = None
    inputs_in_place: bool | None = None
    traffic: Mapping[str, float] = field(default_factory=dict)


def server_parameters(parameters: Mapping[str, str]) -> ServerParameters:
    """Return the server's parameters of a configuration. Raise `ValueError`, which names the key."""
    for name in REMOVED:
        if name in parameters:
            raise ValueError(
                f"parameters[{name}]: {AUTO_REMOVED}, as dynamic_batching.max_queue_delay_microseconds"
            )
    execution = parameters.get("execution", "")
    if execution == "inline":
        raise ValueError(f"parameters[execution]: {INLINE_REMOVED}")
    if "execution" in parameters and execution not in EXECUTIONS:
        raise wrong("execution", " or ".join((", ".join(EXECUTIONS[:-1]), EXECUTIONS[-1])), execution, EXECUTIONS)
    hang_seconds, longest_run = (_seconds(parameters, name) for name in ("hang_seconds", "longest_run_seconds"))
    return ServerParameters(
        execution,
        _cpus(parameters),
        hang_seconds,
        longest_run,
        flag(parameters, "idempotent"),
        flag(parameters, "inputs_in_place"),
        _traffic(parameters),
    )


def environment_of(parameters: Mapping[str, str], folder: Path) -> Path | None:
    """Return the Python environment of the model in `folder`; None: the server's.

    Raise `ValueError` for an environment without a process.
    """
    text = parameters.get(ENVIRONMENT, "")
    if not text:
        return None
    execution = parameters.get("execution", "process")
    if execution != "process":
        raise ValueError(f"parameters[{ENVIRONMENT}]: expected execution 'process', got {execution!r}")
    return folder.absolute() / text.replace(MODEL_FOLDER, str(folder.absolute()))


def others(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters for the model's own code."""
    return {name: text for name, text in parameters.items() if name not in OWN}


def misspelt(parameters: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each parameter that probably is a misspelt one of Triglot."""
    for name in others(parameters):
        if near := difflib.get_close_matches(name, OWN, n=1, cutoff=MISSPELT):
            yield f"parameters[{name}]: passed to the model's own code; did you mean {near[0]!r}?"


def wrong(name: str, expected: str, text: str, known: Sequence[str] = ()) -> ValueError:
    """Return the error of a parameter that is not as `expected`."""
    near = difflib.get_close_matches(text, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return ValueError(f"parameters[{name}]: expected {expected}, got {text!r}{hint}")


def _seconds(parameters: Mapping[str, str], name: str) -> float | None:
    text = parameters.get(name)
    if text is not None and not _NUMBER.fullmatch(text):
        raise wrong(name, "a number of seconds, 0 for no limit", text)
    return None if text is None else float(text)


def flag(parameters: Mapping[str, str], name: str) -> bool | None:
    """Return true, false, or None where nothing is said. Raise `ValueError`."""
    text = parameters.get(name)
    if text not in (None, "true", "false"):
        raise wrong(name, "true or false", str(text), ("true", "false"))
    return None if text is None else text == "true"


def _traffic(parameters: Mapping[str, str]) -> dict[str, float]:
    try:
        return weights_in(parameters.get(TRAFFIC, ""))
    except ValueError as error:
        raise ValueError(f"parameters[{TRAFFIC}]: {error}") from None


def _cpus(parameters: Mapping[str, str]) -> tuple[int, ...]:
    """Return the numbers of a list like 0,2-3, in order, without duplicates."""
    if (text := parameters.get("cpus")) is None:
        return ()
    if not _LIST.fullmatch(text.strip()) or len(text) > 1000:
        raise wrong("cpus", "CPU numbers like 0,2-3", text)
    cpus: dict[int, None] = {}
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if len(first) > 4 or len(last) > 4 or not int(first) <= int(last or first) <= MAX_CPU:
            raise wrong("cpus", f"numbers from 0 to {MAX_CPU}, and ascending ranges", text)
        cpus |= dict.fromkeys(range(int(first), int(last or first) + 1))
    return tuple(cpus)
