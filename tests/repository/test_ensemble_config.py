"""`ensemble_scheduling` in a config.pbtxt, and ensembles in a repository's folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.scheduling import Step
from triglot.repository.config.model_config import read_config
from triglot.repository.scan.source import find_models

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
