"""The Dockerfile, whose commands run here without Docker: its folders lie in one of the test's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import triglot
from tests import environments
from tests.deployed import DEPLOY
from tests.kept_files import kept_files
from tests.process import clean_environment

dockerfile_parse = pytest.importorskip("dockerfile_parse", reason="the deploy environment has it")

DOCKERFILE = DEPLOY / "Dockerfile"
IGNORED = DEPLOY / "Dockerfile.dockerignore"
FOLDERS = ("/src", "/wheels", "/opt/triglot")
BUILD_SECONDS = 280


def stages() -> list[list[tuple[str, str]]]:
    """The instructions and their values of each stage."""
    found: list[list[tuple[str, str]]] = []
    for line in dockerfile_parse.DockerfileParser(str(DOCKERFILE)).structure:
        if line["instruction"] == "FROM":
            found.append([])
        if line["instruction"] != "COMMENT":
            found[-1].append((line["instruction"], line["value"]))
    return found


def values(stage: list[tuple[str, str]], name: str) -> list[str]:
    """Of all instructions of this name."""
    return [value for instruction, value in stage if instruction == name]


def test_copied_files_exist_and_are_sent_to_docker() -> None:
    build, image = stages()
    sources = [source for value in values(build, "COPY") for source in value.split()[:-1]]
    assert sources
    sent = {line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")}
    for source in sources:
        assert (environments.ROOT / source).exists()
        assert source in sent
    assert values(image, "COPY") == ["--from=build /opt/triglot /opt/triglot"]


def test_the_image() -> None:
    build, image = stages()
    # The environment's interpreter is a link to that of the image.
    assert values(build, "FROM")[0].split() == [*values(image, "FROM")[0].split(), "AS", "build"]
    assert values(image, "USER") == ["1000"]
    assert json.loads(values(image, "ENTRYPOINT")[0]) == ["triglot", "serve"]


def run_build(root: Path, libraries: Path | None = None) -> Path:
    """Run the commands of the build below a folder; returns the environment there.

    `libraries`: an environment whose libraries the new one has when the project is installed.
    """
    source, target = root / "src", root / "opt" / "triglot"
    source.mkdir()
    (build, _) = stages()
    here = environments.ROOT
    for value in values(build, "COPY"):
        *names, _target = value.split()
        for name in names:
            copy: Any = shutil.copytree if (here / name).is_dir() else shutil.copy
            copy(here / name, source / name)
    # Few of the installed modules are imported; pip wants "0" for "yes".
    environment = clean_environment(EXTRAS="jwt", PIP_NO_COMPILE="0")
    bin_folder = Path(environments.python("deploy")).parent
    environment["PATH"] = os.pathsep.join([str(bin_folder), environment["PATH"]])
    for command in values(build, "RUN"):
        for folder in FOLDERS:
            command = command.replace(folder, f"{root}{folder}")  # noqa: PLW2901
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if libraries is not None and "venv" in command:
            link_libraries(libraries, target)
    return target


def packages(environment: Path) -> Path:
    """The folder of an environment's packages."""
    (folder,) = environment.glob("lib/*/site-packages")
    return folder


def link_libraries(source: Path, target: Path) -> None:
    """Let an environment have another's packages, except for the project."""
    for file in packages(source).iterdir():
        if not file.name.startswith("triglot"):
            (packages(target) / file.name).symlink_to(file)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of the build have put the environment.

    The libraries are those of the first build with this Dockerfile and these requirements, which installed them.
    """
    source = DOCKERFILE.read_text() + (environments.ROOT / "pyproject.toml").read_text()
    first = kept_files(environments.python("deploy").parents[1], "image", source, run_build)
    return run_build(tmp_path_factory.mktemp("image"), first / "opt" / "triglot")


def test_what_it_installs_runs(installed: Path) -> None:
    # The image has a build of its own, whichever is tested.
    environment = clean_environment(PATH=f"{installed}/bin", PYTHONPATH="")
    done = subprocess.run(
        ["triglot", "check", "--json"], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "iris" in {model["model"] for model in json.loads(done.stdout)["models"]}
    version = subprocess.run(["triglot", "--version"], env=environment, capture_output=True, text=True, check=True)
    assert version.stdout == f"triglot {triglot.__version__} (pure Python)\n"


def test_it_has_the_extra_and_nothing_to_build_with(installed: Path) -> None:
    names = {path.name.partition("-")[0].lower() for path in installed.glob("lib/*/site-packages/*.dist-info")}
    assert {"triglot", "numpy", "grpcio", "pyjwt"} <= names
    assert not names & {"pip", "setuptools", "hatchling", "pytest"}
