"""Applies the models' traffic settings: divides calls among versions, and has calls copied to shadows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import FailedPrecondition, InvalidArgument, ModelNotFound
from triglot.core.running import Watcher
from triglot.core.types import InferenceRequest, ParameterValue
from triglot.dataplane.control import TRAFFIC, Arguments
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.request_path import TrafficRules
from triglot.protocols.traffic.counts import Counts, calls_of, quantile_ms
from triglot.protocols.traffic.weights import Points, Weights, point_of
from triglot.repository.config.traffic import (
    NO_TRAFFIC,
    Shadow,
    TrafficSettings,
    traffic_fields,
    traffic_settings,
    with_weights,
)
from triglot.repository.manager.plan import State
from triglot.scheduling.servable import Servable
from triglot.telemetry.merging import merged
from triglot.telemetry.store import Telemetry

log = logging.getLogger(__name__)

NO_CALLS: Counts = {"requests": 0, "errors": 0, "latency": {}}


@dataclass(frozen=True, slots=True)
class TrafficChange:
    """What a client changes. `weights`: in percent. `sticky`, `shadow`: None for no change. `reset`: begin with
    what the configuration says.
    """

    model_name: str
    weights: Mapping[str, float] = field(default_factory=dict)
    sticky: str | None = None
    shadow: Shadow | None = None
    ends_shadow: bool = False
    reset: bool = False


@dataclass(slots=True)
class ModelTraffic:
    """The traffic of one model. `weights`: of the versions that serve; None: all calls go to the default one."""

    settings: TrafficSettings
    weights: Weights | None = None
    points: Points = field(default_factory=Points)


class Traffic(TrafficRules):
    """The traffic of all models. On the event loop."""

    def __init__(self, dataplane: DataPlane, telemetry: Telemetry) -> None:
        self._dataplane = dataplane
        self._telemetry = telemetry
        self._registry = dataplane.registry
        self._set_by_call: dict[str, tuple[TrafficSettings, TrafficSettings]] = {}
        """By model, what was configured when a call changed it, and the change."""
        self._models: dict[str, ModelTraffic] = {}
        dataplane.control.register_action(TRAFFIC, self._set)
        dataplane.control.register_report(TRAFFIC, self._report)
        self._registry.changes.subscribe(self._update)
        self._update(None)

    # --- a call's version ---

    def route(self, servable: Servable, call: Call, parameters: Mapping[str, ParameterValue]) -> Servable:
        """See `TrafficRules`. Requests of a sequence go to one version, by its id."""
        model = self._models.get(servable.name)
        if model is None or model.weights is None:
            return servable
        sequence = parameters.get("sequence_id")
        key: object = sequence
        if not key and (sticky := model.settings.sticky):
            key = parameters[sticky] if sticky in parameters else call.metadata.get(sticky.lower())
        number = model.weights.at(point_of(key) if key else model.points.next())
        entry = self._registry.entries[servable.name].get(number)
        if entry is None or entry.state is not State.READY or entry.servable is None:
            return servable
        if sequence and parameters.get("sequence_start"):
            self._end_in_others(entry.servable, sequence)
        return entry.servable

    def _end_in_others(self, servable: Servable, sequence: ParameterValue) -> None:
        """End a sequence of this id in other versions: it began there before the weights changed."""
        for other in self._registry.in_memory(servable.name):
            if other is not servable and other.sequences is not None and isinstance(sequence, int | str):
                other.sequences.end(sequence)

    def copy(self, servable: Servable, request: InferenceRequest, call: Call) -> Watcher | None:
        """See `TrafficRules`."""
        return None

    # --- settings ---

    def _update(self, name: str | None) -> None:
        """Apply what may have changed of a model, or of all."""
        known = self._registry.names()
        for model in known if name is None else [name]:
            self._apply(model)
        for model in self._models.keys() - set(known):
            del self._models[model]
        self._dataplane.routes = self if any(model.weights for model in self._models.values()) else None

    def _apply(self, name: str) -> None:
        settings = configured = self._registry.traffic_of(name)
        if (by_call := self._set_by_call.get(name)) is not None:
            if by_call[0] == configured:
                settings = by_call[1]
            else:
                log.warning("model %s: its configured traffic has changed, and replaces that of a call", name)
                del self._set_by_call[name]
        if settings == NO_TRAFFIC:
            self._models.pop(name, None)
            return
        model = self._models.setdefault(name, ModelTraffic(settings))
        model.settings = settings
        serving = self._serving(name, settings.weights)
        model.weights = Weights(serving) if any(serving.values()) else None

    def _serving(self, name: str, weights: Mapping[str, float]) -> dict[int, float]:
        """Return the weights of the versions that serve, by their numbers."""
        numbers = {self._number(name, version): weight for version, weight in weights.items()}
        return {
            number: weight
            for number, weight in numbers.items()
            if number is not None and self._registry.is_serving(name, number)
        }

    def _number(self, name: str, version: str) -> int | None:
        """Return the number of a version that is given by number or name; None for an unknown name."""
        if (number := self._registry.labels_of(name).get(version)) is not None:
            return number
        return int(version) if version.isdecimal() else None

    async def _set(self, arguments: Arguments) -> None:
        name, fields = arguments["model"], arguments["settings"]
        if fields is None:
            self._set_by_call.pop(name, None)
        else:
            self._set_by_call[name] = self._registry.traffic_of(name), traffic_settings(fields)
        self._update(name if self._registry.knows(name) else None)
        log.info("model %s: traffic is now %s", name, "as configured" if fields is None else fields["traffic"])

    async def change(self, change: TrafficChange, call: Call) -> dict[str, Any]:
        """Change a model's traffic in all workers; return what `read` does.

        Raise `ModelNotFound`, `InvalidArgument`, and `FailedPrecondition` for a version that does not serve.
        """
        name = call.subject = change.model_name
        self._require(name, call)
        settings = None if change.reset else self._settings(name)
        if change.weights or change.sticky is not None or change.shadow is not None or change.ends_shadow:
            settings = self._changed(settings or self._registry.traffic_of(name), change, call)
        await self._dataplane.control.act(
            TRAFFIC, {"model": name, "settings": None if settings is None else traffic_fields(settings)}
        )
        return await self._document(name)

    def _changed(self, before: TrafficSettings, change: TrafficChange, call: Call) -> TrafficSettings:
        name = change.model_name
        weights = {self._text(name, version): weight for version, weight in before.weights.items()}
        if change.weights:
            changes = {self._text(name, version): weight for version, weight in change.weights.items()}
            ready = list(map(str, self._registry.ready_versions(name)))
            for version, weight in changes.items():
                if weight and version not in ready:
                    raise FailedPrecondition(
                        f"version {version} of model '{name}' is not ready, only {', '.join(ready) or 'none'}"
                    )
            try:
                weights = dict(with_weights(weights, str(self._registry.servable(name).version), changes))
            except ValueError as error:
                raise InvalidArgument(str(error)) from None
        shadow = None if change.ends_shadow else before.shadow if change.shadow is None else change.shadow
        sticky = before.sticky if change.sticky is None else change.sticky
        return replace(before, weights=weights, sticky=sticky, shadow=shadow)

    def _text(self, name: str, version: str) -> str:
        number = self._number(name, version)
        return version if number is None else str(number)

    def _settings(self, name: str) -> TrafficSettings:
        model = self._models.get(name)
        return NO_TRAFFIC if model is None else model.settings

    def _require(self, name: str, call: Call) -> None:
        call.permission.check_model(name)
        if not self._dataplane.knows(call.permission, name):
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")

    # --- what is shown ---

    async def read(self, change: TrafficChange, call: Call) -> dict[str, Any]:
        """Return a model's settings, and what its versions and its shadow did, as JSON values.

        Raise `ModelNotFound`.
        """
        self._require(change.model_name, call)
        return await self._document(change.model_name)

    async def _report(self, arguments: Arguments) -> dict[str, Any]:
        """Return the counts of this process."""
        calls = calls_of(self._telemetry, arguments["model"])
        return {"versions": {str(number): counts for number, counts in calls.items()}}

    async def _document(self, name: str) -> dict[str, Any]:
        reports = await self._dataplane.control.reports(TRAFFIC, {"model": name})
        counts = merged(reports.each, {})
        settings, model = self._settings(name), self._models.get(name)
        percent = {} if model is None or model.weights is None else model.weights.percent
        if not percent and (default := self._registry.serving(name)) is not None:
            percent = {default.files.version: 100.0}
        return {
            "model": name,
            **traffic_fields(settings),
            "set_by": "call" if name in self._set_by_call else "configuration",
            "versions": [
                {
                    "version": version.files.version,
                    "ready": version.ready,
                    "percent": percent.get(version.files.version, 0.0),
                    **_shown(counts["versions"].get(str(version.files.version), NO_CALLS)),
                }
                for version in self._registry.statuses(name)
                if version.state is not State.UNAVAILABLE
            ],
        }


def _shown(counts: Counts) -> dict[str, Any]:
    return {
        "requests": counts["requests"],
        "errors": counts["errors"],
        "p50_ms": quantile_ms(counts["latency"], 0.5),
        "p99_ms": quantile_ms(counts["latency"], 0.99),
    }
