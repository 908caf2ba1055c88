"""Triton's Python models that bring their Python along, in a folder or packed (EXECUTION_ENV_PATH)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import triglot
from tests.backends.triton_served import X_TO_Y, serving, write_model
from tests.waiting import until
from triglot.core.errors import Code, ServingError
from triglot.executors.process.environment import LENT
from triglot.platform.archives import tar_filter, unpack
from triglot.platform.unpacked import COMPLETE, FOLDER

X = {"X": np.arange(3, dtype=np.int32)}
FATAL = 9
OWN_PYTHON = '\nparameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{}" }} }}\n'
SAYS = """
import os
import sys

import only_there


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if x[0] == 9:
                os._exit(3)
            parameters = {
                "prefix": sys.prefix,
                "said": only_there.SAID,
                "activated": os.environ.get("VIRTUAL_ENV", ""),
                "program": os.popen("command -v python").read().strip(),
                "beside": any(one.endswith("executors/process") for one in sys.path),
            }
            tensor = pb_utils.Tensor("Y", x * only_there.FACTOR)
            responses.append(pb_utils.InferenceResponse([tensor], parameters=parameters))
        return responses
"""


def package_folder(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def made(folder: Path, *packages: str) -> Path:
    """A virtual environment with a module of its own, and some packages that this one has."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "only_there.py").write_text("SAID, FACTOR = 'hello from there', 3\n")
    for name in packages:
        package = package_folder(name)
        for path in (package, package.with_name(f"{name}.libs")):
            if path.exists():
                (site / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("environment") / "own", "numpy")


def packed(folder: Path, archive: Path) -> Path:
    """As conda-pack and venv-pack do: what the archive has at its top are bin, lib and so on."""
    with tarfile.open(archive, "w:gz") as file:
        for path in folder.iterdir():
            file.add(path, path.name)
    return archive


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where archives are unpacked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triglot" / "environments"


def unpacked(cache: Path) -> list[Path]:
    return [place / FOLDER for place in cache.iterdir() if (place / COMPLETE).exists()]


def folders(cache: Path) -> list[Path]:
    """Whole or not."""
    return list(cache.glob(f"*/{FOLDER}"))


async def test_a_folder(environment: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path, "own", SAYS, X_TO_Y + OWN_PYTHON.format(environment))
    async with serving(path) as client:
        answer = await client.infer("own", X)
        assert answer.outputs["Y"].tolist() == [0, 3, 6]
        assert answer.parameters == {
            "prefix": str(environment),
            "said": "hello from there",
            "activated": str(environment),
            "program": str(environment / "bin" / "python"),
            "beside": False,
        }


COMPUTES = """
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor


def square(value):
    import only_there

    return value * value * only_there.FACTOR


class TritonPythonModel:
    def execute(self, requests):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
            y = np.array(list(executor.map(square, x)), np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])]
"""


async def test_processes_of_the_model_itself(environment: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path, "own", COMPUTES, X_TO_Y + OWN_PYTHON.format(environment))
    async with serving(path) as client:
        assert (await client.infer("own", X)).outputs["Y"].tolist() == [0, 3, 12]


async def test_archive_in_the_model_folder(environment: Path, tmp_path: Path, cache: Path) -> None:
    path = write_model(
        tmp_path, "own", SAYS, X_TO_Y + OWN_PYTHON.format("$$TRITON_MODEL_DIRECTORY/environment.tar.gz")
    )
    packed(environment, path / "environment.tar.gz")
    for again in (False, True):
        async with serving(path) as client:
            answer = await client.infer("own", X)
            assert answer.outputs["Y"].tolist() == [0, 3, 6]
            assert answer.parameters["said"] == "hello from there"
            (folder,) = unpacked(cache)
            assert answer.parameters["prefix"] == str(folder)
        # It was kept.
        assert (folder / "a mark").exists() is again
        (folder / "a mark").touch()


async def test_models_that_share_an_archive_unpack_it_once(environment: Path, tmp_path: Path, cache: Path) -> None:
    archive = packed(environment, tmp_path / "environment.tgz")
    config = X_TO_Y + OWN_PYTHON.format(archive)
    paths = [write_model(tmp_path, name, SAYS, config) for name in ("one", "two")]
    async with serving(*paths) as client:
        prefixes = {(await client.infer(path.name, X)).parameters["prefix"] for path in paths}
        assert prefixes == {str(folder) for folder in unpacked(cache)}


