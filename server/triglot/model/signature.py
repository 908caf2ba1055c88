"""Signatures: the named sets of inputs and outputs of a model, as in TensorFlow Serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from triglot.core.tensor import DATATYPES, Array, datatype_of, element_count
from triglot.core.types import TensorSpec

DEFAULT_SIGNATURE: Final = "serving_default"
INSTANCES: Final = "instances"
"""Input of models that take JSON: BYTES [-1], with the JSON of each instance."""
METHODS: Final = ("predict", "classify", "regress")
MAX_KNOWN_SHAPES: Final = 256
MAX_KNOWN_DIMS: Final = 32
"""Limits on the shapes that an input caches, and on their dims."""


def shape_text(shape: Sequence[int] | None) -> str:
    """Return a shape as messages show it; "any" for any rank."""
    return "any" if shape is None else f"[{','.join(str(dim) for dim in shape)}]"


class TensorRule:
    """A `TensorSpec` prepared for fast checks; caches the byte sizes of shapes that passed.

    `contradicted`: whether a model has returned another shape.
    """

    __slots__ = ("contradicted", "dtype", "known_shapes", "plain", "spec")

    def __init__(self, spec: TensorSpec) -> None:
        datatype = DATATYPES[spec.datatype]
        self.spec = spec
        self.dtype = datatype.dtype
        # For these datatypes any bytes of the right length are valid.
        self.plain = bool(datatype.itemsize) and datatype.name != "BOOL"
        self.known_shapes: dict[tuple[int, ...], int] = {}
        self.contradicted = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether `shape` matches the dims of the spec."""
        wanted = self.spec.shape
        if wanted is None:
            return all(dim >= 0 for dim in shape)
        return len(shape) == len(wanted) and all(
            dim >= 0 and expected in (-1, dim) for dim, expected in zip(shape, wanted, strict=True)
        )

    def remember(self, shape: tuple[int, ...]) -> int:
        """Cache a checked shape, unless it is very long; return its size in bytes, 0 for BYTES."""
        size = self.byte_size(shape)
        if len(shape) <= MAX_KNOWN_DIMS:
            if len(self.known_shapes) >= MAX_KNOWN_SHAPES:
                self.known_shapes.clear()
            self.known_shapes[shape] = size
        return size

    def byte_size(self, shape: tuple[int, ...]) -> int:
        """Return the size in bytes of a tensor of this shape; 0 for BYTES."""
        return element_count(shape) * DATATYPES[self.spec.datatype].itemsize


