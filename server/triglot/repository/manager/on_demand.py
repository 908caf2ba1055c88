"""Models on demand: a call to a model that is on disk only loads it, and the least recently used ones make room.

Strategy: a look-up that fails asks `missing`, which returns the error, or a `ModelNotLoaded` that loads the model.
Calls that wait for a model share its load. A model counts with the larger of its files' size and of what memory
grew by when it was loaded, or that of its processes. Before a load, `plan_room` chooses the models to
evict: idle ones; after `BUSY_SECONDS` busy ones, too, which take no new calls. Models that clients loaded stay.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from triglot.core.errors import RETRY_AFTER_SECONDS, ModelNotLoaded, QueueFull, ServingError, Unavailable
from triglot.executors.hosted import HostedModel
from triglot.platform.memory import resident_bytes, trim
from triglot.repository.manager.reconciler import Reconciler
from triglot.repository.manager.thread import in_thread
from triglot.repository.scan.source import ModelFiles

FIND_SECONDS = 1.0
"""Age of the list of models on disk after which a call to an unknown one has the disk searched again."""
BUSY_SECONDS = 1.0
"""Time to wait for a model to be idle, before a busy one is evicted."""
ROOM_SECONDS = 30.0
"""Time to wait for room."""
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds after a failed load in which no call tries again; doubled with each failure."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the models in memory, and on their bytes; 0: no limit."""

    models: int = 0
    bytes: int = 0

    def allow(self, models: int, size: int) -> bool:
        """Whether so many models of together `size` bytes may be in memory."""
        return (not self.models or models <= self.models) and (not self.bytes or size <= self.bytes)


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory. `used`: time of its last use. `stays`: it is pinned, needed by others, or loading."""

    name: str
    bytes: int
    used: float
    stays: bool = False
    busy: bool = False


def plan_room(
    residents: Iterable[Resident], limits: Limits, models: int, size: int, *, busy_too: bool = False
) -> list[str] | None:
    """Return the models to evict for so many more of together `size` bytes; None if that is not enough.

    The least recently used are evicted first, idle ones before busy ones.
    """
    residents = list(residents)
    models += len(residents)
    size += sum(resident.bytes for resident in residents)
    may_go = [resident for resident in residents if not resident.stays and (busy_too or not resident.busy)]
    evicted: list[str] = []
    for resident in sorted(may_go, key=lambda resident: (resident.busy, resident.used)):
        if limits.allow(models, size):
            break
        models, size = models - 1, size - resident.bytes
        evicted.append(resident.name)
    return evicted if limits.allow(models, size) else None


def bytes_of(versions: Sequence[ModelFiles]) -> int:
    """Return the size of the latest version's files. Blocks."""
    if not versions:
        return 0
    files = versions[-1]
    place = files.file if files.single_file else files.folder or files.file.parent
    places = [Path(folder) / name for folder, _, names in os.walk(place) for name in names]
    size = 0
    for file in [place] if place.is_file() else places:
        with suppress(OSError):  # Removed meanwhile.
            size += file.stat().st_size
    return size


@dataclass(frozen=True, slots=True)
class _Failure:
    """The last of `count` failed loads in a row: why, and until when (monotonic) no call tries again."""

    why: str
    until: float
    count: int