async def test_an_archive_that_changes(environment: Path, tmp_path: Path, cache: Path) -> None:
    archive = packed(environment, tmp_path / "environment.tgz")
    config = X_TO_Y + OWN_PYTHON.format(archive)
    path = write_model(tmp_path / "models", "own", SAYS, config)
    options = {"model_control_mode": "explicit", "load_model": "*"}
    async with serving(path.parent, **options) as client:
        (first,) = unpacked(cache)
        await client.server.manager.load_model("own")
        assert unpacked(cache) == [first]
        unpack(archive, tmp_path / "again", keep=tar_filter)
        (module,) = (tmp_path / "again").glob("lib/python3.*/site-packages/only_there.py")
        module.write_text("SAID, FACTOR = 'changed', 5\n")
        packed(tmp_path / "again", archive)
        await client.server.manager.load_model("own")
        assert (await client.infer("own", X)).parameters["said"] == "changed"
        # The first one was in use when the second one came.
        assert len(unpacked(cache)) == 2
    # Of a server that has ended half way, too, nothing is left.
    (first.parent / COMPLETE).unlink()
    packed(tmp_path / "again", archive)
    async with serving(path.parent, **options) as client:
        assert (await client.infer("own", X)).parameters["said"] == "changed"
        (only,) = unpacked(cache)
        assert folders(cache) == [only]
        assert only != first


async def test_an_archive_that_was_unpacked_in_part(environment: Path, tmp_path: Path, cache: Path) -> None:
    path = write_model(tmp_path, "own", SAYS, X_TO_Y + OWN_PYTHON.format(tmp_path / "environment.tgz"))
    packed(environment, tmp_path / "environment.tgz")
    async with serving(path):
        (folder,) = unpacked(cache)
    (folder.parent / COMPLETE).unlink()
    (folder / "bin" / "activate").unlink()
    async with serving(path) as client:
        assert (await client.infer("own", X)).parameters["activated"]


def pid_in(cache: Path) -> int:
    (file,) = cache.glob(f"*/{FOLDER}/pid")
    return int(file.read_text())


async def test_abandoned_load(environment: Path, tmp_path: Path, cache: Path) -> None:
    """The program that completes what was unpacked ends with it."""
    copy = Path(shutil.copytree(environment, tmp_path / "copy", symlinks=True))
    (copy / "bin" / "conda-unpack").write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.prefix, 'pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    archive = packed(copy, tmp_path / "environment.tgz")
    path = write_model(tmp_path, "own", SAYS, X_TO_Y + OWN_PYTHON.format(archive))
    text = await refused(path, load_timeout=6.0)
    assert "loading took longer than load_timeout, 6 s" in text
    pid = pid_in(cache)
    await until(lambda: not Path(f"/proc/{pid}").exists())
    assert unpacked(cache) == []


async def test_packed_environment_gets_its_new_prefix(environment: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path, "own", SAYS, X_TO_Y + OWN_PYTHON.format(tmp_path / "environment.tgz"))
    mender = "import pathlib, sys; pathlib.Path(sys.prefix, 'mended').write_text(sys.argv[0])"
    unpack(packed(environment, tmp_path / "first.tgz"), tmp_path / "again", keep=tar_filter)
    (tmp_path / "again" / "bin" / "conda-unpack").write_text(mender)
    packed(tmp_path / "again", tmp_path / "environment.tgz")
    async with serving(path) as client:
        prefix = Path((await client.infer("own", X)).parameters["prefix"])
        assert (prefix / "mended").read_text() == str(prefix / "bin" / "conda-unpack")


async def test_replaced_processes_keep_their_environment(environment: Path, tmp_path: Path) -> None:
    config = X_TO_Y + OWN_PYTHON.format(environment) + "instance_group { kind: KIND_CPU count: 2 }"
    async with serving(write_model(tmp_path, "own", SAYS, config)) as client:
        code, _ = await client.failure("own", {"X": np.array([FATAL], np.int32)})
        assert code is grpc.StatusCode.UNAVAILABLE
        answers = [await client.infer("own", X) for _ in range(8)]
        assert {answer.parameters["prefix"] for answer in answers} == {str(environment)}


# --- what is wrong with it ---


