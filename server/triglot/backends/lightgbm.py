"""Boosters saved by LightGBM itself: `model.txt` and `model.lgb`."""

from __future__ import annotations

import re
from pathlib import Path

import lightgbm

from triglot.backends import error_text, warn_of_unknown
from triglot.backends.boosters.lightgbm import PARAMETERS, LightgbmModel
from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import Model

_SIZES = re.compile(rb"^tree_sizes=([\d ]*)$", re.MULTILINE)
END = b"end of trees"


def load(file: Path, config: ModelConfig) -> Model:
    """Return the booster of `file`. Raise `ModelLoadError`."""
    warn_of_unknown(file, config, "lightgbm", PARAMETERS)
    content = file.read_bytes()
    if not _is_whole(content):
        raise ModelLoadError(f"{file}: expected a whole file of LightGBM, which begins with 'tree'")
    try:
        booster = lightgbm.Booster(model_str=content.decode())
    except (ValueError, lightgbm.basic.LightGBMError) as error:
        raise ModelLoadError(
            f"{file}: lightgbm {lightgbm.__version__} cannot read it: {error_text(error)}"
        ) from error
    return LightgbmModel(file, booster, config)


def _is_whole(content: bytes) -> bool:
    """Whether the trees are where the file says they are: LightGBM ends the process for a file that is cut off."""
    if not content.startswith(b"tree\n") or END not in content:
        return False
    if (sizes := _SIZES.search(content)) is None:
        return True  # Of an old release: the trees are searched for.
    start = content.find(b"Tree=")
    for at, size in enumerate(map(int, sizes[1].split())):
        if not content.startswith(b"Tree=%d\n" % at, start):
            return False
        start += size
    return start < 0 or content.startswith(END, start)
