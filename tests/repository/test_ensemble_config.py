"""`ensemble_scheduling` in a config.pbtxt, and ensembles in a repository's folders."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.repository.parts_on_disk import GatedLoads, Site
from tests.repository.reconciling import reconciling
from tests.served_models import Function, ensemble, ints, serving, step, twice
from triglot import Config, Server
from triglot.core.call import MAX_MODEL_CALLS
from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.scheduling import Step
from triglot.repository.config.model_config import read_config
from triglot.repository.manager.plan import State
from triglot.repository.scan.source import ModelFiles, find_models

TENSORS = (
    'input { name: "x" data_type: TYPE_INT32 dims: -1 } output { name: "y" data_type: TYPE_INT32 dims: -1 }\n'
)
ONE = """step { model_name: "m" input_map { key: "a" value: "x" } output_map { key: "b" value: "y" } %s }"""
PLATFORM = 'platform: "ensemble"\n'


def write_config(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text)
    return folder


def read(folder: Path, text: str) -> ModelConfig:
    warnings: list[str] = []
    config = read_config(write_config(folder, text), warnings)
    assert warnings == []
    return config


def scheduling(*steps: str, more: str = "") -> str:
    return PLATFORM + TENSORS + f"ensemble_scheduling {{ {' '.join(steps)} {more} }}"


@pytest.mark.parametrize("platform", ['platform: "ensemble"', 'backend: "ensemble"'])
def test_steps(tmp_path: Path, platform: str) -> None:
    text = scheduling(
        ONE % "model_version: -1",
        'step { model_name: "n" model_version: 3 input_map { key: "p" value: "y" } '
        'input_map { key: "o" value: "x" } output_map { key: "q" value: "z" } }',
        ONE % "",
        more="max_inflight_requests: 5",
    ).replace(PLATFORM.strip(), platform)
    config = read(tmp_path / "e", text)
    assert config.backend == "ensemble"
    assert config.ensemble == (
        Step("m", {"a": "x"}, {"b": "y"}),
        Step("n", {"o": "x", "p": "y"}, {"q": "z"}, 3),
        Step("m", {"a": "x"}, {"b": "y"}),
    )
    assert config.max_inflight_requests == 5


def test_what_is_no_ensemble(tmp_path: Path) -> None:
    config = read(tmp_path / "e", 'backend: "python"')
    assert (config.ensemble, config.max_inflight_requests) == ((), 0)


def named(name: str) -> str:
    return (
        f'step {{ model_name: "{name}" input_map {{ key: "a" value: "x" }} output_map {{ key: "b" value: "y" }} }}'
    )


WRONG = {
    PLATFORM + TENSORS: "ensemble_scheduling: expected the steps of the ensemble, got none",
    scheduling(): "ensemble_scheduling.step: expected 1 to 1000 steps, got 0",
    scheduling(ONE % "").replace(PLATFORM, ""): ("platform: expected 'ensemble' with ensemble_scheduling, got ''"),
    scheduling(ONE % "").replace('"ensemble"', '"python"'): (
        "platform: expected 'ensemble' with ensemble_scheduling, got 'python'"
    ),
    scheduling(ONE % "") + "instance_group { count: 2 }": (
        "instance_group: expected none, as an ensemble runs on its steps' instances"
    ),
    scheduling(ONE % "model_version: -2"): (
        "ensemble_scheduling.step[0].model_version: expected at least 0, got -2"
    ),
    scheduling(ONE % 'model_namespace: "n"'): (
        "ensemble_scheduling.step[0].model_namespace: expected none, got 'n'"
    ),
    scheduling(ONE % "", 'step { model_name: "m" output_map { key: "b" value: "z" } }'): (
        "ensemble_scheduling.step[1].input_map: expected at least one tensor, got none"
    ),
    scheduling('step { model_name: "m" input_map { key: "a" value: "x" } }'): (
        "ensemble_scheduling.step[0].output_map: expected at least one tensor, got none"
    ),
    scheduling('step { model_name: "m" input_map { key: "a" value: "" } }'): (
        "ensemble_scheduling.step[0].input_map: expected names, got 'a' with ''"
    ),
    **{
        scheduling(named(name)): (
            "ensemble_scheduling.step[0].model_name: expected 1 to 128 letters, digits, '.', '_' and '-', not "
            f"starting with '.', got {name!r}"
        )
        for name in ("", "../m", "/etc/m", "m/1", ".m", "x" * 129)
    },
}


@pytest.mark.parametrize(("text", "reason"), WRONG.items(), ids=range(len(WRONG)))
def test_wrong(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path / "e", text)
    assert str(caught.value) == f"{tmp_path / 'e' / 'config.pbtxt'}: {reason}"


@pytest.mark.parametrize("versions", [(1,), (1, 3), ()])
def test_folders(tmp_path: Path, versions: tuple[int, ...]) -> None:
    """A version's folder may be empty; without one there is version 1, for not every tool keeps empty folders."""
    folder = write_config(tmp_path / "e", scheduling(ONE % "") + "version_policy { all {} }")
    for version in versions:
        (folder / str(version)).mkdir()
    found = find_models([tmp_path])
    assert not found.problems
    places = {files.version: (files.backend, files.file) for files in found.models["e"]}
    expected = {version: ("ensemble", folder / str(version)) for version in versions}
    assert places == (expected or {1: ("ensemble", folder)})


def test_a_link_that_leads_out(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "repository" / "e", scheduling(ONE % ""))
    (tmp_path / "elsewhere").mkdir()
    (folder / "1").symlink_to(tmp_path / "elsewhere")
    found = find_models([tmp_path / "repository"])
    (problem,) = found.problems.values()
    assert "a symbolic link leads out of" in str(problem)


