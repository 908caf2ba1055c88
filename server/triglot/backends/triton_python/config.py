"""The configuration as the model's code sees it: `args["model_config"]`, and `auto_complete_config` (spec 1.4)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from triglot.model.config import ModelConfig as Configured

_INPUT_KEYS = ("name", "data_type", "dims", "optional", "allow_ragged_batch")
_OUTPUT_KEYS = ("name", "data_type", "dims")
_REQUIRED = ("name", "data_type", "dims")
_INPUT_DEFAULTS = {
    "format": "FORMAT_NONE",
    "is_shape_tensor": False,
    "allow_ragged_batch": False,
    "optional": False,
    "is_non_linear_format_io": False,
}
_OUTPUT_DEFAULTS = {"label_filename": "", "is_shape_tensor": False, "is_non_linear_format_io": False}


def complete(config: Configured, name: str, file_name: str) -> dict[str, Any]:
    """Return the configuration with Triton's defaults for unset fields."""
    configured: dict[str, Any] = json.loads(config.text or "{}")
    completed: dict[str, Any] = {
        "name": name,
        "platform": "",
        "backend": "python",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [],
        "output": [],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
        "instance_group": [],
        "default_model_filename": file_name,
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
    }
    completed |= {key: value for key, value in configured.items() if key not in completed or value not in ("", [])}
    groups = completed["instance_group"] or [{"kind": "KIND_CPU", "count": 1, "gpus": []}]
    completed["instance_group"] = [_group(f"{name}_{at}", group) for at, group in enumerate(groups)]
    return completed


def _group(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {
        "count": 1,
        "gpus": [],
        "secondary_devices": [],
        "profile": [],
        "passive": False,
        "host_policy": "",
    }
    kind = str(group.get("kind", "KIND_AUTO"))
    return {
        **defaults,
        **group,
        "name": group.get("name") or name,
        "kind": "KIND_CPU" if kind == "KIND_AUTO" else kind,
        "count": group.get("count") or 1,
    }


class ModelConfig:
    """The argument and result of `auto_complete_config`. Values that are configured are not changed.

    Raise `ValueError` for values that contradict the configuration, and for invalid ones.
    """

    def __init__(self, model_config: str | Mapping[str, Any]) -> None:
        self._model_config: dict[str, Any] = dict(
            json.loads(model_config) if isinstance(model_config, str) else model_config
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the maximum number of rows in a batch; the configured one must not be larger."""
        if type(max_batch_size) is not int or max_batch_size < 0:
            raise ValueError(
                f"{self._where}: max_batch_size: expected an integer of at least 0, got {max_batch_size!r}"
            )
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in {self._where} "
                f"specifies max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but {self._where} "
                    "attempted to set 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, bool]) -> None:
        """Set whether the model is decoupled."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    f"model transaction property in {self._where} contains property other than 'decoupled': "
                    f"{key!r}"
                )
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = bool(transaction_policy_dict["decoupled"])
        configured = self._model_config.get("model_transaction_policy", {}).get("decoupled")
        if configured is not None and configured != decoupled:
            raise ValueError(
                f"trying to change decoupled property in {self._where}, which is already set to '{configured}'"
            )
        self._model_config["model_transaction_policy"] = {"decoupled": decoupled}

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - as Triton calls it
        """Add an input: a dict of `name`, `data_type`, `dims` and `optional`."""
        self._add("input", input, _INPUT_KEYS, _INPUT_DEFAULTS)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output: a dict of `name`, `data_type` and `dims`."""
        self._add("output", output, _OUTPUT_KEYS, _OUTPUT_DEFAULTS)

    @property
    def _where(self) -> str:
        return f"auto_complete_config function for model '{self._model_config.get('name', '')}'"

    def _add(self, kind: str, tensor: Mapping[str, Any], keys: Iterable[str], defaults: Mapping[str, Any]) -> None:
        for key in tensor:
            if key not in keys:
                raise ValueError(
                    f"{kind} '{tensor.get('name', '')}' in {self._where} contains property other than "
                    f"{', '.join(map(repr, keys))}: {key!r}"
                )
        for key in _REQUIRED:
            if key not in tensor:
                raise ValueError(f"{kind} in {self._where} is missing {key!r} property")
        added = {**tensor, "dims": [int(dim) for dim in tensor["dims"]]}
        for existing in self._model_config.setdefault(kind, []):
            if existing["name"] == added["name"]:
                self._fit(kind, existing, added)
                return
        self._model_config[kind].append({**defaults, **added})

    def _fit(self, kind: str, existing: dict[str, Any], added: Mapping[str, Any]) -> None:
        for key, empty in (("data_type", "TYPE_INVALID"), ("dims", [])):
            if existing.get(key, empty) not in (empty, added[key]):
                raise ValueError(
                    f"unable to load model '{self._model_config.get('name', '')}', configuration expects {key} "
                    f"{existing[key]} for {kind} '{added['name']}' but {self._where} specifies {added[key]}"
                )
        existing.update(added)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of an input; None if it does not exist."""
    return _by_name(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of an output; None if it does not exist."""
    return _by_name(model_config.get("output", ()), name)


def _by_name(tensors: Iterable[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the configuration sets the model to be decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
