"""The registry of model versions: what is wanted, the state of each version, and the look-up for requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from triglot.core.compiling import mypyc_attr
from triglot.core.errors import FailedPrecondition, InvalidArgument, ModelNotFound, Unavailable
from triglot.model.ensemble import Ensemble
from triglot.repository.config.settings import NAME, ModelSettings
from triglot.repository.config.traffic import TrafficSettings
from triglot.repository.config.version_names import VersionNames
from triglot.repository.manager.plan import State, Version, needs_load
from triglot.repository.scan.scanner import Wanted
from triglot.repository.scan.source import version_of
from triglot.scheduling.servable import Servable

ENDED_KEPT: Final = 100
"""Limit on the ended versions of a model that are remembered."""


@mypyc_attr(native_class=False)
class UnknownLabel(InvalidArgument):
    """Raised when the model has no such version label."""


class Changes:
    """Announces that the readiness of a model or of the server may have changed. On the event loop."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[str | None], object]] = []

    def subscribe(self, listener: Callable[[str | None], object]) -> None:
        """Call `listener` after each change, with the name of the model whose versions' state may have changed.

        None: the change is none of a version's state.
        """
        self._listeners.append(listener)

    def announce(self, name: str | None = None) -> None:
        """Call the listeners."""
        for listener in self._listeners:
            listener(name)


