"""Raw binary requests over REST: the body is the bytes of one tensor (spec 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

from triglot.core.errors import InvalidArgument
from triglot.core.http import HttpRequest
from triglot.core.tensor import DATATYPES, Array, Buffer, element_count, object_array
from triglot.core.types import InferenceRequest, InputTensor
from triglot.model.signature import Signature, shape_text
from triglot.protocols.kserve.rest import HEADER_LENGTH, RestInfer, json_length


def is_raw(http: HttpRequest) -> bool:
    """Whether the request has no JSON part. Raises `InvalidArgument` as `json_length`."""
    return HEADER_LENGTH in http.headers and json_length(http) == 0


def decode_raw(http: HttpRequest, signature: Signature) -> RestInfer:
    """Returns the request whose body is the model's only input, as a batch of one; all outputs are binary data.

    Raises `InvalidArgument` unless the signature has one input whose shape follows from the number of bytes.
    """
    model = http.path["model"]
    if len(signature.inputs) != 1:
        raise InvalidArgument(
            f"a raw binary request requires a model with 1 input, model '{model}' has {len(signature.inputs)}"
        )
    spec = signature.inputs[0]
    what = f"raw binary request for input '{spec.name}' of model '{model}'"
    if spec.shape is None:
        raise InvalidArgument(f"{what}: the input has no fixed rank, so its shape cannot be derived from the body")
    batch = (1,) if signature.max_batch_size else ()
    dims = tuple(spec.shape[len(batch) :])
    data: Buffer | Array
    if spec.datatype == "BYTES":
        if dims != (1,):
            raise InvalidArgument(f"{what}: BYTES requires an input of shape [1], got {shape_text(dims)}")
        data = object_array([bytes(http.body)], (1,))
    else:
        data = memoryview(http.body)
        dims = _concrete(dims, len(data) // DATATYPES[spec.datatype].itemsize, what)
    tensor = InputTensor(spec.name, spec.datatype, (*batch, *dims), data)
    request = InferenceRequest(model, http.path.get("version", ""), inputs=[tensor])
    return RestInfer(request, frozenset(), binary_by_default=True)


def _concrete(dims: Sequence[int], elements: int, what: str) -> tuple[int, ...]:
    """Returns the dims with the size of the dynamic one derived; whether the data fits is checked later."""
    unknown = [at for at, dim in enumerate(dims) if dim < 0]
    if not unknown:
        return tuple(dims)
    if len(unknown) > 1:
        raise InvalidArgument(
            f"{what}: only one dim can be derived from the number of bytes, the shape is {shape_text(dims)}"
        )
    others = element_count([dim for dim in dims if dim >= 0])
    if not others or elements % others:
        raise InvalidArgument(f"{what}: {elements} elements do not match the shape {shape_text(dims)}")
    return tuple(elements // others if dim < 0 else dim for dim in dims)
