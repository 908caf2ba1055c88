"""What `make release` builds: its files, and that users can install and run it from a package index."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

import triglot
from tests import environments
from tests.process import LISTENING, clean_environment
from triglot.testing.process import Lines

ROOT = environments.ROOT
BUILD_SECONDS, INSTALL_SECONDS = 300, 600
CLEAN_INSTALL = ROOT / "tests" / "clean_install.py"
INFER = ("infer", "storyteller", "prompt=White", "words=1", "--no-json")


def run(*command: str | Path, seconds: float, **variables: str) -> str:
    """Run a command; returns what it prints. Raise `AssertionError` with its errors if it fails."""
    words = list(map(str, command))
    environment = clean_environment(**variables)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def release() -> Path:
    """The python with the tools of a release."""
    return environments.python("release")


@pytest.fixture(scope="module")
def built(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(release, "-m", "build", "--outdir", folder, ROOT, seconds=BUILD_SECONDS)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tracked(folder: str) -> set[str]:
    """The files of a folder of the checkout, without types for mypy."""
    names = run("git", "-C", ROOT, "ls-files", folder, seconds=BUILD_SECONDS).split()
    return {name for name in names if not name.endswith(".pyi")}


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(release: Path, wheel: Path, tmp_path: Path) -> None:
    run(release, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, seconds=BUILD_SECONDS)
    assert contents(wheel) == contents(tmp_path / wheel.name)


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    packed = {f"server/{name}" for name in contents(wheel) if name.startswith("triglot/")}
    assert packed == tracked("server/triglot")


def test_the_sdist_has_the_protos_and_the_demo(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= tracked("protos") | tracked("server/triglot/demo")


def test_the_bill_of_materials(wheel: Path) -> None:
    """PEP 770; it lists the files of others that the wheel has."""
    files = contents(wheel)
    bill = json.loads(files[f"triglot-{triglot.__version__}.dist-info/sboms/triglot.cdx.json"])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    (component,) = bill["components"]
    assert component["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    own = {str(file.relative_to(ROOT / "protos")) for file in (ROOT / "protos").rglob("*.proto")}
    descriptors = descriptor_pb2.FileDescriptorSet.FromString(files["triglot/pb/descriptors.binpb"])
    others = {file.name for file in descriptors.file} - own
    assert others
    assert all(name.startswith("google/protobuf/") for name in others)
    assert all(Path(name).name in component["description"] for name in others)


# --- from an index ---


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def index(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a package index with the wheel."""
    folder = tmp_path_factory.mktemp("index")
    project = folder / "simple" / "triglot"
    project.mkdir(parents=True)
    shutil.copy(wheel, project)
    (project / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>')
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
        server.shutdown()
        serving.join()


def check_serves(*command: str | Path, folder: Path, **variables: str) -> None:
    """Check that a command serves the demo models, and that the installed client calls one."""
    words = [*map(str, command), "serve", "--grpc-port", "0", "--rest-port", "0"]
    environment = clean_environment(**variables)
    with subprocess.Popen(words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = Lines(process.stderr)
        try:
            grpc_port, _ = lines.wait_for(LISTENING).groups()
            url = f"127.0.0.1:{grpc_port}"
            printed = run(*command, *INFER, "--url", url, seconds=INSTALL_SECONDS, **variables)
            assert printed == 'word BYTES [1]: "Rabbit"\n'
        finally:
            process.terminate()
            process.wait()
            lines.close()


@pytest.mark.parametrize(
    ("python", "requirement", "library"),
    [("/usr/bin/python3", "triglot[onnx]", "onnxruntime"), ("python3.13", "triglot", "numpy")],
)
def test_pip_installs_it_without_a_compiler(index: str, python: str, requirement: str, library: str) -> None:
    """On the distribution's Python and a newer one; `tests/pythons.sh` does this on all that are supported."""
    variables = {"PYENV_VERSION": python.removeprefix("python")}
    supported = f"import ensurepip, sys; sys.exit(sys.version_info < {environments.OLDEST_PYTHON})"
    try:
        run(python, "-c", supported, seconds=INSTALL_SECONDS, **variables)
    except (FileNotFoundError, AssertionError):
        pytest.skip(f"this machine has no {python} that is supported and has venv")
    options = (requirement, "--extra-index-url", index)
    row = run(python, CLEAN_INSTALL, *options, seconds=INSTALL_SECONDS, **variables)
    assert f"{library} " in row
    assert "calls succeeded" in row


def test_uvx_runs_it(index: str, release: Path, tmp_path: Path) -> None:
    variables = {"UV_INDEX": index, "UV_PYTHON": sys.executable, "UV_TOOL_DIR": str(tmp_path / "tools")}
    uvx = release.with_name("uvx")
    run(uvx, "triglot", "--version", seconds=INSTALL_SECONDS, **variables)
    check_serves(uvx, "triglot", folder=tmp_path, **variables)


def test_pipx_installs_it(index: str, release: Path, tmp_path: Path) -> None:
    variables = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    run(
        release.with_name("pipx"),
        "install",
        "--python",
        sys.executable,
        f"--pip-args=--extra-index-url={index}",
        "triglot",
        seconds=INSTALL_SECONDS,
        **variables,
    )
    assert os.access(tmp_path / "bin" / "triglot", os.X_OK)
    check_serves(tmp_path / "bin" / "triglot", folder=tmp_path, **variables)