class OnDemand:
    """Loads models for calls, and makes room for them. Used on the event loop; `missing` on any thread.

    `find` returns the versions of each model on disk. `load` loads a model, as far as that succeeds; it raises
    `ServingError` for what the disk has. `unload` unloads models.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        limits: Limits,
        pinned: Collection[str],
        find: Callable[[], Awaitable[Mapping[str, Sequence[ModelFiles]]]],
        load: Callable[[str], Awaitable[object]],
        unload: Callable[[Collection[str]], object],
    ) -> None:
        self._reconciler = reconciler
        self._registry = reconciler.registry
        self._limits = limits
        self._pinned = set(pinned)
        self._find = find
        self._load_model = load
        self._unload = unload
        self._left_out: set[str] = set()
        """Models that clients have unloaded; no call loads them."""
        self._found: Mapping[str, Sequence[ModelFiles]] = {}
        self._found_at = 0.0
        self._finding = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._kept: Counter[str] = Counter()
        """How many calls wait for a model, or are about to use it."""
        self._coming: dict[str, int] = {}
        """Bytes of models that are to be loaded: there is room for them."""
        self._parts: dict[str, Collection[str]] = {}
        """Models in the steps of ensembles that are being loaded."""
        self._bytes: dict[str, int] = {}
        self._loaded_at: dict[str, float] = {}
        self._failures: dict[str, _Failure] = {}
        self._changed = asyncio.Event()
        self._registry.changes.subscribe(self._wake)

    # --- what a look-up finds ---

    def missing(self, name: str, error: ServingError) -> Exception:
        """Return what a look-up raises that ended with `error`: `ModelNotLoaded` if a load may change that."""
        now = time.monotonic()
        if name in self._left_out or self._registry.has_default(name):
            return error
        if name not in self._found and now - self._found_at < FIND_SECONDS:
            return error
        failure = self._failures.get(name)
        if failure is not None and now < failure.until and name not in self._loads:
            left = failure.until - now
            return Unavailable(f"{error.message}; a call in {left:.1f} s loads it again", retry_after=left)
        return ModelNotLoaded(name, error, partial(self.loading, name))

    def why(self, name: str) -> str:
        """Return why the model's files could not be loaded the last time; "" if they could."""
        failure = self._failures.get(name)
        return "" if failure is None else failure.why

    async def find(self) -> None:
        """Search the disk for models, unless that was done just now."""
        async with self._finding:
            if time.monotonic() - self._found_at >= FIND_SECONDS:
                self._found = await self._find()
                self._found_at = time.monotonic()
                self._registry.on_demand = self._found.keys() - self._left_out

    def folders_of(self, name: str) -> Collection[str] | None:
        """Return the names of folders of which one holds the model; None if it is not known."""
        if name not in self._found:
            return None  # Among hundreds of models it would take long to search all of them.
        return {name, *(part for files in self._found[name] for part in files.file.parts)}

    # --- what clients ask for ---

    def pin(self, name: str) -> None:
        """Note that a client loads a model, which then stays."""
        self._left_out.discard(name)
        self._pinned.add(name)
        self._failures.pop(name, None)
        self._registry.on_demand = self._found.keys() - self._left_out

    def leave_out(self, name: str) -> None:
        """Note that a client unloads a model: until a client loads it again, no call does."""
        self._pinned.discard(name)
        if name in self._found:
            self._left_out.add(name)
        self._registry.on_demand = self._found.keys() - self._left_out

    # --- loads ---

    @asynccontextmanager
    async def loading(self, name: str) -> AsyncIterator[None]:
        """Load the model, with all who wait for it, and keep it in the block. Raise `QueueFull` without room."""
        self._kept[name] += 1
        try:
            if (load := self._loads.get(name)) is None:
                load = self._loads[name] = asyncio.create_task(self._load(name))
                load.add_done_callback(partial(self._load_ended, name))
            await asyncio.shield(load)
            yield
        finally:
            self._kept[name] -= 1
            if not self._kept[name]:
                del self._kept[name]
            self._wake()

    def _load_ended(self, name: str, load: asyncio.Task[None]) -> None:
        del self._loads[name]
        if not load.cancelled():
            load.exception()  # Nobody may wait for it any longer.

    async def _load(self, name: str) -> None:
        if name not in self._found:
            await self.find()
        if name not in self._found:
            return
        why = ""
        async with self.room([name], wanted=lambda: self._kept[name] > 0):
            try:
                await self._load_model(name)
            except ServingError as error:
                why = error.message
        if not self._registry.has_default(name):
            count = 1 + (self._failures[name].count if name in self._failures else 0)
            delay = min(FIRST_DELAY * 2 ** (count - 1), LONGEST_DELAY)
            self._failures[name] = _Failure(why, time.monotonic() + delay, count)
            return
        self._failures.pop(name, None)
        self._loaded_at[name] = time.time()
        self._bytes[name] = max(self._measured(name), await self._size_of(name))
        # It may be larger than thought.
        self._evict(plan_room(self._residents(), self._limits, 0, 0) or ())

    async def _size_of(self, name: str) -> int:
        return await in_thread(partial(bytes_of, self._found.get(name, ())))

    def _measured(self, name: str) -> int:
        """Return the resident bytes of a model that was just loaded."""
        size = 0
        for servable in self._registry.in_memory(name):
            model = servable.model
            processes = model.pids if isinstance(model, HostedModel) else ()
            size += sum(map(resident_bytes, processes)) if processes else servable.load_bytes
        return size

    def parts_needed(self, name: str, parts: Collection[str]) -> None:
        """Keep the models in the steps of an ensemble that is being loaded."""
        self._parts[name] = parts

    def forget_parts(self, names: Iterable[str]) -> None:
        """Note that the loads of these models have ended."""
        for name in names:
            self._parts.pop(name, None)

    # --- room ---

    @asynccontextmanager
    async def room(self, names: Collection[str], wanted: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        """Evict models for these, and wait until they have left memory; in the block these count as loading.

        Raise `QueueFull` if they do not fit, and once they are no longer `wanted` while this waits.
        """
        evicted = await self._make_room(names, wanted)
        try:
            await self._reconciler.wait_for_drains(evicted)
            if evicted and self._limits.bytes:
                await in_thread(trim)
            yield
        finally:
            for name in names:
                self._coming.pop(name, None)
            self._wake()

    async def _make_room(self, names: Collection[str], wanted: Callable[[], bool]) -> Collection[str]:
        """Evict models, and return their names; these are `_coming` then. Raise as `room`."""
        began = time.monotonic()
        sizes = {name: self._bytes.get(name) or await self._size_of(name) for name in names}
        while True:
            waited = time.monotonic() - began
            residents = [resident for resident in self._residents() if resident.name not in sizes]
            plan = partial(plan_room, residents, self._limits, len(sizes), sum(sizes.values()))
            if (evicted := plan(busy_too=waited >= BUSY_SECONDS)) is not None:
                self._coming |= sizes
                self._evict(evicted)
                return evicted
            may_change = any(resident.busy for resident in residents) and waited < ROOM_SECONDS
            if not wanted() or not may_change:
                raise self._no_room(sizes, residents)
            await self._wait(residents, (BUSY_SECONDS if waited < BUSY_SECONDS else ROOM_SECONDS) - waited)

    def _evict(self, names: Collection[str]) -> None:
        if names:
            self._unload(names)

    async def _wait(self, residents: Iterable[Resident], seconds: float) -> None:
        """Wait until a busy model is idle, or something else has changed."""
        self._changed.clear()
        busy = [resident.name for resident in residents if resident.busy and not resident.stays]
        rests = [servable.at_rest() for name in busy for servable in self._registry.in_memory(name)]
        waits = [asyncio.ensure_future(wait) for wait in (*rests, self._changed.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _residents(self) -> list[Resident]:
        """Return the models in memory, and those that are being loaded."""
        registry, residents = self._registry, []
        parts = {part for parts in self._parts.values() for part in parts}
        for name in dict.fromkeys([*registry.wanted, *self._coming]):
            servables = registry.in_memory(name)
            loads = name in self._coming or name in self._reconciler.busy()
            if not servables and not loads:
                continue
            pending = loads or name in self._kept or not registry.has_default(name)
            stays = name in self._pinned or name in parts or bool(self._reconciler.dependents.needed_by(name))
            times = [servable.statistics.last_inference for servable in servables]
            residents.append(
                Resident(
                    name,
                    self._coming.get(name) or self._bytes.get(name, 0),
                    max([*times, self._loaded_at.get(name, 0.0)]),
                    stays=stays or pending,
                    busy=pending or any(servable.leases for servable in servables),
                )
            )
        return residents

    def _no_room(self, sizes: Mapping[str, int], residents: Sequence[Resident]) -> QueueFull:
        limits = self._limits
        names = " and ".join(f"'{name}'" for name in sizes)
        bounds = (
            ("max_loaded_models", limits.models, len(residents), len(sizes)),
            ("max_model_memory", limits.bytes, sum(model.bytes for model in residents), sum(sizes.values())),
        )
        texts = [
            f"{option} is {limit}, {used} are used, {needed} needed"
            for option, limit, used, needed in bounds
            if limit
        ]
        return QueueFull(
            f"there is no room for model {names}, as none of the loaded ones can be unloaded: {'; '.join(texts)}",
            retry_after=RETRY_AFTER_SECONDS,
        )

    def _wake(self, _: str | None = None) -> None:
        self._changed.set()

    def close(self) -> None:
        """End the loads; no call waits for them any longer."""
        for load in self._loads.values():
            load.cancel()
