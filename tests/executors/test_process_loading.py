"""Instances as processes: what is loaded where, and how it fails."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.executors.reporting_models import PLAIN, SECONDS, children, load, reporting, write_reporting
from tests.waiting import until
from triglot import Model, ModelLoadError, TensorSpec, backends
from triglot.core.errors import MissingDependency
from triglot.executors.loading import Loading
from triglot.model.config import ModelConfig
from triglot.repository.manager.loader import Loader
from triglot.repository.scan.source import ModelFiles

TWO_INSTANCES = "\nReporting.instances = 2\n"

# --- loading ---

LOAD = "\ndef load(self, folder):\n    {}\nReporting.load = load\n"


@pytest.mark.parametrize(
    "more",
    [
        "import no_such_module\n",
        "import tensorrt_of_nobody.parts\n",
        "1 / 0\n",
        "def (\n",
        LOAD.format("raise RuntimeError('no weights')"),
        LOAD.format("raise triglot.ModelLoadError('no weights here')"),
        LOAD.format("exit(3)"),
        "Reporting.infer = lambda self: 3\n",
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no text')\nraise Odd()\n",
        "Reporting.hang_seconds = 'x'\n",
        "Reporting.hang_seconds = float('nan')\n",
        "Reporting.longest_run = '60'\n",
        "Reporting.cpus = 5\n",
        "class Second(Reporting): pass\n",
    ],
)
async def test_load_errors_read_as_those_of_a_thread(tmp_path: Path, more: str) -> None:
    file = write_reporting(tmp_path, more=more)
    before = file.read_text()
    file.write_text(before.replace('execution = "process"', 'execution = "thread"'))
    wanted = await failure_on_a_thread(file)
    file.write_text(before)
    configured = ModelConfig(execution="process")
    with pytest.raises(ModelLoadError) as caught:
        await asyncio.to_thread(load, file, configured)
    assert (str(caught.value), caught.value.code) == (str(wanted), wanted.code)
    assert isinstance(caught.value, MissingDependency) is isinstance(wanted, MissingDependency)
    assert children() == []


async def nothing_more(_: object) -> None:
    """What it needs besides itself."""


async def failure_on_a_thread(file: Path) -> ModelLoadError:
    """As the server words it."""

    with pytest.raises(ModelLoadError) as caught:
        await Loader(backends.load, None, 10).open(ModelFiles("reporting", 1, "python", file), nothing_more)
    return caught.value


@pytest.mark.parametrize(
    ("does", "text"),
    [
        ("os._exit(4)", "exited with status 4"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"was terminated by SIGKILL \(out of memory\?\)"),
        ("os.abort()", "was terminated by SIGABRT"),
    ],
)
async def test_a_process_that_ends_while_it_loads(tmp_path: Path, does: str, text: str) -> None:
    file = write_reporting(tmp_path, more=LOAD.format(does))
    with pytest.raises(ModelLoadError, match=rf"model.py: its process {text} while it loaded the model"):
        await asyncio.to_thread(load, file)
    assert children() == []


@pytest.mark.parametrize("instance", [0, 1])
async def test_cancelled_load_ends_at_once(tmp_path: Path, instance: int) -> None:
    waits = f"600 * (len(list(folder.glob('in-*'))) > {instance})"
    does = f"(folder / f'in-{{os.getpid()}}').touch(); time.sleep({waits})"
    file = write_reporting(tmp_path, more=LOAD.format(does) + TWO_INSTANCES)
    loading = Loading(backends.load)

    def run() -> None:
        model = loading("reporting", "python", file, ModelConfig())
        try:
            model.start()
        finally:
            model.close()

    running = asyncio.ensure_future(asyncio.to_thread(run))
    await until(lambda: len(list(tmp_path.glob("in-*"))) > instance)
    async with asyncio.timeout(SECONDS):
        loading.cancel_load()
        with pytest.raises(ModelLoadError, match="was stopped"):
            await running
    assert children() == []


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("Reporting.takes_messages = True\n", "expected 'thread' for a model that takes whole messages"),
        ("Reporting.example = {'x': object()}\n", "example: a value of object cannot be passed"),
        ("Reporting.instances = 'auto'\n", "instances: expected an integer with execution 'process', got 'auto'"),
    ],
)
async def test_what_a_process_cannot_do(tmp_path: Path, more: str, text: str) -> None:
    with pytest.raises(ModelLoadError, match=text):
        await asyncio.to_thread(load, write_reporting(tmp_path, more=more))


async def test_what_is_loaded_by_a_function_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"execution: expected 'thread', got 'process'"):
        Loading(lambda *_: None)("reporting", "python", tmp_path / "model.py", ModelConfig())  # type: ignore[arg-type]


# --- where it runs ---


async def test_processes_run_on_their_cpus(tmp_path: Path) -> None:
    available = sorted(os.sched_getaffinity(0))
    cpus = [available[-1], available[0]]
    async with reporting(tmp_path, config=ModelConfig(cpus=cpus), more=TWO_INSTANCES) as served:
        gate = (
            "(folder / f'in-{os.getpid()}').touch()\nwhile len(list(folder.glob('in-*'))) < 2: time.sleep(0.005)"
        )
        answers = await asyncio.gather(
            *(served.ask(f"{gate}\nanswer = os.sched_getaffinity(0)") for _ in range(2))
        )
        assert sorted(answers) == sorted(str({cpu}) for cpu in cpus)


@pytest.mark.parametrize("by", ["class", "configuration"])
async def test_missing_cpus(tmp_path: Path, by: str) -> None:
    file = write_reporting(tmp_path, more="Reporting.cpus = [4095]\n" if by == "class" else "")
    config = ModelConfig() if by == "class" else ModelConfig(cpus=[4095])
    with pytest.raises(ModelLoadError, match=r"cpus: expected CPUs that this server may use, \[.*\], got 4095"):
        await asyncio.to_thread(load, file, config)


@pytest.mark.parametrize("to_file", [False, True])
async def test_a_process_logs_as_the_server(
    to_file: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT-3")
    file = tmp_path / "log"
    handler = logging.FileHandler(file) if to_file else logging.StreamHandler()
    formatter = logging.Formatter("%(asctime)s %(levelname)s here: %(message)s", "%z")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.addHandler(handler)
    before = root.level
    root.setLevel("INFO")
    try:
        async with reporting(tmp_path, PLAIN) as served:
            await served.run(
                "import logging\nlogging.info('noted')\nprint('printed')\nprint('wrong', file=sys.stderr)"
            )
        logging.info("gone on")
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert {"printed", "wrong"} <= set(err.splitlines())
    lines = (file.read_text() if to_file else err).splitlines()
    assert {"+0000 INFO here: noted", "+0000 INFO here: gone on"} <= set(lines)


@pytest.mark.parametrize("by", ["class", "configuration"])
async def test_a_model_that_is_given_as_an_object_stays_here(by: str) -> None:
    class Given(Model):
        inputs = outputs = [TensorSpec("x", "FP32", [1])]
        execution = "process" if by == "class" else "thread"

        def infer(self, inputs: Any) -> Any:
            return inputs

    config = ModelConfig(execution="process" if by == "configuration" else "")
    files = ModelFiles("given", 1, "python", Path("given.py"), make=Given, config=config)
    with pytest.raises(
        ModelLoadError,
        match="given version 1: execution: expected 'thread' for a model object",
    ):
        await Loader(backends.load, None, 10).open(files, nothing_more)


async def test_the_configuration_has_the_last_word(tmp_path: Path) -> None:
    file = write_reporting(tmp_path)
    files = ModelFiles("reporting", 1, "python", file, config=ModelConfig(execution="thread"))
    servable = await Loader(backends.load, None, 10).open(files, nothing_more)
    assert servable.model.execution == "thread"
    assert children() == []
    await servable.close()
