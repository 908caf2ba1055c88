"""Access files for tests, and credentials that fit them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path


def hash_of(token: str) -> str:
    """What the file has in place of the token."""
    return hashlib.sha256(token.encode()).hexdigest()


def client(name: str, tokens: Iterable[str], operations: Iterable[str], **more: object) -> str:
    """A client's table; `more` are further keys, with their values in TOML."""
    lines = [f"tokens_sha256 = {[hash_of(token) for token in tokens]}", f"operations = {list(operations)}"]
    lines += [f"{key} = {value}" for key, value in more.items()]
    return "\n".join([f"[client.{name}]", *lines, ""]).replace("'", '"')


def anonymous(operations: Iterable[str], **more: object) -> str:
    """What those without credentials may do."""
    lines = [f"operations = {list(operations)}", *(f"{key} = {value}" for key, value in more.items())]
    return "\n".join(["[anonymous]", *lines, ""]).replace("'", '"')


def write(file: Path, *tables: str) -> Path:
    """The file, in place of what was there, as a whole: a reader sees the old one or the new one.

    It was written a second ago: the clock of files is coarse, and one that is renamed in the moment in which it
    was written looks as if it were being written.
    """
    new = file.with_suffix(".new")
    new.write_text("\n".join(tables))
    before = time.time() - 1
    os.utime(new, (before, before))
    return new.replace(file)
