"""What is variable in a small ModelInfer request: its raw tensors and its id.

Where shared memory is named, that is the same each time, too.
"""

from __future__ import annotations

from triglot.core.tensor import DATATYPES
from triglot.core.types import InferenceRequest, InputTensor
from triglot.protocols.kserve.codec import ID, RAW_INPUTS, SCAN_FROM_BYTES, decode_infer
from triglot.protocols.templates import TemplateDecoder, Variables
from triglot.protocols.wire import LENGTH, fields

NO_PLACE = slice(0)
"""Of what is in a region."""


def infer_decoder() -> TemplateDecoder[InferenceRequest]:
    """`codec.decode_infer`, with a memory for small messages."""
    return TemplateDecoder(decode_infer, _find, SCAN_FROM_BYTES)


def _find(data: bytes, request: InferenceRequest) -> Variables[InferenceRequest] | None:
    if request.parameters or request.input_parameters is not None:
        return None
    options = request.options
    in_regions = options.inputs if options is not None else {}
    in_message = [tensor for at, tensor in enumerate(request.inputs) if at not in in_regions]
    if not all(map(_fixed_size, in_message)):
        return None
    found = [
        (number, slice(start, end))
        for number, wire_type, start, end in fields(data)
        if wire_type == LENGTH and number in (ID, RAW_INPUTS)
    ]
    ids = [place for number, place in found if number == ID]
    raw = [place for number, place in found if number == RAW_INPUTS]
    if len(raw) != len(in_message) or len(ids) > 1:
        return None
    id_place = ids[0] if ids else None
    # Copied out: whoever has the request may change it.
    model_name, model_version, outputs = request.model_name, request.model_version, tuple(request.outputs)
    raw_places = iter(raw)
    inputs = [
        (tensor.name, tensor.datatype, tensor.shape, NO_PLACE if at in in_regions else next(raw_places))
        for at, tensor in enumerate(request.inputs)
    ]

    def make(data: bytes) -> InferenceRequest | None:
        request_id = ""
        if id_place is not None:
            try:
                request_id = data[id_place].decode()
            except UnicodeDecodeError:
                return None
        tensors = [InputTensor(name, datatype, shape, data[place]) for name, datatype, shape, place in inputs]
        return InferenceRequest(model_name, model_version, request_id, tensors, outputs, options=options)

    return Variables([place for _, place in found], make, None if ids or options is not None else raw)


def _fixed_size(tensor: InputTensor) -> bool:
    datatype = DATATYPES.get(tensor.datatype)
    return datatype is not None and bool(datatype.itemsize) and isinstance(tensor.data, bytes)
