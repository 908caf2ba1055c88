"""Warns of configuration parameters that a backend does not support."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from triglot.model.config import ModelConfig

log = logging.getLogger(__name__)


def warn_of_unknown(file: Path, config: ModelConfig, backend: str, known: Collection[str] = ()) -> None:
    """Log a warning for each parameter that is not `known`."""
    for key in config.parameters:
        if key not in known:
            log.warning(
                "%s: parameters: %s: unknown, ignored; the %s backend knows %s",
                config.source or file,
                key,
                backend,
                ", ".join(known) or "none",
            )