HEAD = """
import triglot

class E(triglot.Ensemble):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    steps = [triglot.Step("m", {"x": "x"}, {"y": "y"})]
    """
STEP = 'steps = [triglot.Step("m", {"x": "x"}, {"y": "y"}, version=%s)]'
MODEL = """
import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""
NAMES = "expected names by name, got"


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (
            'steps = triglot.Step("m", {"x": "x"}, {"y": "y"})',
            "steps: expected a list of Step, got Step(model='m'",
        ),
        ("steps = None", "steps: expected a list of Step, got None"),
        ("steps = 'm'", "steps: expected a list of Step, got 'm'"),
        ("steps = {}", "steps: expected a list of Step, got {}"),
        ("steps = ['m']", "steps[0]: expected Step, got 'm'"),
        ('steps = [triglot.Step(1, {"x": "x"}, {"y": "y"})]', "steps[0].model: "),
        ('steps = [triglot.Step("m", ["x"], {"y": "y"})]', f"steps[0].inputs: {NAMES} ['x']"),
        ('steps = [triglot.Step("m", "x", {"y": "y"})]', f"steps[0].inputs: {NAMES} 'x'"),
        ('steps = [triglot.Step("m", {"x": 1}, {"y": "y"})]', f"steps[0].inputs: {NAMES} {{'x': 1}}"),
        ('steps = [triglot.Step("m", {1: "x"}, {"y": "y"})]', f"steps[0].inputs: {NAMES} {{1: 'x'}}"),
        ('steps = [triglot.Step("m", {"x": "x"}, None)]', f"steps[0].outputs: {NAMES} None"),
        (STEP % "'1'", "steps[0].version: expected an integer, got '1'"),
        (STEP % "-1", "steps[0].version: expected at least 0, got -1"),
        (STEP % "True", "steps[0].version: expected an integer, got True"),
        ("max_inflight_requests = -1", "max_inflight_requests: expected at least 0, got -1"),
        ("max_inflight_requests = '2'", "max_inflight_requests: expected an integer, got '2'"),
        ("max_inflight_requests = False", "max_inflight_requests: expected an integer, got False"),
    ],
)
async def test_what_a_class_cannot_say(tmp_path: Path, declaration: str, message: str) -> None:
    (tmp_path / "m.py").write_text(MODEL)
    file = tmp_path / "e.py"
    file.write_text(f"{HEAD}{declaration}\n")
    with pytest.raises(ModelLoadError) as caught:
        async with Server([tmp_path / "m.py", file], Config(grpc_port=0, rest_port=0)):
            pass
    assert str(caught.value.__cause__).startswith(f"{file}: {message}")


READY, UNAVAILABLE = State.READY, State.UNAVAILABLE
DEEP = 330
"""Levels for which Python has too few frames, where each level takes a few."""


def row(here: Site, prefix: str, levels: int, last: str) -> list[ModelFiles]:
    """Ensembles in a row, `prefix`0 being made of `prefix`1 and so on."""
    names = [*(f"{prefix}{at}" for at in range(levels)), last]
    return [here.ensemble(name, part) for name, part in itertools.pairwise(names)]


async def test_too_many_in_a_row(tmp_path: Path) -> None:
    async with reconciling(GatedLoads()) as reconciler:
        here = Site(reconciler, tmp_path)
        here.want(here.model("leaf"), *row(here, "e", DEEP, "leaf"))
        deepest = DEEP - MAX_MODEL_CALLS
        await here.until(**{f"e{at}": READY if at >= deepest else UNAVAILABLE for at in range(DEEP)})
        assert reconciler.registry.is_ready(f"e{deepest}")
        names = " -> ".join([*(f"e{at}" for at in range(deepest - 1, DEEP)), "leaf"])
        text = "config.pbtxt: expected at most 16 nested ensembles, got"
        assert here.reason(f"e{deepest - 1}") == f"e{deepest - 1}/{text}: {names}"
        here.want(without=["leaf"])
        await here.until(**{f"e{at}": UNAVAILABLE for at in range(DEEP)})


async def test_as_many_as_may_be_answer() -> None:
    names = [f"e{at:02d}" for at in range(MAX_MODEL_CALLS)]
    nested = {
        name: ensemble(step(part, "x", "y")) for name, part in zip(names, [*names[1:], "twice"], strict=True)
    }
    async with serving({"twice": Function(twice), **nested}) as served:
        assert (await served.infer(names[0], ints(1, 2))).tolist() == [2, 4]


async def test_a_row_that_grows_while_it_serves(tmp_path: Path) -> None:
    """Each part alone is nested as deep as may be; what is made of it is as ready, and stops with it."""
    async with reconciling(GatedLoads()) as reconciler:
        here = Site(reconciler, tmp_path)
        rows = [f"r{number}_" for number in range(DEEP // MAX_MODEL_CALLS + 1)]
        for prefix in rows:
            last = f"{prefix}last"
            here.want(here.model(last), *row(here, prefix, MAX_MODEL_CALLS - 1, last))
        firsts = {f"{prefix}0": READY for prefix in rows}
        await here.until(**firsts)
        for prefix, following in itertools.pairwise(rows):
            here.want(here.ensemble(f"{prefix}last", f"{following}0", stamp=1))
            await here.until(**{f"{prefix}last": READY})
            await reconciler.wait_for([f"{prefix}last"])
        assert reconciler.registry.is_ready(f"{rows[0]}0")
        here.want(without=[f"{rows[-1]}last"])
        assert not reconciler.registry.is_ready(f"{rows[0]}0")
        await here.until(**dict.fromkeys(firsts, UNAVAILABLE))
