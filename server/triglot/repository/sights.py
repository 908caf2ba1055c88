"""What was seen of each version: since when it is as it is, and what it was taken with.

Strategy: a version is taken when it has settled, and taken again when its files have changed and settled. What the
model itself writes into its folder is no such change, or it would be loaded again without an end. So of a version
that serves these do not count: new files; data files of a model in Python that something was appended to; and data
files that changed while it loaded, and again while it loaded for that reason. Of one that failed, only the last.
Data files are all but the model's file, Python code, and what the configuration names.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from triglot.repository.contents import Contents
from triglot.repository.source import ModelFiles

log = logging.getLogger(__name__)

IN_PYTHON = ("python", "predictor")
"""Backends whose models write what they like."""


@dataclass(slots=True)
class _Taken:
    """What a version was taken with.

    `ends`: the last bytes of data files. `causes`: the data files whose change made it be taken. `loading`: nobody
    has looked since it was loaded.
    """

    files: ModelFiles
    contents: Contents
    ends: Mapping[str, bytes | None]
    causes: Collection[str]
    loading: bool = True

    def grown(self, contents: Contents) -> set[str]:
        """The data files that something was appended to, and nothing else has happened to."""
        larger = [path for path in self.ends if contents.get(path, (-1, 0)) > self.contents[path]]
        return {path for path in larger if self._begins_as_before(path, contents)}
