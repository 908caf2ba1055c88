"""Decoder for ModelInfer requests that parses all but their id, parameters and raw tensors once per layout.

Strategy: only three of a request's fields differ from call to call. These are cut out; the rest is the key of the
layout. See `protocols.layouts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triglot.core.types import InferenceRequest, InputTensor, TensorOptions
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import (
    ID,
    MAX_PARAMETERS,
    MAX_RAW,
    RAW_INPUTS,
    REQUEST_PARAMETERS,
    SCAN_FROM_BYTES,
    decode_infer,
    decode_parameters,
)
from triglot.protocols.kserve.parameters import set_parameters
from triglot.protocols.layouts import Layouts, length_tag, long_length
from triglot.protocols.wire import LENGTH, MAX_FIELDS, limit_error, parse

VIEW_FROM_BYTES = 16 * 1024
"""Tensors of larger messages are views of the message; in smaller ones, copies are quicker."""
_ID, _PARAMETERS, _RAW = map(length_tag, (ID, REQUEST_PARAMETERS, RAW_INPUTS))
_Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class _Layout:
    """What requests of a layout share. `inputs`: name, datatype, shape, and whether the data is a raw tensor."""

    model_name: str
    model_version: str
    inputs: Sequence[tuple[str, str, tuple[int, ...], bool]]
    outputs: Sequence[str]
    options: TensorOptions | None
    raw_count: int


class InferDecoder:
    """`codec.decode_infer` that parses each layout once. On the event loop."""

    def __init__(self) -> None:
        self._layouts: Layouts[_Layout] = Layouts()

    def __call__(self, data: bytes) -> InferenceRequest:
        """Returns the request of a serialized ModelInferRequest. Raises `InvalidArgument`."""
        try:
            key, request_id, parameters, raw = _cut(data)
        except (IndexError, ValueError):
            return decode_infer(data)  # It raises a precise error if the message is invalid.
        layout = self._layouts.get(key)
        if layout is None:
            request = decode_infer(data)
            if (layout := _layout_of(request, len(raw))) is not None:
                self._layouts.put(key, layout)
            return request
        if len(raw) != layout.raw_count or sum(map(len, parameters)) > SCAN_FROM_BYTES:
            return decode_infer(data)
        if len(raw) == len(layout.inputs):
            inputs = [
                InputTensor(name, datatype, shape, tensor)
                for (name, datatype, shape, _), tensor in zip(layout.inputs, raw, strict=True)
            ]
        else:
            tensors = iter(raw)
            inputs = [
                InputTensor(name, datatype, shape, next(tensors) if is_raw else b"")
                for name, datatype, shape, is_raw in layout.inputs
            ]
        request = InferenceRequest(
            layout.model_name, layout.model_version, request_id, inputs, layout.outputs, options=layout.options
        )
        if parameters:
            message = parse(pb.ModelInferRequest, b"".join(parameters))
            if len(message.parameters) > MAX_PARAMETERS.count:
                raise limit_error(MAX_PARAMETERS)
            set_parameters(request, decode_parameters(message.parameters))
        return request


def _cut(data: bytes) -> tuple[bytes, str, list[_Bytes], list[_Bytes]]:
    """Returns the layout's key, the id, the fields that hold parameters, and the raw tensors.

    Raises `IndexError` or `ValueError` for an unusual or damaged message.
    """
    end = len(data)
    whole = data if end < VIEW_FROM_BYTES else memoryview(data)
    request_id = ""
    kept: list[_Bytes] = []
    parameters: list[_Bytes] = []
    raw: list[_Bytes] = []
    at = since = 0
    for _ in range(MAX_FIELDS):
        if at == end:
            break
        tag, size, start = data[at], data[at + 1], at + 2
        if tag & 0x87 != LENGTH:
            raise ValueError("a field of another kind")
        if size > 0x7F:
            size, start = long_length(data, at + 1)
        after = start + size
        if after > end:
            raise ValueError("a field extends beyond the end")
        if tag == _RAW:
            raw.append(whole[start:after])
        elif tag == _ID:
            request_id = str(whole[start:after], "utf-8")
        elif tag == _PARAMETERS:
            parameters.append(whole[at:after])
        else:
            at = after
            continue
        kept.append(whole[since:at])
        at = since = after
    if at != end or len(raw) > MAX_RAW.count:
        raise ValueError("too many fields")
    kept.append(whole[since:])
    return b"".join(kept), request_id, parameters, raw


def _layout_of(request: InferenceRequest, raw_count: int) -> _Layout | None:
    """Returns the layout, None if it cannot be cached: with typed contents, or parameters of single inputs."""
    in_regions = {} if request.options is None else request.options.inputs
    if request.input_parameters is not None or len(request.inputs) - len(in_regions) != raw_count:
        return None
    inputs = [(one.name, one.datatype, one.shape, at not in in_regions) for at, one in enumerate(request.inputs)]
    outputs = tuple(request.outputs)
    return _Layout(request.model_name, request.model_version, inputs, outputs, request.options, raw_count)
