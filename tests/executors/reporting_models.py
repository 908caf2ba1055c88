"""Models in processes of their own that do what the test says: their input is Python code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.direct_work import direct_infer
from tests.waiting import until
from triglot import Call, backends
from triglot.executors.loading import Loading
from triglot.executors.remote.pool import RestartPolicy
from triglot.executors.remote.remote_model import RemoteModel
from triglot.model.config import NO_CONFIG, ModelConfig
from triglot.model.configure import configure
from triglot.scheduling.servable import Servable

SECONDS = 60
"""How long anything may take; only a test that fails waits so long."""
QUICK = RestartPolicy(first_delay=0.01, end_timeout=SECONDS)
SOURCE = """
import asyncio, ctypes, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import triglot

class Reporting(triglot.Model):
    any_tensors = True
    execution = "process"

    def load(self, folder):
        self.folder = folder
        self.state = {{}}

    {infer}

    def run_code(self, inputs, call):
        names = {{**globals(), "self": self, "inputs": inputs, "call": call, "folder": self.folder}}
        code = inputs["code"].item().decode()
        try:
            program = compile(code, "reporting", "eval")
        except SyntaxError:
            exec(code, names)
            return self.answer(names.get("answer"))
        return self.answer(eval(program, names))

    def answer(self, value):
        return value if isinstance(value, dict) or value is None else {{"said": np.array([str(value)])}}

    def close(self):
        (self.folder / f"closed-{{os.getpid()}}").touch()
"""
PLAIN = """def infer(self, inputs, call):
        return self.run_code(inputs, call)"""
STREAM = """def infer(self, inputs, call):
        try:
            for number in range(int(inputs["count"])):
                (self.folder / f"made-{number}").touch()
                yield {**self.run_code(inputs, call), "number": np.array(number)}
        finally:
            (self.folder / "ended").touch()"""
ON_LOOP = """async def infer(self, inputs, call):
        try:
            names = {**globals(), "inputs": inputs, "call": call, "folder": self.folder}
            exec("async def run():\\n " + inputs["code"].item().decode().replace("\\n", "\\n "), names)
            return self.answer(await names["run"]())
        finally:
            (self.folder / "ended").touch()"""
STREAM_ON_LOOP = """async def infer(self, inputs, call):
        try:
            for number in range(int(inputs["count"])):
                await asyncio.sleep(0)
                yield {**self.run_code(inputs, call), "number": np.array(number)}
        finally:
            (self.folder / "ended").touch()"""


def write_reporting(folder: Path, infer: str = PLAIN, more: str = "") -> Path:
    """The file of such a model; `more` is for the end of it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.py"
    file.write_text(SOURCE.format(infer=infer) + more)
    return file


CPUS, MAX_INFLIGHT = 0.1, 2
"""Of each actor."""
RESOURCES: Mapping[str, float] = {}
"""Custom resources of each actor."""
RAY: list[str] = []
"""The address of the Ray cluster whose actors are the processes; none: they are this machine's."""


def load(file: Path, config: ModelConfig = NO_CONFIG, policy: RestartPolicy = QUICK) -> RemoteModel:
    """The model of this file in its processes. Raise `ModelLoadError`."""
    if RAY:
        # They leave files where the test looks for them.
        options = {
            "num_cpus": CPUS,
            "resources": RESOURCES,
            "send_files": False,
            "placement": "spread",
            "max_inflight": MAX_INFLIGHT,
        }
        config = replace(config, execution="ray", ray=options)
    model = Loading(backends.load, policy, *RAY)("reporting", "python", file, config)
    try:
        configure(model, config)
        model.start()
    except BaseException:
        model.close()
        raise
    return model


def code(text: str, **inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs that have the model run this."""
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    return {"code": np.array([text.encode()], object).reshape(()), **arrays}


class Reporting:
    """One version of such a model, on the loop."""

    def __init__(self, model: RemoteModel, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.changes: asyncio.Queue[bool] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        model.loop = loop
        model.on_change = lambda: loop.call_soon_threadsafe(self.changes.put_nowait, model.alive)
        self.servable = Servable("reporting", 1, model, max_queue_size=1000)

    async def run(self, text: str, call: Call | None = None, **inputs: Any) -> Any:
        """What the model answers: a dict of arrays."""
        return await asyncio.wait_for(direct_infer(self.servable, code(text, **inputs), call or Call()), SECONDS)

    async def ask(self, text: str, call: Call | None = None, **inputs: Any) -> str:
        """What the model answers, as text."""
        answer: bytes = (await self.run(text, call, **inputs))["said"].item()
        return answer.decode()

    async def pid(self) -> int:
        """Of a process."""
        return int(await self.ask("os.getpid()"))

    async def entered(self, name: str, times: int = 1) -> None:
        """Until the model has left this file in its folder, or so many whose names begin so."""
        await until(lambda: len(self.files(name)) >= times)

    def files(self, name: str) -> list[str]:
        """The names of the files in its folder that begin with `name`."""
        return sorted(path.name for path in self.folder.glob(f"{name}*"))

    def readings(self) -> Mapping[str, float]:
        """What the model counts."""
        return {
            " ".join([reading.name, *reading.labels.values()]): reading.value for reading in self.model.readings()
        }


class Kept:
    """Loaded models that several tests use in turn, as an actor takes seconds to start. To be closed.

    They are loaded from a symbolic link, `folder / "now"`, to the folder of the test that uses them.
    """

    def __init__(self, folder: Path) -> None:
        self._link = folder / "now"
        self._models: dict[tuple[str, str], RemoteModel] = {}

    def load(self, folder: Path, infer: str, more: str) -> RemoteModel:
        """Return the model, whose folder is the test's from now on."""
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(folder)
        write_reporting(folder, infer, more)
        if (infer, more) not in self._models:
            model = self._models[infer, more] = load(self._link / "model.py")
            model.close = lambda: None  # type: ignore[method-assign]  # Servables close their model.
        return self._models[infer, more]

    def close(self) -> None:
        """End the models."""
        for model in self._models.values():
            type(model).close(model)


KEPT: list[Kept] = []
"""The models to use; none: each test loads its own."""


@asynccontextmanager
async def reporting(
    folder: Path,
    infer: str = PLAIN,
    config: ModelConfig = NO_CONFIG,
    policy: RestartPolicy = QUICK,
    more: str = "",
) -> AsyncIterator[Reporting]:
    """A loaded model; it is closed in the end, and then none of its processes is left."""
    if KEPT:
        model = await asyncio.to_thread(KEPT[0].load, folder, infer, more)
    else:
        model = await asyncio.to_thread(load, write_reporting(folder, infer, more), config, policy)
    served = Reporting(model, folder)
    try:
        yield served
    finally:
        await served.servable.close()
        if not KEPT:
            await until(lambda: not served.servable.alive and not model._pool._slots)


def children() -> list[str]:
    """The instances that this process has started and not ended, zombies too; not what other tests started."""
    found: list[str] = []
    for file in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # The thread has ended in the meantime.
            found += file.read_text().split()
    return [pid for pid in found if _is_instance(pid)]


def _is_instance(pid: str) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        leads = os.getsid(int(pid)) == int(pid)  # Unlike the process that forks it.
    except OSError:
        return False  # It has ended just now.
    return leads and (not command or b"triglot.executors.process" in command)  # A zombie has none.
