"""Parses TensorFlow Serving's flags as `triglot tfserving` does."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from triglot.cli import tfserving as tfserving_cli
from triglot.cli.tfserving import configuration, models
from triglot.config.options import Config, ConfigError
from triglot.repository.config.settings import ModelSettings

CONFIG_FILE = """
# One model.
model_config_list: {
  config: { name: 'm' base_path: '/models/m' model_platform: 'tensorflow' model_version_policy { all {} } }
}
"""


def parse(*arguments: str) -> dict[str, Any]:
    """Return the parsed flags, by name."""
    parser = argparse.ArgumentParser()
    tfserving_cli.add_parser(parser.add_subparsers())
    return vars(parser.parse_args(["tfserving", *arguments]))


def config(*arguments: str, environment: Mapping[str, str] | None = None) -> Config:
    return configuration(parse(*arguments), environment or {})


def both(flags: Mapping[str, Any]) -> tuple[Config, list[ModelSettings]]:
    return configuration(flags, {}), models(flags)


def wrong(*arguments: str) -> str:
    """Return the error message for flags that parse but are invalid; expects it to have one line."""
    with pytest.raises(ConfigError) as caught:
        both(parse(*arguments))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def config_file(folder: Path, text: str = CONFIG_FILE) -> Path:
    file = folder / "models.config"
    file.write_text(text)
    return file
