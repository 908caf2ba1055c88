"""One server with small models for all end-to-end tests, and one run of each client script.

Where TensorFlow is needed, it is in an environment of its own: it writes the models, and serves them.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import pytest
import pytest_asyncio

from tests import environments, saved_models
from tests.e2e.client_scripts import ReportOf
from tests.e2e.hostile_names import ExposedServer, opened
from tests.e2e.model_configs import config_flag, config_text
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS
from triglot.run import DEMO

CANNOT_BE_LOADED = "warm_"
"""What the names of such SavedModels begin with."""
LABELLED = "model_version_policy { all {} } " + " ".join(
    f"version_labels {{ key: '{label}' value: {version} }}" for label, version in (("stable", 1), ("canary", 2))
)


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The server, ready."""
    with ServerProcess(str(PLAIN_MODELS), str(DEMO / "digits")) as process:
        yield process


@pytest.fixture(scope="session")
def report(server: ServerProcess) -> ReportOf:
    """What a client script found; it runs when it is first asked for."""
    return cache(lambda script: script.run(server))


@pytest.fixture(scope="session")
def tensorflow() -> Path:
    """The python of the environment that has TensorFlow."""
    return environments.python("tensorflow")


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    """The program."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the wheel of grpcurl is for Linux on x86-64")
    return environments.python("grpcurl").with_name("grpcurl")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SavedModels, FOLDER/NAME/VERSION/…."""
    return saved_models.write(tmp_path_factory.mktemp("models"), script="tfs_models.py")


@pytest.fixture(scope="session")
def versions(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base path with versions 1, half_plus_two, and 2, half_plus_three."""
    folder = tmp_path_factory.mktemp("versions")
    for number, name in ((1, "half_plus_two"), (2, "half_plus_three")):
        shutil.copytree(models / name / "00000123", folder / str(number))
    return folder


@pytest.fixture(scope="session")
def tensorflow_server(
    tensorflow: Path, models: Path, versions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of all SavedModels that can be loaded, and of `versions`."""
    texts = [
        config_text(folder.name, folder)
        for folder in models.iterdir()
        if not folder.name.startswith(CANNOT_BE_LOADED)
    ]
    texts.append(config_text("versions", versions, LABELLED))
    flag = config_flag(tmp_path_factory.mktemp("server") / "models.config", *texts)
    with ServerProcess(flag, command="tfserving", python=tensorflow) as process:
        yield process


@pytest.fixture(scope="session")
def empty_server(tensorflow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server without models, for tests that bring their own, and tolerate those of others."""
    flag = config_flag(tmp_path_factory.mktemp("empty") / "models.config")
    with ServerProcess(flag, "--allowed_model_roots=/", command="tfserving", python=tensorflow) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[None]:
    """The browser of `visiting`, for all tests of a file."""
    from tests.e2e.browser import launched  # noqa: PLC0415 - skips where there is none.

    async with launched():
        yield


@pytest.fixture(scope="module")
def exposed_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExposedServer]:
    """A server beside whose repository there are models that it must not open."""
    with opened(tmp_path_factory.mktemp("names")) as exposed:
        yield exposed


@pytest.fixture
def exposed(exposed_for_all: ExposedServer) -> Iterator[ExposedServer]:
    """The same; that nothing was opened, and all is well, is checked after each test."""
    yield exposed_for_all
    exposed_for_all.check()
