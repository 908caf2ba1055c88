"""TensorFlow Serving's checks of a Predict call, in its order and with its texts (tfs 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from triglot.core.errors import InvalidArgument
from triglot.core.types import InputTensor
from triglot.model.signature import Signature
from triglot.pb.tfserving import signature_pb2
from triglot.protocols.tfserving.codec import PredictRequest
from triglot.protocols.tfserving.tensor import dtype_name


def listed(names: Collection[str]) -> str:
    """Returns a set of names in the form of some messages."""
    return ",".join(sorted(names))


def braced(names: Collection[str]) -> str:
    """Returns a set of names in the form of the other messages."""
    return f"{{{listed(names)}}}"


def check_predict(
    request: PredictRequest, signature: Signature, define: Callable[[], signature_pb2.SignatureDef]
) -> None:
    """Raises `InvalidArgument` for the first mismatch with the signature; shapes are not checked.

    `define` returns the signature's definition, for texts that name its tensors.
    """
    rules = signature.input_rules
    sent = {tensor.name for tensor in request.inputs}
    if (sent != rules.keys() and not signature.any_inputs) or request.unreadable:
        _check_names(request, signature, sent | request.unreadable.keys(), define)
    if request.output_filter:
        _check_filter(request.output_filter, signature)
    if not signature.any_inputs:
        check_datatypes(request.inputs, signature)


def check_datatypes(inputs: Iterable[InputTensor], signature: Signature) -> None:
    """Raises `InvalidArgument` for the first of the signature's inputs that has a wrong datatype."""
    rules = signature.input_rules
    wrong = {tensor.name: tensor for tensor in inputs if tensor.datatype != rules[tensor.name].spec.datatype}
    if wrong:
        at, name = next((at, name) for at, name in enumerate(sorted(rules)) if name in wrong)
        wanted, sent = dtype_name(rules[name].spec.datatype), dtype_name(wrong[name].datatype)
        raise InvalidArgument(f"Expects arg[{at}] to be {wanted} but {sent} is provided")


def _check_names(
    request: PredictRequest,
    signature: Signature,
    sent: Collection[str],
    define: Callable[[], signature_pb2.SignatureDef],
) -> None:
    wanted, may_lack = signature.input_rules.keys(), signature.may_lack
    if len(sent) > len(wanted) or (len(sent) < len(wanted) and not may_lack):
        raise InvalidArgument(
            f"input size does not match signature: {len(sent)}!={len(wanted)} len({braced(sent)}) != "
            f"len({braced(wanted)}). Sent extra: {braced(set(sent) - wanted)}. Missing but required: "
            f"{braced(wanted - set(sent))}."
        )
    for alias in sorted(wanted):
        if alias in request.unreadable:
            raise InvalidArgument(f"tensor parsing error: {alias}")
        if alias not in sent and alias not in may_lack:
            raise InvalidArgument(
                f"Signature input alias: {alias}(feed name: {define().inputs[alias].name}) not found in request "
                f"and no default value provided. Inputs expected to be in the request {braced(sent)}, or default "
                f"input alias set: {listed(signature.defaults)}"
            )
    used = wanted & set(sent)
    if len(used) < len(sent):
        raise InvalidArgument(
            f"Inputs contains invalid name. Used request inputs: {listed(used)}, request input: {listed(sent)}"
        )


def _check_filter(output_filter: Collection[str], signature: Signature) -> None:
    seen: set[str] = set()
    known = signature.output_rules.keys() | signature.unservable_outputs.keys()
    for alias in output_filter:
        if alias not in known:
            raise InvalidArgument(
                f"output tensor alias not found in signature: {alias} Outputs expected to be in the set "
                f"{braced(known)}."
            )
        if alias in seen:
            raise InvalidArgument(f"duplicate output tensor alias: {alias}")
        seen.add(alias)
