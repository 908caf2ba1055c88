"""Whatever comes, goes, fails and is mended, in any order: an ensemble serves when all that it is made of does."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.repository.parts_on_disk import GatedLoads, Site
from tests.repository.reconciling import reconciling
from tests.waiting import until
from triglot.repository.manager.plan import State

MADE_OF = {"e": ("p", "q"), "f": ("e", "p"), "a": ("f", "q")}
NAMES = ("p", "q", *MADE_OF)
ACTIONS = st.tuples(st.sampled_from(NAMES), st.sampled_from(["come", "go", "fail", "mend"]))


class Expected:
    """What serves, by the rules: a model continues with its former files when its new ones fail."""

    def __init__(self) -> None:
        self.wanted: set[str] = set()
        self.failing: set[str] = set()
        self._loaded: set[str] = set()

    def note(self) -> None:
        """The loads of this moment have ended."""
        self._loaded = (self._loaded & self.wanted) | (self.wanted - self.failing)

    def serves(self, name: str) -> bool:
        return name in self.wanted and (
            all(map(self.serves, MADE_OF[name])) if name in MADE_OF else name in self._loaded
        )


@given(st.permutations(NAMES), st.lists(ACTIONS, max_size=12))
@settings(max_examples=15)
def test_any_order(first: list[str], then: list[tuple[str, str]]) -> None:
    actions = [*((name, "come") for name in first), *then]

    async def run(folder: Path) -> None:
        loads, expected = GatedLoads(), Expected()
        async with reconciling(loads) as reconciler:
            here = Site(reconciler, folder)
            for stamp, (name, action) in enumerate(actions, start=1):
                act(here, loads, expected, name, action, stamp)
                await until(lambda: is_as(here, expected))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


def act(here: Site, loads: GatedLoads, expected: Expected, name: str, action: str, stamp: int) -> None:
    """`stamp` makes the files new ones."""
    if action == "go":
        if name not in expected.wanted:
            return
        expected.wanted.discard(name)
        here.want(without=[name])
    else:
        if action != "come" and (name in MADE_OF or name not in expected.wanted):
            return
        if action == "fail":
            expected.failing.add(name)
            loads.failing[name] = "no disk"
        elif action == "mend":
            expected.failing.discard(name)
            loads.failing.pop(name, None)
        expected.wanted.add(name)
        parts = MADE_OF.get(name)
        here.want(here.ensemble(name, *parts, stamp=stamp) if parts else here.model(name, stamp=stamp))
    expected.note()


def is_as(here: Site, expected: Expected) -> bool:
    """Whether what should serve is ready, and all else that is wanted says why it is not."""
    for name in expected.wanted:
        ready = here.reconciler.registry.is_ready(name)
        if ready is not expected.serves(name):
            return False
        if not ready and (here.state(name) is not State.UNAVAILABLE or not here.reason(name)):
            return False
    return True
