"""Applies the models' traffic settings: divides calls among versions, and has calls copied to shadows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Code, FailedPrecondition, InvalidArgument, ModelNotFound, ServingError
from triglot.core.operation import Operation
from triglot.core.running import Watcher
from triglot.core.types import InferenceRequest, ParameterValue
from triglot.dataplane.control import TRAFFIC, Arguments
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.request_path import RequestRecorder, TrafficRules
from triglot.protocols.traffic.counts import SHADOW, Counts, calls_of, quantile_ms
from triglot.protocols.traffic.remote import Remote
from triglot.protocols.traffic.rollback import RollbackWatch
from triglot.protocols.traffic.shadow import ModelShadow, Run, largest_of, run_here, verdict
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
from triglot.telemetry.calls import Counter
from triglot.telemetry.merging import Rule, merged
from triglot.telemetry.store import Telemetry

log = logging.getLogger(__name__)

RULES: Mapping[str, Rule] = {"largest": largest_of, "last_error": lambda texts: next(filter(None, texts), "")}
"""How the reports of workers are merged, where they are not added up."""
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
    """The traffic of one model. `weights`: of the versions that serve; None: all calls go to the default one.

    `target`: the version of the model that is its shadow, 0 if that is none.
    """

    settings: TrafficSettings
    weights: Weights | None = None
    points: Points = field(default_factory=Points)
    shadow: ModelShadow | None = None
    remote: Remote | None = None
    target: int = 0
    watch: RollbackWatch | None = None


class Traffic(TrafficRules):
    """The traffic of all models. On the event loop."""

    def __init__(self, dataplane: DataPlane, telemetry: Telemetry, samples: RequestRecorder | None) -> None:
        self._dataplane = dataplane
        self._telemetry = telemetry
        self._registry = dataplane.registry
        self._samples = samples
        self._copies = telemetry.endpoint("internal", SHADOW, "infer", inference=True, internal=True)
        self._rollbacks = telemetry.endpoint("internal", "RULE", "rollback", inference=False)
        self._judging: asyncio.TimerHandle | None = None
        self._rolling_back: set[asyncio.Task[None]] = set()
        self._changes: dict[str, tuple[TrafficSettings, TrafficSettings, str]] = {}
        """By model, what was configured when a call changed it, the change, and who made it."""
        self._models: dict[str, ModelTraffic] = {}
        dataplane.control.register_action(TRAFFIC, self._set)
        dataplane.control.register_report(TRAFFIC, self._report)
        self._registry.changes.subscribe(self._update)
        telemetry.counters.append(self._counters)
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
        model = self._models.get(servable.name)
        if model is None or model.shadow is None or servable.version == model.target:
            return None
        return model.shadow.copy(servable, request, call)

    # --- settings ---

    def _update(self, name: str | None) -> None:
        """Apply what may have changed of a model, or of all."""
        known = self._registry.names()
        for model in known if name is None else [name]:
            self._apply(model)
        for model in self._models.keys() - set(known):
            self._set_shadow(model, self._models.pop(model), None)
        models = self._models.values()
        self._dataplane.routes = self if any(model.weights for model in models) else None
        self._dataplane.shadows = self if any(model.shadow for model in models) else None
        if self._judging is None and any(model.watch for model in models):
            self._judging = asyncio.get_running_loop().call_later(1.0, self._judge)

    def _apply(self, name: str) -> None:
        settings = configured = self._registry.traffic_of(name)
        if (change := self._changes.get(name)) is not None:
            if change[0] == configured:
                settings = change[1]
            else:
                log.warning("model %s: its configured traffic has changed, and replaces that of a call", name)
                del self._changes[name]
        if settings == NO_TRAFFIC:
            if (model := self._models.pop(name, None)) is not None:
                self._set_shadow(name, model, None)
            return
        model = self._models.setdefault(name, ModelTraffic(settings))
        if model.watch is None or model.settings != settings:
            model.watch = None if settings.rollback is None else RollbackWatch(settings.rollback)
        model.settings = settings
        self._set_shadow(name, model, settings.shadow)
        serving = self._serving(name, settings.weights)
        model.weights = Weights(serving) if any(serving.values()) else None

    def _set_shadow(self, name: str, model: ModelTraffic, shadow: Shadow | None) -> None:
        """Copy the model's calls to this shadow; None: to none any longer."""
        is_version = shadow is not None and not shadow.address and shadow.model in ("", name)
        model.target = (shadow and is_version and self._number(name, shadow.version)) or 0
        if shadow == (None if model.shadow is None else model.shadow.settings):
            return
        if model.remote is not None:
            model.remote.close()
        model.shadow = model.remote = None
        if shadow is None:
            return
        to_model = shadow.model or name
        run: Run = partial(run_here, self._dataplane, to_model, shadow.version)
        if shadow.address:
            model.remote = Remote(shadow, to_model)
            run = model.remote.run
        model.shadow = ModelShadow(to_model, shadow, run, self._copies, self._samples)

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
            self._changes.pop(name, None)
        else:
            change = self._registry.traffic_of(name), traffic_settings(fields), arguments["by"]
            self._changes[name] = change
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
        await self._act(name, settings, "call")
        return await self._document(name)

    async def _act(self, name: str, settings: TrafficSettings | None, by: str) -> None:
        fields = None if settings is None else traffic_fields(settings)
        await self._dataplane.control.act(TRAFFIC, {"model": name, "settings": fields, "by": by})

    def _changed(self, before: TrafficSettings, change: TrafficChange, call: Call) -> TrafficSettings:
        name = change.model_name
        weights = before.weights
        if change.weights:
            changes = {self._text(name, version): weight for version, weight in change.weights.items()}
            for version, weight in changes.items():
                if weight:
                    self._require_ready(name, version)
            weights = self._with_weights(name, before, changes)
        if change.shadow is not None:
            to_model = change.shadow.model or name
            self._require(to_model, call)
            if version := change.shadow.version:
                self._require_ready(to_model, self._text(to_model, version))
        shadow = None if change.ends_shadow else before.shadow if change.shadow is None else change.shadow
        sticky = before.sticky if change.sticky is None else change.sticky
        return replace(before, weights=weights, sticky=sticky, shadow=shadow)

    def _require_ready(self, name: str, version: str) -> None:
        ready = list(map(str, self._registry.ready_versions(name)))
        if version not in ready:
            raise FailedPrecondition(
                f"version {version} of model '{name}' is not ready, only {', '.join(ready) or 'none'}"
            )

    def _with_weights(
        self, name: str, before: TrafficSettings, changes: Mapping[str, float]
    ) -> Mapping[str, float]:
        weights = {self._text(name, version): weight for version, weight in before.weights.items()}
        try:
            return with_weights(weights, str(self._registry.servable(name).version), changes)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None

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

    # --- the rule ---

    def _judge(self) -> None:
        """Once a second, take the weight of versions that fail their model's rule."""
        self._judging = None
        for name, model in list(self._models.items()):
            if model.watch is None or model.weights is None or self._rolling_back:
                continue
            shadow = {} if model.shadow is None else dict(model.shadow.counts.results)
            calls = calls_of(self._telemetry, name)
            if (found := model.watch.judge(calls, model.weights.versions, shadow, model.target)) is not None:
                task = asyncio.get_running_loop().create_task(self._roll_back(name, model.settings, *found))
                self._rolling_back.add(task)
                task.add_done_callback(self._rolling_back.discard)
        if not self._dataplane.stopping and any(model.watch for model in self._models.values()):
            self._judging = asyncio.get_running_loop().call_later(1.0, self._judge)

    async def _roll_back(self, name: str, settings: TrafficSettings, version: int, why: str) -> None:
        """Set the weight of a version to 0, with a line in the audit log."""
        log.warning("model %s: version %d loses its weight: %s", name, version, why)
        call = Call()
        call.operation, call.subject = Operation.MODEL_CONTROL, name
        self._rollbacks.begin(call)
        code = Code.OK
        try:
            weights = self._with_weights(name, settings, {str(version): 0.0})
            by = f"rollback of version {version}: {why}"
            await self._act(name, replace(settings, weights=weights), by)
        except ServingError as error:
            code = error.code
            log.error("model %s: version %d keeps its weight: %s", name, version, error.message)
        finally:
            self._rollbacks.end(call, code)

    # --- what is shown ---

    def _counters(self) -> Iterator[Counter]:
        """Yield the metrics. Callable on another thread."""
        models = list(self._models.items())
        yield Counter(
            "triglot_traffic_percent",
            "Share of the calls that name no version, by version.",
            ("model", "version"),
            [
                ((name, str(version)), percent)
                for name, model in models
                if model.weights is not None
                for version, percent in model.weights.percent.items()
            ],
            gauge=True,
        )
        shadows = [
            ((name, str(model.shadow.settings)), model.shadow.counts.report())
            for name, model in models
            if model.shadow is not None
        ]
        yield Counter(
            "triglot_shadow_copies",
            "Copies of calls to a shadow.",
            ("model", "shadow", "result"),
            [
                ((*labels, result), count)
                for labels, counts in shadows
                for result, count in {
                    **{result: counts[result] for result in ("same", "different", "failed")},
                    **{f"dropped_{why}": count for why, count in counts["dropped"].items()},
                }.items()
            ],
        )
        yield Counter(
            "triglot_shadow_seconds",
            "Time of copied calls, and of their copies, which ended well.",
            ("model", "shadow", "side"),
            [
                ((*labels, side), counts[f"{side}_seconds"])
                for labels, counts in shadows
                for side in ("served", "shadow")
            ],
        )
        yield Counter(
            "triglot_shadow_largest_difference",
            "Largest difference of a shadow's number.",
            ("model", "shadow", "output"),
            [
                ((*labels, output), value)
                for labels, counts in shadows
                for output, value in counts["largest"].items()
            ],
            gauge=True,
        )

    async def read(self, change: TrafficChange, call: Call) -> dict[str, Any]:
        """Return a model's settings, and what its versions and its shadow did, as JSON values.

        Raise `ModelNotFound`.
        """
        self._require(change.model_name, call)
        return await self._document(change.model_name)

    async def _report(self, arguments: Arguments) -> dict[str, Any]:
        """Return the counts of this process."""
        calls, model = calls_of(self._telemetry, arguments["model"]), self._models.get(arguments["model"])
        shadow = {} if model is None or model.shadow is None else {"shadow": model.shadow.counts.report()}
        return {"versions": {str(number): counts for number, counts in calls.items()}, **shadow}

    async def _document(self, name: str) -> dict[str, Any]:
        reports = await self._dataplane.control.reports(TRAFFIC, {"model": name})
        counts = merged(reports.each, RULES)
        fields = traffic_fields(self._settings(name))
        if "shadow" in counts and fields["shadow"] is not None:
            fields["shadow"]["verdict"] = verdict(counts["shadow"])
        model = self._models.get(name)
        percent = {} if model is None or model.weights is None else model.weights.percent
        if not percent and (default := self._registry.serving(name)) is not None:
            percent = {default.files.version: 100.0}
        return {
            "model": name,
            **fields,
            "set_by": self._changes[name][2] if name in self._changes else "configuration",
            "versions": [
                {
                    "version": version.files.version,
                    "ready": version.ready,
                    "percent": percent.get(version.files.version, 0.0),
                    **_shown(counts["versions"].get(str(version.files.version), NO_CALLS)),
                }
                for _, version in sorted(self._registry.entries.get(name, {}).items(), reverse=True)
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
