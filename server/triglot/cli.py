"""The command line: `triglot serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from triglot.config import OPTIONS, Config, ConfigError, flag_of, load_config, option_type, unknown
from triglot.core.errors import ModelLoadError
from triglot.hints import hint_lines
from triglot.version import __version__

if TYPE_CHECKING:
    from triglot.app import Server

log = logging.getLogger(__name__)

DEMO = Path(__file__).parent / "demo"
FAILED, WRONG_USE = 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triglot", description="An inference server for KServe V2 clients.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"triglot {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve models", allow_abbrev=False)
    serve.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a repository folder (NAME/[VERSION/]files), a model folder, a .py or an .onnx file; "
        "without one, the embedded demo models",
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with the options below as keys")
    for name, option in OPTIONS.items():
        flag = flag_of(name)
        text = f"{option.metadata['help']} (default: {option.default})"
        if option_type(name) is bool:
            serve.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            serve.add_argument(flag, type=option_type(name), default=argparse.SUPPRESS, metavar="VALUE", help=text)
    return parser


def _flags() -> list[str]:
    negated = [flag_of(f"no_{name}") for name in OPTIONS if option_type(name) is bool]
    return [*map(flag_of, OPTIONS), *negated]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit status."""
    parser = _parser()
    known, others = parser.parse_known_args(arguments)
    parsed = vars(known)
    for other in others:
        if other.startswith("-"):
            parser.error(unknown(other.split("=")[0], ["--config", "--help", *_flags()]))
    # argparse leaves paths that stand behind an option to us.
    paths: list[Path] = [*parsed["paths"], *map(Path, others)]
    flags: dict[str, Any] = {name: value for name, value in parsed.items() if name in OPTIONS}
    try:
        config = load_config(parsed["config"], os.environ, flags)
    except ConfigError as error:
        print(f"triglot: {error}", file=sys.stderr)
        return WRONG_USE
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"
    )
    # grpc logs a trace for every client that leaves in the middle of a call.
    logging.getLogger("grpc._cython.cygrpc").addFilter(
        lambda record: "ExecuteBatchError" not in str(record.msg) or config.log_level == "debug"
    )
    try:
        return asyncio.run(_serve(paths, config))
    except (ModelLoadError, OSError) as error:
        print(f"triglot: {error}", file=sys.stderr)
        return FAILED


async def _serve(paths: list[Path], config: Config) -> int:
    # Here, so that a wrong flag or --help answers at once.
    from triglot.app import Server  # noqa: PLC0415

    signals = _listen_for_signals()
    server = Server(paths or [DEMO], config, skip_missing_dependencies=not paths)
    if not await _unless_signalled(server.start(), signals):
        return _leave("stopped while loading")
    for line in hint_lines(server.metadata(), config, server.grpc_port, server.rest_port):
        print(line, flush=True)
    delay = config.drain_delay if await signals.get() is signal.SIGTERM else 0.0
    if not await _unless_signalled(_stop(server, delay), signals):
        return _leave("stopped at once")
    return 0


def _listen_for_signals() -> asyncio.Queue[signal.Signals]:
    """SIGTERM and SIGINT as they come; called before anything is loaded."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    return signals


async def _unless_signalled(work: Coroutine[Any, Any, None], signals: asyncio.Queue[signal.Signals]) -> bool:
    """Do the work; False when a signal came first. Raises what the work raises."""
    working = asyncio.ensure_future(work)
    signalled = asyncio.ensure_future(signals.get())
    await asyncio.wait([working, signalled], return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        return False
    if signalled.done():
        signals.put_nowait(signalled.result())  # Both at once: the signal is for what comes next.
    signalled.cancel()
    await working
    return True


async def _stop(server: Server, delay: float) -> None:
    log.info("stopping; a second signal stops at once")
    await server.drain(delay)
    await server.stop()
    log.info("stopped")


def _leave(text: str) -> NoReturn:
    """End the process without waiting for threads that load or run a model."""
    log.warning(text)
    logging.shutdown()
    os._exit(FAILED)