class Registry:
    """Every model version that was ever wanted, and the labels. Used on the event loop; nothing here blocks.

    `labels_before_load`: whether a new label may name a version that is not available yet. `may_be_empty`: whether
    the server is ready without any wanted model.
    """

    def __init__(self, *, labels_before_load: bool, may_be_empty: bool) -> None:
        self.changes = Changes()
        self._labels_before_load = labels_before_load
        self._may_be_empty = may_be_empty
        self.wanted: Wanted = {}
        self.entries: dict[str, dict[int, Version]] = {}
        """Versions by model name and version number."""
        self._default: dict[str, Servable] = {}
        self._draining: dict[str, list[Servable]] = {}
        self._unloaded: dict[str, Collection[int]] = {}
        """The versions that a model had when clients unloaded it."""
        self.labels: Mapping[str, Mapping[str, int]] = {}
        """Labels by model, as set by a list of models."""
        self.weights: Mapping[str, Mapping[str, float]] = {}
        """Weights of versions by model, as set by a list of models."""
        self.on_demand: Collection[str] = ()
        """Models that the first call loads."""
        self._names: dict[str, VersionNames] = {}
        """Version names and default versions that the models' folders set."""
        self._complete = False
        """Whether everything wanted was ready once."""

    # --- a request's model ---

    def servable(self, name: str, version: str = "", label: str = "") -> Servable:
        """Return the servable for a request for `name` and `version`, as `number_of` reads it.

        Use it in a `with` block at once: that is a lease of it. Raise `ModelNotFound`, `InvalidArgument` for a
        version that is neither a number nor a name, `UnknownLabel`, and `Unavailable` for a version that exists
        but is not ready.
        """
        if label:
            version = str(self.labelled(name, label))
        default = self._default.get(name)
        if not version:
            if default is None:
                self._known(name)
                raise ModelNotFound(f"Request for unknown model: '{name}' has no available versions")
            return default
        if default is not None and version == str(default.version):
            return default  # The fast path: most requests that name a version name this one.
        if not label and not (version := self.number_of(name, version)):
            return self.servable(name)
        entry = self.version(name, version)
        if entry.state is not State.READY or entry.servable is None:
            raise Unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")
        return entry.servable

    def in_memory(self, name: str) -> list[Servable]:
        """Return the serving servables of a model, the highest version first, and then those that drain."""
        entries = sorted(self.entries.get(name, {}).items(), reverse=True)
        serving = [version.servable for _, version in entries if version.state is State.READY]
        return [servable for servable in serving if servable is not None] + self.draining(name)

    def all_in_memory(self) -> list[Servable]:
        """Return the serving and draining servables of all models."""
        return [servable for name in self.entries for servable in self.in_memory(name)]

    def draining(self, name: str) -> list[Servable]:
        """Return the draining servables of a model, the newest first; open sequences continue in them."""
        return self._draining.get(name, [])[::-1]

    def start_drain(self, servable: Servable) -> None:
        """Mark a servable as draining: it takes no new calls."""
        self._draining.setdefault(servable.name, []).append(servable)

    def end_drain(self, servable: Servable) -> None:
        """Remove a drained servable, which is about to be closed."""
        self._draining[servable.name].remove(servable)

    def labelled(self, name: str, label: str) -> int:
        """Return the version that a label names, available or not. Raise `UnknownLabel` (tfs 3.1)."""
        if (number := self.labels_of(name).get(label)) is None:
            raise UnknownLabel(f"Unrecognized servable version label: {label}")
        return number

    def labels_of(self, name: str) -> dict[str, int]:
        """Return the version numbers of a model's labels; empty for an unknown model."""
        return {**self._names_of(name).numbers, **self.labels.get(name, {})}

    def number_of(self, name: str, version: str) -> str:
        """Return the number in a request's `version`, or that of the version name in it; "": the default version.

        The default version is meant by "", and by 0 if there is no version 0, as clients of OpenVINO Model Server
        say it. Anything else is returned unchanged.
        """
        if (number := self.labels_of(name).get(version)) is not None:
            return str(number)
        return "" if version == "0" and 0 not in self.wanted.get(name, {}) else version

    def names_of(self, name: str, numbers: Collection[int]) -> list[str]:
        """Return the names of these versions of a model."""
        return [label for label, number in self.labels_of(name).items() if number in numbers]

    def version(self, name: str, version: str) -> Version:
        """Return a version that is wanted or still in memory. Raise `ModelNotFound` or `InvalidArgument`."""
        versions = self._known(name)
        number = version_of(version)
        plain = number is not None and version == str(number)
        entry = versions.get(number) if plain and number is not None else None
        if entry is not None and self._is_current(entry):
            return entry
        if NAME.fullmatch(version) and not version.removeprefix("-").isdecimal():
            ready = self.ready_versions(name)
            known = ", ".join([*map(str, ready), *self.names_of(name, ready)])
            raise ModelNotFound(
                f"Request for unknown model: '{name}' version {version} is not found, only {known or 'none'}"
            )
        if not plain or number == 0:
            raise InvalidArgument(
                f"failed to get model version from specified version string '{version}' for model '{name}': "
                "expected a positive integer"
            )
        raise ModelNotFound(f"Request for unknown model: '{name}' version {version} is not found")

    def _known(self, name: str) -> dict[int, Version]:
        if name not in self.wanted:
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
        return self.entries[name]

    def _is_current(self, version: Version) -> bool:
        name, number = version.files.name, version.files.version
        if version.state is not State.UNAVAILABLE:
            return True
        if self._is_unloaded(name):
            # Only the versions that were unloaded, not those that they had replaced.
            return number in self._unloaded.get(name, ())
        return not self.wanted[name] or number in self.wanted[name]

    def _is_unloaded(self, name: str) -> bool:
        return self._may_be_empty and not self.wanted.get(name)

    def forget_errors(self, name: str) -> None:
        """Forgets the errors of a model that clients unload."""
        for version in self.entries[name].values():
            version.problem = None
            if version.state is State.UNAVAILABLE:
                version.error = None
        if self.wanted[name]:
            self._unloaded[name] = self.wanted[name].keys()

    def knows(self, name: str) -> bool:
        """Whether the model is wanted, ready or not, or a call loads it."""
        return name in self.wanted or name in self.on_demand

    def is_wanted(self, name: str, number: int = 0) -> bool:
        """Whether this version of the model is wanted; 0: any version."""
        wanted = self.wanted.get(name, {})
        return number in wanted if number else bool(wanted)

    def wanted_versions(self, name: str) -> list[Version]:
        """Return the known versions of a model that are wanted."""
        known = self.entries.get(name, {})
        return [known[number] for number in self.wanted.get(name, {}) if number in known]

    def serving(self, name: str, number: int = 0) -> Version | None:
        """Return the version if it serves; 0: the default version."""
        if not number:
            servable = self._default.get(name)
            return None if servable is None else self.entries[name][servable.version]
        return self.entries[name][number] if self.is_serving(name, number) else None

    def load_error(self, name: str, version: str = "") -> str:
        """Return why this version, or with "" the last of all, could not be loaded; "" if it was not tried."""
        failed = [
            wanted for wanted in self.wanted_versions(name) if wanted.failure and wanted.state is State.UNAVAILABLE
        ]
        found = [failed_load for failed_load in failed if version in ("", str(failed_load.files.version))]
        if not found:
            return ""
        # The text of an exception of the model's own code may be secret.
        return "it could not be loaded; the server's log says why" if found[-1].is_secret else found[-1].reason

    def why_not_serving(self, name: str, number: int = 0) -> str:
        """Return the reason why this version does not serve; 0: why no version does."""
        if not self.wanted.get(name):
            return "it was unloaded" if name in self.wanted else "there is no such model"
        failed = [version.reason for version in self.wanted_versions(name) if version.error is not None]
        if not number:
            return failed[-1] if failed else "no version of it is ready"
        entry = self.entries[name].get(number)
        if number not in self.wanted[name] or entry is None:
            return "there is no such version"
        return entry.reason or "it is not ready"

    def traffic_of(self, name: str) -> TrafficSettings:
        """Return how the configuration divides a model's calls among its versions."""
        traffic = self._names_of(name).traffic
        return replace(traffic, weights=weights) if (weights := self.weights.get(name)) else traffic

    # --- all models ---

    def ready_versions(self, name: str) -> list[int]:
        """Return the ready versions, ascending. Raise `ModelNotFound` for an unknown model."""
        return sorted(number for number, version in self._known(name).items() if version.ready)

    def names(self) -> list[str]:
        """Return the names of all wanted models, ready or not, and of those that a call loads."""
        return list(dict.fromkeys([*self.wanted, *self.on_demand]))

    def served(self) -> list[str]:
        """As `names`, without the models that clients have unloaded."""
        return [name for name in self.names() if name in self.on_demand or not self._is_unloaded(name)]

    def has_default(self, name: str) -> bool:
        """Whether a version of the model serves."""
        return name in self._default

    def is_ready(self, name: str, version: str = "") -> bool:
        """Whether a request for `name` and `version` would be executed. Raise as `version` does.

        An ensemble is ready if its parts are. A model that is on disk only is not.
        """
        if name in self.on_demand and not self.has_default(name):
            return False
        if number := self.number_of(name, version):
            entry = self.version(name, number)
            servable = entry.servable if entry.ready else None
        else:
            self._known(name)
            servable = self._default.get(name)
        return servable is not None and servable.alive and self._parts_ready(servable)

    def _parts_ready(self, servable: Servable) -> bool:
        """Whether the models of all steps are ready, recursively; True for a model without steps."""
        parts, seen = [servable], {servable}
        while parts:
            model = parts.pop().model
            for step in model.steps if isinstance(model, Ensemble) else ():
                part = self.serving(step.model, step.version)
                if part is None or part.servable is None or not part.servable.alive:
                    return False
                if part.servable not in seen:
                    seen.add(part.servable)
                    parts.append(part.servable)
        return True

    def all_ready(self) -> bool:
        """Whether everything wanted was ready once, something serves, and all that serves is alive.

        So a version or model that is added later does not affect readiness while it loads, nor if it fails.
        """
        serving = [version for version in self.versions() if version.state is State.READY]
        empty = self._may_be_empty and not any(self.wanted.values())
        return self._complete and (bool(serving) or empty) and all(version.ready for version in serving)

    def versions(self) -> Iterable[Version]:
        """Yield the versions of wanted models that are wanted or still in memory, ascending."""
        for name in self.wanted:
            for _, version in sorted(self.entries[name].items()):
                if self._is_current(version):
                    yield version

    def statuses(self, name: str) -> list[Version]:
        """Return every version of a model that was ever wanted, highest first (tfs 3.6).

        Of ended versions only the highest `ENDED_KEPT` are included. Raise `ModelNotFound`.
        """
        versions = self.entries.get(name)
        if not versions:
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
        return [version for _, version in sorted(versions.items(), reverse=True)]

    # --- changes ---

    def name_versions(self, name: str, names: VersionNames) -> None:
        """Set the version names of a model."""
        if names != self._names_of(name):
            self._names[name] = names
            self._choose_default(name)
            self.changes.announce()

    def _names_of(self, name: str) -> VersionNames:
        return self._names.get(name, VersionNames())

    def want(self, wanted: Wanted) -> None:
        """Replace what is wanted. A version that was not wanted before is loaded even if its last load failed."""
        before, self.wanted = self.wanted, wanted
        for name, versions in wanted.items():
            known = self.entries.setdefault(name, {})
            for number, files in versions.items():
                entry = known.get(number)
                newly_wanted = number not in before.get(name, {})
                if entry is None or (entry.closed_to_calls and newly_wanted):
                    known[number] = Version(files)
                elif entry.closed_to_calls and needs_load(entry, files):
                    known[number] = entry.restarted(files)
                elif newly_wanted:
                    entry.retry = entry.error is not None
        for name, known in self.entries.items():
            ended_versions = sorted(
                number
                for number, version in known.items()
                if version.state is State.UNAVAILABLE and number not in wanted.get(name, {})
            )
            for number in ended_versions:
                known[number].retry_at = None
            for number in ended_versions[:-ENDED_KEPT]:
                del known[number]
        # Not `update` for each model, as this runs after every scan.
        for name in self.entries:
            self._choose_default(name)
        complete = self._complete or all(map(self._is_complete, wanted))
        if before != wanted or complete is not self._complete:
            self._complete = complete
            self.changes.announce()

    def retry(self, name: str) -> None:
        """Mark the failed versions of a model for a retry at the next `want`."""
        for version in self.entries.get(name, {}).values():
            version.retry, version.retries = version.error is not None, 0

    def update(self, name: str) -> None:
        """Select the model's default version; must be called after each state change."""
        self._choose_default(name)
        if not self._complete and name in self.wanted and self._is_complete(name):
            self._complete = all(map(self._is_complete, self.wanted))
        self.changes.announce(name)

    def _choose_default(self, name: str) -> None:
        known = self.entries.get(name, {}) if name in self.wanted else {}
        ready = {number for number, version in known.items() if version.state is State.READY}
        if (named := self._names_of(name).default) is not None and ready:
            before = self._default.get(name)
            # The current default version stays until the named one serves.
            ready &= {named} if named in ready or before is None else {before.version}
        servable = known[max(ready)].servable if ready else None
        if servable is None:
            self._default.pop(name, None)
        else:
            self._default[name] = servable

    def _is_complete(self, name: str) -> bool:
        wanted, known = self.wanted[name], self.entries[name]
        return all(known[number].ready for number in wanted) if wanted else self._may_be_empty

    def is_serving(self, name: str, number: int) -> bool:
        """Whether this version takes requests."""
        entry = self.entries[name].get(number) if name in self.wanted else None
        return entry is not None and entry.state is State.READY

    def label(self, models: Sequence[ModelSettings]) -> None:
        """Replace the labels of all models. Raise `FailedPrecondition` before any change (tfs 3.7, 6.3).

        A label must name a version that serves; with `labels_before_load` also a version that it named before, or
        any version if it is new.
        """
        for model in models:
            before = self.labels.get(model.name, {})
            for label, number in model.labels.items():
                allowed = self._labels_before_load and before.get(label, number) == number
                if not allowed and not self.is_serving(model.name, number):
                    raise FailedPrecondition(
                        f"Request to assign label to version {number} of model {model.name}, which is not "
                        "currently available for inference"
                    )
        self.configure(models)
        self.changes.announce()

    def configure(self, models: Sequence[ModelSettings]) -> None:
        """Replace the labels and weights of all models; unlike in `label`, versions need not serve."""
        self.labels = {model.name: dict(model.labels) for model in models}
        self.weights = {model.name: dict(model.traffic) for model in models if model.traffic}
