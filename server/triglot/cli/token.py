"""`triglot token`: makes a token for a client, and the lines for the access file that declare the client."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triglot.access.credentials import digest, new_token
from triglot.access.file import access_rules
from triglot.config.options import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "token",
        help="make a token for a client",
        description="Prints a new token to standard output, and to standard error the lines for the access file: "
        "they have the token's SHA-256 hash, which does not reveal it.",
        epilog="TOKEN=$(triglot token search 2>> access.toml) adds a client, and keeps its token in a variable. "
        "To replace a token without a gap, add the hash of a new one to the client's tokens_sha256 first.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="the client's name in the access file, logs and metrics")
    parser.add_argument(
        "--operations",
        metavar="NAME,...",
        default="infer,inspect",
        help="what the client may do, such as health, inspect, infer, administer (default: %(default)s)",
    )
    parser.add_argument(
        "--models", metavar="PATTERN,...", default="", help="the models it may use, such as rank-* (default: all)"
    )


def run(flags: Mapping[str, Any], others: Sequence[str]) -> int:
    """Print both and return the exit status. Raise `ConfigError` for values that an access file rejects."""
    if others:
        raise ConfigError(f"token: expected one NAME, got {others[0]!r}, too")
    name, token = flags["name"], new_token()
    client = {"tokens_sha256": [digest(token).hex()], "operations": _parts(flags["operations"])}
    if flags["models"]:
        client["models"] = _parts(flags["models"])
    access_rules({"client": {name: client}}, Path())
    key = name if _BARE_KEY.fullmatch(name) else json.dumps(name)
    lines = [f"[client.{key}]", *(f"{field} = {json.dumps(value)}" for field, value in client.items())]
    print(token, flush=True)
    print(*lines, sep="\n", file=sys.stderr)
    return 0


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]
