"""What is variable in a small ModelInfer request: its raw tensors and its id."""

from __future__ import annotations

from triglot.core.tensor import DATATYPES
from triglot.core.types import InferenceRequest, InputTensor
from triglot.protocols.kserve.codec import ID, RAW_INPUTS, SCAN_FROM_BYTES, decode_infer
from triglot.protocols.templates import TemplateDecoder, Variables
from triglot.protocols.wire import LENGTH, fields


def infer_decoder() -> TemplateDecoder[InferenceRequest]:
    """`codec.decode_infer`, with a memory for small messages."""
    return TemplateDecoder(decode_infer, _find, SCAN_FROM_BYTES)


def _find(data: bytes, request: InferenceRequest) -> Variables[InferenceRequest] | None:
    if request.parameters or request.options is not None or request.input_parameters is not None:
        return None
    if not all(_fixed_size(tensor) for tensor in request.inputs):
        return None
    found = [
        (number, slice(start, end))
        for number, wire_type, start, end in fields(data)
        if wire_type == LENGTH and number in (ID, RAW_INPUTS)
    ]
    ids = [place for number, place in found if number == ID]
    raw = [place for number, place in found if number == RAW_INPUTS]
    if len(raw) != len(request.inputs) or len(ids) > 1:
        return None
    id_place = ids[0] if ids else None
    # Copied out: whoever has the request may change it.
    model_name, model_version, outputs = request.model_name, request.model_version, tuple(request.outputs)
    inputs = [
        (tensor.name, tensor.datatype, tensor.shape, place)
        for tensor, place in zip(request.inputs, raw, strict=True)
    ]

    def make(data: bytes) -> InferenceRequest | None:
        request_id = ""
        if id_place is not None:
            try:
                request_id = data[id_place].decode()
            except UnicodeDecodeError:
                return None
        tensors = [InputTensor(name, datatype, shape, data[place]) for name, datatype, shape, place in inputs]
        return InferenceRequest(model_name, model_version, request_id, tensors, outputs)

    return Variables([place for _, place in found], make, None if ids else raw)


def _fixed_size(tensor: InputTensor) -> bool:
    datatype = DATATYPES.get(tensor.datatype)
    return datatype is not None and bool(datatype.itemsize) and isinstance(tensor.data, bytes)
