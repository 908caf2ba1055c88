"""`triglot grps`: converts a grps project's folder and its two files to options and models (grps 5, 8).

server.yml replaces the built-in defaults, so `TRIGLOT_*` variables and flags override it, as they override any
file. Each model in inference.yml becomes a model, and so does the DAG, for requests that name no model.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from triglot.backends.grps.gpu import GpuMonitor
from triglot.backends.grps.logs import MONITOR_FILE, log_files, own_name
from triglot.backends.grps.project import GrpsProject
from triglot.backends.grps.server_settings import ServerSettings, read_server
from triglot.backends.grps.settings import INFERENCE_FILE, SERVER_FILE, ProjectSettings, read_project
from triglot.backends.grps.unit_test import DEFAULT_TEST, run_unittest
from triglot.config.option_fields import flag_of
from triglot.config.options import NO_PORT, OPTIONS, Config, ConfigError
from triglot.config.sources import load_config
from triglot.core.errors import ModelLoadError
from triglot.platform.archives import TarError, unpack
from triglot.repository.config.settings import NAME
from triglot.repository.scan.source import LAST_VERSION, ModelFiles
from triglot.run import Start
from triglot.telemetry.store import Telemetry

log = logging.getLogger(__name__)

PROTOCOLS = "grps,kserve,tfserving"
MAX_MESSAGE = 1 << 30
"""In bytes; grps' own limit (grps 4)."""
OPTION_OF_FLAG = {"online": "grps_online", "http_error_status": "grps_http_errors", "log_level": "log_level"}
BACKEND = "grps"
_PIECES = re.compile(r"[0-9]+|[^0-9.]+")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "grps",
        help="serve a grps project",
        description="Serves the folder of a grps project as it is. TRIGLOT_* variables set the options of "
        "`triglot serve` and win over conf/server.yml.",
        allow_abbrev=False,
    )
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    parser.add_argument(
        "project",
        nargs="?",
        type=Path,
        metavar="PROJECT",
        help="the project's folder, or a .mar archive of it (default: the current folder)",
    )
    for name in ("server", "inference"):
        text = f"in place of the project's conf/{name}.yml"
        add(f"--{name}-conf", f"--{name}_conf", type=Path, metavar="FILE", help=text)
    add("--online", action="store_true", help="be ready from the start, instead of after a call of Online")
    for flag in ("http_error_status", "log_level"):
        option = OPTIONS[OPTION_OF_FLAG[flag]]
        text = f"{option.metadata['help']} (default: {option.default})"
        add(flag_of(flag), choices=option.metadata["choices"], help=text)
    add(
        "--unittest",
        nargs="?",
        const=DEFAULT_TEST,
        metavar="NAME",
        help=f"run the project's own test in place of serving (NAME: {DEFAULT_TEST})",
    )


def start(flags: Mapping[str, Any], others: Iterable[str], environment: Mapping[str, str]) -> Start:
    """Return the start of `triglot grps`. Raise `ConfigError` and `ModelLoadError`."""
    telemetry = Telemetry()
    settings, log_root = read(flags, others)
    project = project_of(settings, telemetry)
    models, dag = project_models(project)
    return Start(
        configuration(settings.server, dag, flags, environment),
        models=models,
        warnings=settings.warnings,
        telemetry=telemetry,
        about=metadata(settings),
        surroundings=partial(surroundings, settings, log_root, telemetry),
        prepare=partial(load, project),
        test=partial(passes, settings, flags["unittest"]) if "unittest" in flags else None,
        # Logged, as the project's log must have it, too (grps 5.2).
        fails=partial(log.critical, "%s"),
    )


def read(flags: Mapping[str, Any], others: Iterable[str]) -> tuple[ProjectSettings, Path]:
    """Return the settings of the project in the flags and positional arguments, and the folder for its log_dir.

    That is the project's folder, or the current one for an archive, which is unpacked temporarily.
    Raise `ConfigError` for more than one project, and `ModelLoadError` for an invalid one, which is logged to the
    project's log, too.
    """
    paths = [*([flags["project"]] if flags["project"] else []), *map(Path, others)]
    if len(paths) > 1:
        raise ConfigError(f"expected one project, got {' and '.join(map(str, paths))}")
    path = paths[0] if paths else Path()
    folder, log_root = (_unpacked(path), Path.cwd()) if path.is_file() else (path, path.absolute())
    server_file = flags.get("server_conf", folder / SERVER_FILE)
    try:
        settings = read_project(folder, server_conf=server_file, inference_conf=flags.get("inference_conf"))
    except ModelLoadError as error:
        _log_failure(folder, log_root, server_file, error)
        raise
    return settings, log_root


