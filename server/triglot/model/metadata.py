"""The metadata of a model, independent of protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triglot.model.signature import DEFAULT_SIGNATURE, Signature


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata of a model. `versions`: the serving ones, or the requested one; `version_names`: theirs."""

    name: str
    versions: list[str]
    platform: str
    signature: Signature
    decoupled: bool
    signature_name: str = DEFAULT_SIGNATURE
    speaks_json: bool = False
    sequences: bool = False
    version_names: Sequence[str] = ()
