"""`triglot models`: lists the models of a running server, with their states."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

from triglot.cli.grpc_client import CallError, add_connection, connected
from triglot.cli.infer import SERVICE
from triglot.config.options import ConfigError
from triglot.pb.kserve import inference_pb2 as pb
from triglot.run import FAILED, print_error

TITLES = ("model", "version", "state", "reason")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "models",
        help="list the models of a running server",
        usage="triglot models [OPTION ...]",
        description="Lists the models of a server over gRPC with KServe V2's RepositoryIndex. The exit status "
        "is 1 if the server does not answer.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_connection(parser, "--url", "the call")


def run(flags: Mapping[str, Any], others: Iterable[str]) -> int:
    """Print the models and return the exit status. Raise `ConfigError`."""
    if others := list(others):
        raise ConfigError(f"models: expected options only, got {others[0]!r}")
    try:
        with connected(flags, SERVICE, "KServe V2") as client:
            index = client.call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
    except CallError as error:
        print_error(str(error))
        return FAILED
    rows = [(model.name, model.version, model.state, model.reason) for model in index.models]
    if flags["json"]:
        print(json.dumps([dict(zip(TITLES, row, strict=True)) for row in rows], indent=2))
        return 0
    lines = [TITLES, *rows] if rows else [("no models",)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0
