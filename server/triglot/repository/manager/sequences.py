"""Routes the requests of a sequence to the version in which it began, even if another one serves (spec 5.2)."""

from __future__ import annotations

import asyncio
import logging

from triglot.core.types import InferenceRequest
from triglot.repository.manager.registry import Registry
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)


class SequenceRoutes:
    """Finds the version of a request that continues a sequence."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def find(self, request: InferenceRequest) -> Servable | None:
        """Return the version that holds the request's sequence, serving or draining; None if there is none."""
        sequence_id = request.parameters.get("sequence_id")
        if not sequence_id or request.parameters.get("sequence_start"):
            return None
        version = self._registry.number_of(request.model_name, request.model_version)
        for servable in self._registry.in_memory(request.model_name):
            if servable.sequences is None or version not in ("", str(servable.version)):
                continue
            if isinstance(sequence_id, int | str) and servable.sequences.holds(sequence_id):
                return servable
        return None

    def begin(self, servable: Servable, sequence_id: int | str) -> None:
        """End sequences with this id in draining versions, as a new one begins in `servable`."""
        for other in self._registry.draining(servable.name):
            if other is not servable and other.sequences is not None:
                other.sequences.end(sequence_id)

    async def wait_ended(self, at_most: float) -> None:
        """Wait until no sequence is open, `at_most` seconds."""
        tables = [
            servable.sequences for servable in self._registry.all_in_memory() if servable.sequences is not None
        ]
        waiting = [asyncio.ensure_future(table.empty.wait()) for table in tables if not table.empty.is_set()]
        if not waiting:
            return
        have = "1 version" if len(waiting) == 1 else f"{len(waiting)} versions"
        log.info("waiting up to %.0f s for open sequences of %s to end; new sequences are rejected", at_most, have)
        try:
            await asyncio.wait(waiting, timeout=at_most)
        finally:
            for waiter in waiting:
                waiter.cancel()