@dataclass(frozen=True, slots=True)
class Signature:
    """Named inputs and outputs, and the method that a call of them is: predict, classify or regress.

    classify and regress take one BYTES input `inputs`, of serialized `tensorflow.Example` messages, and return
    `classes` (BYTES), `scores` (FP32) or both for classify, and `outputs` (FP32) for regress (tfs 3.3).

    Attributes:
        max_batch_size: As the model's.
        defaults: Values for inputs that a request may omit.
        any_tensors: Whether any tensors are accepted and returned unchecked, whatever is declared.
        unservable_outputs: Why other outputs cannot be returned, by name.
        any_inputs: Whether inputs that are not as declared are passed on as they are sent, see
            `Model.any_inputs`.
        unnamed: As the model's.
        may_lack: Inputs that a request may omit: those with defaults, and the optional ones, which then are
            absent.

    Raise `ValueError` for anything but `TensorSpec`s, duplicate names, an unknown method, a default that does not
    fit its input, an optional output, or a shape without the batch dim -1 in front when `max_batch_size` > 0.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    max_batch_size: int = 0
    method: str = "predict"
    defaults: Mapping[str, Array] = field(default_factory=dict)
    any_tensors: bool = False
    unservable_outputs: Mapping[str, str] = field(default_factory=dict)
    any_inputs: bool = False
    unnamed: TensorSpec | None = None
    input_rules: Mapping[str, TensorRule] = field(init=False, repr=False, compare=False)
    output_rules: Mapping[str, TensorRule] = field(init=False, repr=False, compare=False)
    takes_bytes: bool = field(init=False, repr=False, compare=False)
    takes_json: bool = field(init=False, repr=False, compare=False)
    """Whether all that it declares to take is the JSON of instances."""
    may_lack: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            rules = _rules(kind, specs, self.max_batch_size)
            object.__setattr__(self, f"{kind}_rules", {} if self.any_tensors else rules)
        defaults = {
            name: _checked_default(name, value, self.input_rules.get(name))
            for name, value in self.defaults.items()
        }
        object.__setattr__(self, "defaults", defaults)
        object.__setattr__(self, "takes_bytes", any(spec.datatype == "BYTES" for spec in self.inputs))
        optional = {spec.name for spec in self.inputs if spec.optional}
        object.__setattr__(self, "may_lack", frozenset(optional | defaults.keys()))
        object.__setattr__(self, "takes_json", self.any_inputs and INSTANCES in self.input_rules)

    @property
    def batched(self) -> bool:
        """Whether the first dim of every shape is the batch dim."""
        return self.max_batch_size > 0

    def dims(self, spec: TensorSpec) -> Sequence[int] | None:
        """Return the shape of one of its tensors without the batch dim; None for any rank."""
        return spec.shape[1:] if spec.shape is not None and self.batched else spec.shape


def _rules(kind: str, specs: Sequence[TensorSpec], max_batch_size: int) -> dict[str, TensorRule]:
    given: Sequence[object] = specs  # A model's author may have given something else.
    for spec in given:
        if not isinstance(spec, TensorSpec):
            raise ValueError(f"{kind}s: expected TensorSpecs, got {spec!r}")
        if spec.optional and kind == "output":
            raise ValueError(f"output {spec.name!r}: optional: only inputs can be optional")
    rules = {spec.name: TensorRule(spec) for spec in specs}
    if len(rules) != len(specs):
        raise ValueError(f"two {kind}s have the same name: {[spec.name for spec in specs]}")
    for spec in specs if max_batch_size > 0 else ():
        if not spec.shape or spec.shape[0] != -1:
            raise ValueError(
                f"{kind} {spec.name!r}: max_batch_size is {max_batch_size}, so the shape must begin "
                f"with -1 (the batch), got {shape_text(spec.shape)}"
            )
    return rules


def _checked_default(name: str, value: Any, rule: TensorRule | None) -> Array:
    """Return a read-only copy of the default, so that no call of the model can change it."""
    if rule is None:
        raise ValueError(f"defaults: no input is named {name!r}")
    if not isinstance(value, np.ndarray) or datatype_of(value) != rule.spec.datatype:
        raise ValueError(f"defaults: {name!r}: expected a {rule.spec.datatype} array, got {value!r}")
    array: Array = value.copy()
    array.flags.writeable = False
    return array


def default_of(signatures: Mapping[str, Signature]) -> str:
    """Return the name of the signature to use when none is named: `DEFAULT_SIGNATURE`, or else the first."""
    return DEFAULT_SIGNATURE if DEFAULT_SIGNATURE in signatures else next(iter(signatures))


def signature_with(signatures: Mapping[str, Signature], default: str, outputs: Sequence[str]) -> str:
    """Return the name of the only signature that has all `outputs`, or `default` if none has or several have."""
    having = [name for name, signature in signatures.items() if signature.output_rules.keys() >= set(outputs)]
    return having[0] if len(having) == 1 else default


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata of a model. `versions`: the serving ones, or the requested one; `version_names`: their names.

    `columns`: those of its table, where it knows their names. `example`: as `Model.example`.
    """

    name: str
    versions: list[str]
    platform: str
    signature: Signature
    decoupled: bool
    signature_name: str = DEFAULT_SIGNATURE
    speaks_json: bool = False
    sequences: bool = False
    version_names: Sequence[str] = ()
    columns: Sequence[TensorSpec] = ()
    example: Mapping[str, Any] | Sequence[Mapping[str, Any]] = ()
