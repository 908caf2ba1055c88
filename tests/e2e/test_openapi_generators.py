"""Generators of clients read the OpenAPI document: what they write compiles, and calls a model."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import environments
from tests.e2e.client_scripts import CLIENTS
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS, clean_environment
from triglot.run import DEMO

RUN_SECONDS = 300
OLDEST_NODE = (20, 19)
"""hey-api's generator needs it."""
ANSWERS = [[2.5, 4.5]]
"""What half_plus_two answers for 1 and 5."""
CONFIG = {"post_hooks": [], "content_type_overrides": {"application/javascript": "text/plain"}}
"""The generator knows no scripts, which grps' monitor page has."""
COMPILER = {
    "strict": True,
    "noUncheckedIndexedAccess": True,
    "target": "es2022",
    "lib": ["es2022", "dom", "dom.iterable"],
    "module": "nodenext",
    "skipLibCheck": True,
}


def missing_node() -> str:
    """Return why these tests cannot run Node; "" if they can."""
    if shutil.which("npm") is None or (node := shutil.which("node")) is None:
        return "node and npm are not installed"
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    numbers = tuple(int(number) for number in version.removeprefix("v").split(".")[:2])
    return "" if numbers >= OLDEST_NODE else f"hey-api needs Node {OLDEST_NODE[0]}.{OLDEST_NODE[1]}, got {version}"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        *map(str, (PLAIN_MODELS / "half_plus_two", DEMO / "digits", PLAIN_MODELS / "token_stream"))
    ) as process:
        yield process


@pytest.fixture
def document(server: ServerProcess, tmp_path: Path) -> Path:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{server.rest_address}/openapi.json", timeout=RUN_SECONDS) as answer:
        (tmp_path / "openapi.json").write_bytes(answer.read())
    return tmp_path / "openapi.json"


def output_of(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env=clean_environment(PYTHONPATH=str(folder)),
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openapi_python_client(server: ServerProcess, document: Path, tmp_path: Path) -> None:
    python = environments.python("openapi")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    output_of(
        tmp_path,
        python.with_name("openapi-python-client"),
        *("generate", "--fail-on-warning", "--meta", "none", "--config", "config.json"),
        *("--path", document, "--output-path", "generated"),
    )
    output_of(tmp_path, python, "-m", "compileall", "-q", "generated")
    answers = output_of(tmp_path, python, CLIENTS / "openapi_call.py", f"http://{server.rest_address}")
    assert list(map(json.loads, answers.splitlines())) == [ANSWERS, [[2.0]]]


@pytest.mark.skipif(bool(missing_node()), reason=missing_node())
def test_openapi_typescript_and_hey_api(server: ServerProcess, document: Path, tmp_path: Path) -> None:
    modules = environments.node_modules("openapi_node")
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    shutil.copy(CLIENTS / "openapi_call.ts", tmp_path)
    settings = {"compilerOptions": COMPILER, "files": ["openapi_call.ts", "types.ts", "hey/sdk.gen.ts"]}
    (tmp_path / "tsconfig.json").write_text(json.dumps(settings))
    output_of(tmp_path, modules / ".bin" / "openapi-typescript", document, "--output", "types.ts")
    options = {"input": str(document), "output": {"path": "hey", "importFileExtension": ".js"}}
    (tmp_path / "hey.config.js").write_text(f"export default {json.dumps(options)};")
    output_of(tmp_path, modules / ".bin" / "openapi-ts", "--file", "hey.config.js", "--no-log-file")
    output_of(tmp_path, modules / ".bin" / "tsc", "--project", ".")
    answers = output_of(tmp_path, "node", "openapi_call.js", f"http://{server.rest_address}")
    assert list(map(json.loads, answers.splitlines())) == [ANSWERS, ANSWERS]
