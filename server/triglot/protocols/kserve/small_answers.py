"""Small answers: what surrounds their tensors is the same from one to the next."""

from __future__ import annotations

from functools import lru_cache

from triglot.core.scattered import SMALL_BYTES
from triglot.core.tensor import DATATYPES, element_count
from triglot.core.types import InferenceResponse
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.wire import length_prefix, serialize

FINAL = "triton_final_response"
_INFER_RESPONSE, _ID, _RAW_OUTPUTS = 2, 3, 6
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]


def small_answer(response: InferenceResponse, *, final: bool | None = None) -> bytes | None:
    """The ModelInferResponse of an answer; with `final` the ModelStreamInferResponse, which says whether it is so.

    None for one with parameters of its own, with BYTES, without tensors, or of more bytes.
    """
    if (framing := _framing_of(response, final)) is None:
        return None
    size, head, before = framing
    raw = [output.array.tobytes() for output in response.outputs]
    if response.id:
        request_id = response.id.encode()
        request_id = length_prefix(_ID, len(request_id)) + request_id
        head = _head(final, size + len(request_id)) + request_id
    if len(raw) == 1:
        return head + before[0] + raw[0]
    return head + b"".join([piece for pair in zip(before, raw, strict=True) for piece in pair])


def _framing_of(response: InferenceResponse, final: bool | None) -> tuple[int, bytes, tuple[bytes, ...]] | None:
    """See `_framing`; None for what is no small answer."""
    if response.parameters or response.placed:
        return None
    layout = []
    for output in response.outputs:
        array = output.array
        dtype = array.dtype
        if array.nbytes > SMALL_BYTES or dtype.kind in "OSUT" or not dtype.isnative:
            return None
        layout.append((output.name, output.datatype, array.shape))
    framing = _framing(response.model_name, response.model_version, final, tuple(layout))
    return framing if 0 < framing[0] <= SMALL_BYTES else None


@lru_cache(maxsize=256)
def _framing(
    model_name: str, model_version: str, final: bool | None, layout: Layout
) -> tuple[int, bytes, tuple[bytes, ...]]:
    """The size of the ModelInferResponse, what stands before it, and before the data of each output.

    A size of 0: there is none.
    """
    response = pb.ModelInferResponse(model_name=model_name, model_version=model_version)
    if final is not None:
        response.parameters[FINAL].bool_param = final
    sizes = []
    for name, datatype, shape in layout:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        sizes.append(element_count(shape) * DATATYPES[datatype].itemsize)
    if not sizes:
        return 0, b"", ()
    before = [length_prefix(_RAW_OUTPUTS, size) for size in sizes]
    before[0] = serialize(response) + before[0]
    size = sum(map(len, before)) + sum(sizes)
    return size, _head(final, size), tuple(before)


def _head(final: bool | None, size: int) -> bytes:
    """What stands before a ModelInferResponse of so many bytes."""
    return b"" if final is None else length_prefix(_INFER_RESPONSE, size)
