"""TensorFlow Serving's configuration of models, as its file and as text for `--model_config_file`."""

from __future__ import annotations

from pathlib import Path


def config_text(name: str, base_path: Path, more: str = "") -> str:
    """One model of a configuration; `more` are further fields."""
    return f"config {{ name: '{name}' base_path: '{base_path}' model_platform: 'tensorflow' {more} }}\n"


def config_flag(file: Path, *models: str) -> str:
    """The flag that names `file`, which is written."""
    file.write_text(f"model_config_list {{\n{''.join(models)}}}\n")
    return f"--model_config_file={file}"
