"""What a model tells of itself, in no protocol's terms."""

from __future__ import annotations

from dataclasses import dataclass

from triglot.model.signature import DEFAULT_SIGNATURE, Signature


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a model says of itself. `versions` are those that serve, or the one that was asked for."""

    name: str
    versions: list[str]
    platform: str
    signature: Signature
    decoupled: bool
    signature_name: str = DEFAULT_SIGNATURE
    speaks_json: bool = False
    sequences: bool = False
