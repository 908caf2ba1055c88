"""The signatures that a model declares."""

from __future__ import annotations

from dataclasses import replace

from triglot.model.model import Model
from triglot.model.scheduling import SequenceBatching
from triglot.model.signature import DEFAULT_SIGNATURE, Signature


def signatures_of(model: Model) -> dict[str, Signature]:
    """Return a model's signatures by name; `inputs` and `outputs` are included as `DEFAULT_SIGNATURE`.

    Sequence controls and implicit states are excluded: no client sends or receives them.
    Raise `ValueError` as `Signature` does, and when the default signature is declared twice.
    """
    declared = dict(model.signatures)
    for name, signature in declared.items():
        if not isinstance(signature, Signature):
            raise ValueError(f"signatures: {name!r}: expected a Signature, got {signature!r}")
    if model.any_tensors:
        return {DEFAULT_SIGNATURE: Signature(tuple(model.inputs), tuple(model.outputs), any_tensors=True)}
    if model.inputs or model.outputs or not declared:
        if DEFAULT_SIGNATURE in declared:
            raise ValueError(f"signatures: {DEFAULT_SIGNATURE!r} is already declared by inputs and outputs")
        own = Signature(
            tuple(model.inputs), tuple(model.outputs), unservable_outputs=dict(model.unservable_outputs)
        )
        declared = {DEFAULT_SIGNATURE: own, **declared}
    return {
        name: _without_own(
            replace(
                signature,
                max_batch_size=model.max_batch_size,
                any_inputs=model.any_inputs,
            ),
            model.sequence_batching,
        )
        for name, signature in declared.items()
    }


def _without_own(signature: Signature, sequences: object) -> Signature:
    """Return the signature without sequence controls and implicit states (spec 5.2)."""
    if not isinstance(sequences, SequenceBatching):
        return signature
    inputs = {control.name for control in sequences.controls} | {state.input_name for state in sequences.states}
    outputs = {state.output_name for state in sequences.states if not state.returned}
    return replace(
        signature,
        inputs=[spec for spec in signature.inputs if spec.name not in inputs],
        outputs=[spec for spec in signature.outputs if spec.name not in outputs],
        defaults={name: value for name, value in signature.defaults.items() if name not in inputs},
    )
