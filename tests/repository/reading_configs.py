"""What a model's config.pbtxt says, and what is said of a wrong one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from triglot.core.errors import Code, ModelLoadError
from triglot.model.config import ModelConfig
from triglot.repository.config.model_config import CONFIG_FILE, read_config


def read(folder: Path, text: str) -> ModelConfig:
    """What a configuration of model `m` says; nothing is warned of."""
    (folder / "m").mkdir(exist_ok=True)
    (folder / "m" / CONFIG_FILE).write_text(text)
    warnings: list[str] = []
    config = read_config(folder / "m", warnings)
    assert warnings == []
    return config


def wrong(folder: Path, text: str) -> str:
    """What is said of a configuration, without the file in front."""
    with pytest.raises(ModelLoadError) as caught:
        read(folder, text)
    assert caught.value.code is Code.INVALID_ARGUMENT
    return str(caught.value).removeprefix(f"{folder / 'm' / CONFIG_FILE}: ")


def meaning(config: ModelConfig) -> ModelConfig:
    """All that is understood of it."""
    assert config.sign
    return replace(config, sign="", groups_sign="")