def _unpacked(archive: Path) -> Path:
    """Unpack a project's archive to a folder that is removed when the process ends (grps 8)."""
    folder = Path(tempfile.mkdtemp(prefix="triglot-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        unpack(archive, folder, mode="r:gz")
    except (OSError, TarError) as error:
        raise ModelLoadError(f"{archive}: expected a project's folder, or a gzipped tar of it: {error}") from None
    return folder


def _log_failure(folder: Path, log_root: Path, server_file: Path, error: ModelLoadError) -> None:
    """Log the error to the project's log, if that is known: start scripts search it for CRITICAL (grps 5.2)."""
    try:
        settings = read_server(folder, server_file, [])[2]
        with log_files(log_root, settings):
            log.critical("%s", error)
    except ModelLoadError:
        pass  # The file that names the log is invalid itself; the caller prints the error.


def configuration(
    settings: ServerSettings, default_model: str, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> Config:
    """Return the options for a project; `default_model` serves requests that name none. Raise `ConfigError`."""
    defaults: dict[str, Any] = {
        "host": settings.host,
        "rest_port": settings.http_port,
        "grpc_port": NO_PORT if settings.grpc_port is None else settings.grpc_port,
        "protocols": PROTOCOLS,
        "max_message_size": MAX_MESSAGE,
        "max_connections": settings.max_connections,
        "default_model": default_model,
    }
    if custom := settings.custom_http:
        defaults |= {
            "grps_path": custom.path,
            "grps_customized_body": custom.customized_body,
            "grps_streaming_mode": custom.ctrl_mode,
            "grps_streaming_key": custom.ctrl_key,
            "grps_streaming_content_type": custom.res_content_type,
        }
    options = {option: flags[flag] for flag, option in OPTION_OF_FLAG.items() if flag in flags}
    return load_config(None, environment, options, defaults)


def metadata(settings: ProjectSettings) -> str:
    """Return the server's description for grps clients: the two files (grps 3.7)."""
    return f"{settings.inference_text}\n{settings.server_text}"


def project_of(settings: ProjectSettings, telemetry: Telemetry) -> GrpsProject:
    """Return the project, not loaded yet; its code's metrics go to the telemetry."""
    return GrpsProject(settings, telemetry.monitor)


def project_models(project: GrpsProject) -> tuple[list[ModelFiles], str]:
    """Return the project's models, with the DAG as the last one, and the DAG's name. Nothing is loaded yet.

    A version's text becomes a label, as other protocols use numbers, see `version_numbers`.
    """
    settings = project.settings
    file = settings.folder / INFERENCE_FILE
    versions: dict[str, list[str]] = {}
    for entry in settings.models:
        versions.setdefault(entry.name, []).append(entry.version)
    numbers = {name: version_numbers(texts) for name, texts in versions.items()}
    models = [
        ModelFiles(
            entry.name,
            numbers[entry.name][entry.version],
            BACKEND,
            file,
            label=entry.version,
            make=partial(project.model, entry.name, entry.version),
        )
        for entry in settings.models
    ]
    dag = _free_name(settings.dag.name, versions)
    return [*models, ModelFiles(dag, 1, BACKEND, file, make=project.dag)], dag


def version_numbers(versions: Sequence[str]) -> dict[str, int]:
    """Return a number for each of a model's versions, as far as possible in ascending order.

    A positive integer keeps its value. Any other version gets the lowest free number above that of its
    predecessor, in an order in which 1.9.0 comes before 1.10.
    """
    numbers = {version: int(version) for version in versions if _is_number(version)}
    last = 0
    for version in sorted(versions, key=_order):
        if version not in numbers:
            taken = set(numbers.values())
            candidates = chain(range(last + 1, LAST_VERSION + 1), count(1))
            numbers[version] = next(number for number in candidates if number not in taken)
        last = numbers[version]
    return numbers


def _is_number(version: str) -> bool:
    return re.fullmatch("[1-9][0-9]{0,18}", version) is not None and int(version) <= LAST_VERSION


def _order(version: str) -> list[tuple[int, int, str]]:
    """Return a sort key: the numbers in a version, and texts between them."""
    pieces = _PIECES.findall(version)
    return [(1, int(piece), "") if piece.isdecimal() else (0, 0, piece) for piece in pieces]


def _free_name(dag: str, taken: Iterable[str]) -> str:
    """Return the DAG's name, changed as little as other protocols' rules and the models' names require."""
    others = set(taken)
    if NAME.fullmatch(dag) and dag not in others:
        return dag
    legal = re.sub(r"[^A-Za-z0-9._-]", "_", dag)[:100].lstrip(".")
    name = f"{legal}-dag"
    number = 1
    while name in others:
        number += 1
        name = f"{legal}-dag{number}"
    return name


def load(project: GrpsProject) -> None:
    """Load the project's models on the main thread, as its code may expect. Raise `ModelLoadError`.

    Logs the traceback of an exception in the project's code.
    """
    try:
        project.load()
    except ModelLoadError as error:
        if error.__cause__ is not None:
            log.error("the project cannot be loaded", exc_info=error.__cause__)
        raise


@contextmanager
def surroundings(settings: ProjectSettings, log_root: Path, telemetry: Telemetry, worker: int) -> Iterator[None]:
    """Provide the environment of a project: its folder as the current one, its log files, and GPU metrics.

    `log_dir` is relative to `log_root`. Raise `ModelLoadError` if the logs cannot be written.
    """
    with ExitStack() as stack:
        logs = stack.enter_context(log_files(log_root, settings.server, worker))
        log.info("logs are written to %s", logs)
        telemetry.log_file = logs / own_name(MONITOR_FILE, worker)
        stack.enter_context(chdir(settings.folder))
        if settings.server.gpu is not None:
            stack.enter_context(GpuMonitor(settings.server.gpu, telemetry.monitor))
        yield


def passes(settings: ProjectSettings, test: str) -> bool:
    """Run a test of the project's own (grps 6.1) and return whether it passed. Raise `ModelLoadError`."""
    return run_unittest(settings, test)
