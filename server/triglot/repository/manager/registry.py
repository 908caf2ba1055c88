"""What is wanted and what is known of it: plain values, and the way from a request's model to a servable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from triglot.core.errors import FailedPrecondition, InvalidArgument, ModelNotFound, Unavailable
from triglot.repository.config.settings import ModelSettings
from triglot.repository.config.version_names import VersionNames
from triglot.repository.manager.plan import State, Version, needs_load
from triglot.repository.scan.scanner import Wanted
from triglot.repository.scan.source import version_of
from triglot.scheduling.servable import Servable

ENDED_KEPT = 100
"""Versions of a model that are remembered after they have ended."""


class UnknownLabel(InvalidArgument):
    """The model has no such version label."""


class Registry:
    """Every model version that was ever wanted, and the labels. Nothing here waits.

    `labels_before_load`: a new label may point to a version that is not available yet. `may_be_empty`: without a
    wanted model everything is ready, too.
    """

    def __init__(self, *, labels_before_load: bool, may_be_empty: bool) -> None:
        self.on_change: Callable[[], object] = lambda: None
        """Called when readiness may have changed."""
        self.on_update: Callable[[str], object] = lambda _: None
        """Called when a state of this model has changed."""
        self.has_its_parts: Callable[[Servable], bool] = lambda _: True
        """Whether what an ensemble is made of is ready."""
        self._labels_before_load = labels_before_load
        self._may_be_empty = may_be_empty
        self.wanted: Wanted = {}
        self.entries: dict[str, dict[int, Version]] = {}
        """By the model's name and the version's number."""
        self._default: dict[str, Servable] = {}
        self._leaving: dict[str, list[Servable]] = {}
        self._unloaded: dict[str, Collection[int]] = {}
        """The versions that a model had which clients have unloaded."""
        self.labels: Mapping[str, Mapping[str, int]] = {}
        """Of a list of models."""
        self._names: dict[str, VersionNames] = {}
        """What the models' folders call versions."""
        self._complete = False

    # --- a request's model ---

    def servable(self, name: str, version: str = "", label: str = "") -> Servable:
        """The servable that a request for `name` and `version` (empty: the default one) goes to.

        A `with` block that is entered at once is a lease of it. Raises `ModelNotFound`, `InvalidArgument` for a
        version that is no integer, `UnknownLabel`, and `Unavailable` for a version that exists but is not ready.
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
            return default  # Most requests that name a version name this one.
        entry = self.version(name, version)
        if entry.state is not State.READY or entry.servable is None:
            raise Unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")
        return entry.servable

    def in_memory(self, name: str) -> list[Servable]:
        """What serves of a model, the highest version first, and then what is leaving."""
        entries = sorted(self.entries.get(name, {}).items(), reverse=True)
        serving = [version.servable for _, version in entries if version.state is State.READY]
        return [servable for servable in serving if servable is not None] + self.leaving(name)

    def all_in_memory(self) -> list[Servable]:
        """As `in_memory`, of all models."""
        return [servable for name in self.entries for servable in self.in_memory(name)]

    def leaving(self, name: str) -> list[Servable]:
        """What takes no new calls and is still there, the newest first: for sequences that go on in it."""
        return self._leaving.get(name, [])[::-1]

    def leaves(self, servable: Servable) -> None:
        """It takes no new calls from now on."""
        self._leaving.setdefault(servable.name, []).append(servable)

    def has_left(self, servable: Servable) -> None:
        """It is about to be closed."""
        self._leaving[servable.name].remove(servable)

    def labelled(self, name: str, label: str) -> int:
        """The version that a label names, available or not. Raises `UnknownLabel` (tfs 3.1)."""
        if (number := self.labels_of(name).get(label)) is None:
            raise UnknownLabel(f"Unrecognized servable version label: {label}")
        return number

    def labels_of(self, name: str) -> dict[str, int]:
        """The version that each label of a model names; none of a model that nobody knows."""
        return {**self._names_of(name).numbers, **self.labels.get(name, {})}

    def version(self, name: str, version: str) -> Version:
        """The entry of one version that is wanted or still there. Raises `ModelNotFound` or `InvalidArgument`."""
        versions = self._known(name)
        number = version_of(version)
        plain = number is not None and version == str(number)
        entry = versions.get(number) if plain and number is not None else None
        if entry is not None and self._is_current(entry):
            return entry
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
            # What was replaced before is not remembered with what was unloaded.
            return number in self._unloaded.get(name, ())
        return not self.wanted[name] or number in self.wanted[name]

    def _is_unloaded(self, name: str) -> bool:
        return self._may_be_empty and not self.wanted[name]

    def unloads(self, name: str) -> None:
        """Clients unload the model: why a version of it failed does not matter any more."""
        for version in self.entries[name].values():
            version.problem = None
            if version.state is State.UNAVAILABLE:
                version.error = None
        if self.wanted[name]:
            self._unloaded[name] = self.wanted[name].keys()

    def knows(self, name: str) -> bool:
        """Whether the model is wanted, ready or not."""
        return name in self.wanted

    def is_wanted(self, name: str, number: int = 0) -> bool:
        """Whether a version of the model is wanted; 0: any."""
        wanted = self.wanted.get(name, {})
        return number in wanted if number else bool(wanted)

    def wanted_versions(self, name: str) -> list[Version]:
        """What is known of the versions of a model that are wanted."""
        known = self.entries.get(name, {})
        return [known[number] for number in self.wanted.get(name, {}) if number in known]

    def serving(self, name: str, number: int = 0) -> Version | None:
        """The version, 0: the one that is meant when none is named, if it serves."""
        if not number:
            servable = self._default.get(name)
            return None if servable is None else self.entries[name][servable.version]
        return self.entries[name][number] if self.is_serving(name, number) else None

    def why_not_serving(self, name: str, number: int = 0) -> str:
        """Why such a version does not serve."""
        if not self.wanted.get(name):
            return "it was unloaded" if name in self.wanted else "there is no such model"
        failed = [version.reason for version in self.wanted_versions(name) if version.error is not None]
        if not number:
            return failed[-1] if failed else "no version of it is ready"
        entry = self.entries[name].get(number)
        if number not in self.wanted[name] or entry is None:
            return "there is no such version"
        return entry.reason or "it is not ready"

    # --- all models ---

    def ready_versions(self, name: str) -> list[int]:
        """The versions that serve, ascending. Raises `ModelNotFound` for an unknown model."""
        return sorted(number for number, version in self._known(name).items() if version.ready)

    def names(self) -> list[str]:
        """Every model that is wanted, ready or not."""
        return list(self.wanted)

    def served(self) -> list[str]:
        """As `names`, without what clients have unloaded."""
        return [name for name in self.wanted if not self._is_unloaded(name)]

    def has_default(self, name: str) -> bool:
        """Whether a version of the model serves."""
        return name in self._default

    def is_ready(self, name: str, version: str = "") -> bool:
        """Whether a request for `name` and `version` would be run. Raises as `version`.

        An ensemble is ready when what it is made of is.
        """
        if version:
            entry = self.version(name, version)
            servable = entry.servable if entry.ready else None
        else:
            self._known(name)
            servable = self._default.get(name)
        return servable is not None and servable.alive and self.has_its_parts(servable)

    def all_ready(self) -> bool:
        """Whether everything wanted was ready once, something serves, and all that serves is alive.

        So a version or a model that comes later does not take readiness away while it loads, nor when it fails.
        """
        serving = [version for version in self.versions() if version.state is State.READY]
        empty = self._may_be_empty and not any(self.wanted.values())
        return self._complete and (bool(serving) or empty) and all(version.ready for version in serving)

    def versions(self) -> Iterable[Version]:
        """Every version of the wanted models that is wanted or still there, ascending."""
        for name in self.wanted:
            for _, version in sorted(self.entries[name].items()):
                if self._is_current(version):
                    yield version

    def statuses(self, name: str) -> list[Version]:
        """Every version of a model that was ever wanted, highest first (tfs 3.6). Raises `ModelNotFound`.

        Of those that ended, the highest `ENDED_KEPT`.
        """
        versions = self.entries.get(name)
        if not versions:
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
        return [version for _, version in sorted(versions.items(), reverse=True)]

    # --- changes ---

    def name_versions(self, name: str, names: VersionNames) -> None:
        """Have the versions of a model be called so."""
        if names != self._names_of(name):
            self._names[name] = names
            self._choose(name)
            self.on_change()

    def _names_of(self, name: str) -> VersionNames:
        return self._names.get(name, VersionNames())

    def want(self, wanted: Wanted) -> None:
        """Replace what is wanted. A version that was not wanted before is tried, whatever came of its last try."""
        before, self.wanted = self.wanted, wanted
        for name, versions in wanted.items():
            known = self.entries.setdefault(name, {})
            for number, files in versions.items():
                entry = known.get(number)
                forgiven = number not in before.get(name, {})
                if entry is None or (entry.gone and forgiven):
                    known[number] = Version(files)
                elif entry.gone and needs_load(entry, files):
                    known[number] = entry.begun_anew(files)
                elif forgiven:
                    entry.retry = entry.error is not None
        for name, known in self.entries.items():
            ended = sorted(
                number
                for number, version in known.items()
                if version.state is State.UNAVAILABLE and number not in wanted.get(name, {})
            )
            for number in ended:
                known[number].retry_at = None
            for number in ended[:-ENDED_KEPT]:
                del known[number]
        # Not `update` of each: this is done at every look at the disk.
        for name in self.entries:
            self._choose(name)
        complete = self._complete or all(map(self._is_complete, wanted))
        if before != wanted or complete is not self._complete:
            self._complete = complete
            self.on_change()

    def retry(self, name: str) -> None:
        """Have what failed of a model tried again when it is wanted next."""
        for version in self.entries.get(name, {}).values():
            version.retry, version.retries = version.error is not None, 0

    def update(self, name: str) -> None:
        """Choose the model's default version; to be called after each change of a state."""
        self._choose(name)
        if not self._complete and name in self.wanted and self._is_complete(name):
            self._complete = all(map(self._is_complete, self.wanted))
        self.on_change()
        self.on_update(name)

    def _choose(self, name: str) -> None:
        known = self.entries.get(name, {}) if name in self.wanted else {}
        ready = {number for number, version in known.items() if version.state is State.READY}
        if (named := self._names_of(name).default) is not None and ready:
            before = self._default.get(name)
            # What answers so far goes on until the version serves that is to take its place.
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
        """Whether requests for this version are taken."""
        entry = self.entries[name].get(number) if name in self.wanted else None
        return entry is not None and entry.state is State.READY

    def label(self, models: Sequence[ModelSettings]) -> None:
        """Replace the labels of all models. Raises `FailedPrecondition`, and changes nothing (tfs 3.7, 6.3).

        A label names a version that serves, or, with `labels_before_load`, one that it named before or that is
        the first it names.
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
        self.labels = {model.name: dict(model.labels) for model in models}
