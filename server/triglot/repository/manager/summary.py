"""Summaries of versions, loaded or not, and their table in the server's output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from triglot.core.errors import ServingError
from triglot.core.types import TensorSpec
from triglot.model.ensemble import Ensemble
from triglot.model.model import Model
from triglot.model.signature import shape_text
from triglot.repository.manager.plan import Version
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable

FAILED, SKIPPED = "FAILED", "SKIPPED"
MAX_CELL = 40
"""Limit on the characters of a table cell."""
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """The summary of one version. `state`: as in the model repository (READY, LOADING, …), FAILED or SKIPPED.

    `inputs` and `outputs` are those of the default signature, like "x FP32 [-1,3]". `version` is a label if it has
    one, and "" for a model with an invalid folder or configuration. For a version that is not loaded,
    `load_seconds` is None and only the `error` is known.
    """

    model: str
    version: str = ""
    backend: str = ""
    platform: str = ""
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    batching: str = ""
    instances: str = ""
    load_seconds: float | None = None
    state: str = FAILED
    error: str = ""


def summary_of(version: Version) -> VersionSummary:
    """Return the summary of a wanted version."""
    files, servable = version.files, version.servable
    state = FAILED if version.failure is not None and servable is None else version.state.value
    # A model that serves in spite of warnings has no error.
    error = "" if version.ready and version.failure is None else version.reason
    about = VersionSummary(files.name, files.label or str(files.version), files.backend, state=state, error=error)
    return about if servable is None else _loaded(about, servable)


def _loaded(about: VersionSummary, servable: Servable) -> VersionSummary:
    return VersionSummary(
        about.model,
        about.version,
        about.backend,
        servable.platform,
        _texts(servable.signature.inputs),
        _texts(servable.signature.outputs),
        _batching(servable.model),
        _instances(servable),
        servable.load_seconds,
        about.state,
        about.error,
    )


def summary_of_broken(name: str, error: ServingError) -> VersionSummary:
    """Return the summary of a model that has no version."""
    return VersionSummary(name, error=error.message)


def summary_of_skipped(files: ModelFiles, why: str) -> VersionSummary:
    """Return the summary of a version that needs a library that is not installed."""
    version = files.label or str(files.version)
    return VersionSummary(files.name, version, files.backend, state=SKIPPED, error=why)


def _texts(specs: Sequence[TensorSpec]) -> list[str]:
    return [f"{spec.name} {spec.datatype} {shape_text(spec.shape)}" for spec in specs]


def _batching(model: Model) -> str:
    most = model.max_batch_size or (model.dynamic_batching.max_batch_size if model.dynamic_batching else 0)
    kind = "sequences" if model.sequence_batching else "dynamic" if model.dynamic_batching else ""
    limit = f"up to {most}" if most else ""
    return ", ".join(part for part in (kind, limit) if part)


def _instances(servable: Servable) -> str:
    model = servable.model
    if isinstance(model, Ensemble):
        return ""
    if model.execution == "process":
        return _count_text(model.instances, "process", "processes")
    if model.execution == "ray":
        return _count_text(model.instances, "actor", "actors")
    return "event loop" if servable.on_loop else _count_text(model.instances, "thread", "threads")


def _count_text(count: int, singular: str, more: str) -> str:
    return f"{count} {singular if count == 1 else more}"


def table(summaries: Sequence[VersionSummary]) -> list[str]:
    """Return the lines of a table with a heading; empty without summaries."""
    if not summaries:
        return []
    rows = list(map(_cells, summaries))
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in rows[0]}
    lines = [{title: title for title in widths}, *rows]
    return ["  ".join(cell.ljust(widths[title]) for title, cell in line.items()).rstrip() for line in lines]


def _cells(summary: VersionSummary) -> Mapping[str, str]:
    return {
        title: f"{text[: MAX_CELL - 1]}…" if len(text) > MAX_CELL else text or NOTHING
        for title, text in _texts_of(summary)
    }


def _texts_of(summary: VersionSummary) -> Iterator[tuple[str, str]]:
    yield "model", summary.model
    yield "version", summary.version
    yield "backend", summary.backend
    yield "inputs", ", ".join(summary.inputs)
    yield "outputs", ", ".join(summary.outputs)
    yield "batching", summary.batching
    yield "instances", summary.instances
    yield "load", "" if summary.load_seconds is None else f"{summary.load_seconds:.2f} s"
    yield "state", summary.state