async def refused(path: Path, **options: Any) -> str:
    """Why it is not loaded."""
    with pytest.raises(triglot.ModelLoadError) as raised:
        async with serving(path, **options):
            pass
    return str(raised.value.__cause__ or raised.value)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.write_bytes(b"none"), "file could not be opened successfully"),
        (lambda path: packed(path.parent / "empty", path), "bin/python"),
        (lambda path: path.mkdir(), "bin/python"),
    ],
    ids=["nothing", "no archive", "an archive of something else", "a folder of something else"],
)
async def test_no_environment(write: object, problem: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    environment = tmp_path / "environment"
    write(environment)  # type: ignore[operator]  # One of those above.
    text = await refused(write_model(tmp_path, "own", SAYS, X_TO_Y + OWN_PYTHON.format(environment)))
    assert f"{environment}: not a usable Python environment: " in text
    assert problem in text


@pytest.mark.parametrize(
    ("python", "problem"),
    [
        ('echo "[[3, 10], []]"', "its Python is 3.10, expected 3.11 or newer"),
        ('echo "lib missing" >&2; exit 7', "bin/python exited with status 7: lib missing"),
        (
            'echo "[[4, 0], []]"',
            "its Python has no numpy and no ml_dtypes; install it there: pip install numpy ml_dtypes",
        ),
        ('echo "{}"', "not a usable Python environment: "),
        ("echo hello", "not a usable Python environment: "),
    ],
)
async def test_a_python_that_cannot_run_it(python: str, problem: str, tmp_path: Path) -> None:
    program = tmp_path / "environment" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{python}\n")
    program.chmod(0o755)
    text = await refused(write_model(tmp_path, "own", SAYS, X_TO_Y + OWN_PYTHON.format(tmp_path / "environment")))
    assert text.startswith(f"{tmp_path / 'environment'}: ")
    assert problem in text


async def test_without_numpy(tmp_path: Path) -> None:
    bare = made(tmp_path / "bare")
    text = await refused(write_model(tmp_path, "own", SAYS, X_TO_Y + OWN_PYTHON.format(bare)))
    assert text == f"{bare}: its Python has no numpy; install it there: pip install numpy"


async def test_what_the_server_lends(environment: Path, tmp_path: Path) -> None:
    """Our own package, whatever is there, and ml_dtypes where it is missing."""
    both = made(tmp_path / "both", "numpy", LENT)
    (site,) = both.glob("lib/python3.*/site-packages")
    (site / "triglot.py").write_text("raise ImportError('not this one')")
    code = SAYS.replace(
        '"beside":',
        '"ours": sys.modules["triglot"].__file__, "lent": sys.modules["ml_dtypes"].__file__, "beside":',
    )
    for folder, lent in ((environment, package_folder(LENT)), (both, site / LENT)):
        path = write_model(tmp_path / folder.name, "own", code, X_TO_Y + OWN_PYTHON.format(folder))
        async with serving(path) as client:
            parameters = (await client.infer("own", X)).parameters
            assert parameters["lent"] == str(lent / "__init__.py")
            assert parameters["ours"] == str(package_folder("triglot") / "__init__.py")


async def test_on_a_thread(environment: Path, tmp_path: Path) -> None:
    thread = 'parameters { key: "execution" value { string_value: "thread" } }'
    text = await refused(write_model(tmp_path, "own", SAYS, X_TO_Y + OWN_PYTHON.format(environment) + thread))
    assert "parameters[EXECUTION_ENV_PATH]: expected execution 'process', got 'thread'" in text


async def test_a_client_cannot_say_which_program_runs(environment: Path, tmp_path: Path) -> None:
    config = X_TO_Y + OWN_PYTHON.format(environment)
    path = write_model(tmp_path / "models", "own", SAYS, config)
    async with serving(path.parent, model_control_mode="explicit", load_model="*") as client:
        manager = client.server.manager
        (files,) = [version.files for version in manager.registry.versions()]
        config = files.config.text
        assert str(environment) in config
        await manager.load_model("own", config)
        with pytest.raises(ServingError) as raised:
            await manager.load_model("own", config.replace(str(environment), str(tmp_path)))
        assert raised.value.code is Code.INVALID_ARGUMENT
        assert (
            "parameters[EXECUTION_ENV_PATH]: expected none, or the one in its config.pbtxt" in raised.value.message
        )
        tensors = json.loads(config)
        tensors["parameters"]["execution"] = {"string_value": "thread"}
        del tensors["parameters"]["EXECUTION_ENV_PATH"]
        with pytest.raises(ServingError, match=r"expected 'process', as its config\.pbtxt has EXECUTION_ENV_PATH"):
            await manager.load_model("own", json.dumps(tensors))
        del tensors["parameters"]
        await manager.load_model("own", json.dumps(tensors))
        assert (await client.infer("own", X)).parameters["prefix"] == str(environment)
