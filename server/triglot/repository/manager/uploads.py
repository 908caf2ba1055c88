"""Model files that a client sends with a load request (spec 3.9)."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

from triglot.core.errors import InvalidArgument

_PATH = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)+[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Upload:
    """A temporary model folder with the uploaded files; deleted when the last reference to this object is gone.

    Blocks while writing. Raises `InvalidArgument` for an invalid path, and `OSError`.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        for path in files:
            if not _PATH.fullmatch(path):
                raise InvalidArgument(
                    f"parameter 'file:{path}': expected file:VERSION/FILE, of letters, digits and ._- only"
                )
        folder = Path(tempfile.mkdtemp(prefix="triglot-upload-")).resolve()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = folder / name
        for path, content in files.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
