"""Which kinds of calls are told apart: so many, whatever clients send and however often versions are swapped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from triglot.core.errors import Code
from triglot.telemetry.stats import ENDED, CallStats, Kind, ModelStats

MAX_MODEL_NAMES, LONGEST_NAME = 200, 128
"""Names that clients make up are told apart up to this number, and to this length in characters."""
MAX_KINDS = 20_000
"""Kinds of calls that are kept. When there are more, those that were not used for longest are forgotten."""
ENDED_KEPT = 5
"""Versions of a model that are told apart after they have ended: somebody may not have read their last numbers."""


class Endpoint(Protocol):
    """What keeps the calls of each kind. See `store.Endpoint`."""

    def calls(self) -> list[tuple[Kind, CallStats]]:
        """What is kept of each kind of call."""

    def forget(self, kind: Kind) -> None:
        """Keep nothing of this kind of call any more."""

    def fold(self, versions: Collection[tuple[str, int]]) -> int:
        """Count the calls of these versions as their models' `ENDED` ones; by how many kinds that makes fewer."""


class Kinds:
    """The kinds of calls of some endpoints, how many there are, and the calls of each version.

    `models`: these by name and version; calls that found no version are counted together, and so are those of a
    model's `ENDED` versions.
    """

    def __init__(self, endpoints: Mapping[Any, Endpoint]) -> None:
        self.models: dict[tuple[str, int], ModelStats] = {}
        self.count = 0
        self._endpoints = endpoints
        self._made_up: set[str] = set()

    def kind(self, model: str, version: int, code: Code) -> Kind:
        """The kind that a call is counted under; without a version, the name may be a client's invention."""
        if not version and model not in self._made_up:
            if len(self._made_up) >= MAX_MODEL_NAMES or len(model) > LONGEST_NAME:
                model = ""
            self._made_up.add(model)
        return Kind(model, version, code)

    def model(self, name: str, version: int) -> ModelStats:
        """The calls of a version."""
        return self.models.setdefault((name, version) if version else ("", 0), ModelStats())

    def make_room(self) -> None:
        """For one more kind: when there is none, forget what was not used for longest."""
        self.count += 1
        if self.count <= MAX_KINDS:
            return
        calls = [(endpoint, *call) for endpoint in self._endpoints.values() for call in endpoint.calls()]
        used = sorted((stats.used, at) for at, (_, _, stats) in enumerate(calls))
        doomed = {at for _, at in used[: MAX_KINDS // 10]}
        kept = set()
        for at, (endpoint, kind, stats) in enumerate(calls):
            if at in doomed:
                endpoint.forget(kind)
            else:
                kept.add(id(stats.model))
        self.models = {key: model for key, model in self.models.items() if id(model) in kept}
        self.count -= len(doomed)

    def fold(self, loaded: Collection[tuple[str, int]]) -> None:
        """Of each model's versions that are not `loaded`, tell the last that were called apart, and no others."""
        ended: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for (name, version), model in self.models.items():
            if version > 0 and (name, version) not in loaded:
                ended[name].append((model.used, version))
        doomed = {
            (name, version) for name, versions in ended.items() for _, version in sorted(versions)[:-ENDED_KEPT]
        }
        if not doomed:
            return
        for name, version in doomed:
            self.model(name, ENDED).merge(self.models.pop((name, version)))
        self.count -= sum([endpoint.fold(doomed) for endpoint in self._endpoints.values()])
