"""The end of a model: its waiter finds nothing that holds it."""

from __future__ import annotations

import threading
import weakref

import pytest

from triglot import Model
from triglot.scheduling.servable import unload


class Closed(Model):
    def infer(self, inputs: object) -> None:
        """It is not called."""


class Waited:
    """What has to be over before a model is closed."""

    def until(self) -> None:
        """It is over."""


async def test_a_thread_that_has_not_ended_yet_holds_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    threads: list[threading.Thread] = []

    class Lingering(threading.Thread):
        def run(self) -> None:
            threads.append(self)
            super().run()
            gate.wait()

        # As if `run` had not come to the line where it forgets what it ran.
        @property
        def _target(self) -> object:
            return self._kept

        @_target.setter
        def _target(self, target: object) -> None:
            self._kept = target

        @_target.deleter
        def _target(self) -> None:
            pass

    monkeypatch.setattr(threading, "Thread", Lingering)
    model, waited = Closed(), Waited()
    held = weakref.ref(model), weakref.ref(waited)
    await unload(model, "model 'm'", waited.until)
    del model, waited
    assert [reference() for reference in held] == [None, None]
    assert [thread.is_alive() for thread in threads] == [True]
    gate.set()
    threads[0].join()
