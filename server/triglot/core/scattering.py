"""Decides which arrays of a response may be sent from where they are, as pieces of a `Scattered`.

Strategy: memory must not change until it is sent, and a model may write its next response into the arrays of the
last one. So an array is sent in place only if no code is left that could write to it: it is a view of the
request's bytes, or CPython's reference counts show that the model has kept neither it nor its memory. Any other
array is copied, as small ones are.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from triglot.core.tensor import SCATTER_BYTES
from triglot.core.types import InferenceResponse, OutputTensor

OF_THE_CALL = 1
"""References to a model's answer besides the response's: the future, or the execution, that its call awaits."""


def may_scatter(response: InferenceResponse) -> bool:
    """Whether there is an array large enough to send in place, and none that may change meanwhile.

    Must be called before anything else refers to the arrays.
    """
    found = False
    for output in response.outputs:
        if output.array.nbytes >= SCATTER_BYTES:
            if not _may_send_in_place(output, response):
                return False
            found = True
    return found


def _may_send_in_place(output: OutputTensor, response: InferenceResponse) -> bool:
    if output.array.flags.writeable:
        return _is_unshared(output, response)
    base: Any = output.array.base
    while type(base) is np.ndarray and not base.flags.writeable and base.base is not None:
        base = base.base
    return isinstance(base, bytes) or (isinstance(base, memoryview) and base.readonly)


def _is_unshared(output: OutputTensor, response: InferenceResponse) -> bool:
    """Whether the model has kept no reference to it; no variable here may refer to the array."""
    if response.answer is None or _answer_references(response) > _UNSHARED_ANSWER + OF_THE_CALL:
        return False
    # The model's dict, which still exists, refers to the array once, and so does the output.
    if _references(output) > _UNSHARED:
        return False
    return output.array.base is None or _owner_references(output) <= _UNSHARED_OWNER


def _references(output: OutputTensor) -> int:
    return sys.getrefcount(output.array)


def _owner_references(output: OutputTensor) -> int:
    owner = output.array.base
    # An object that is not an array may share its memory with any other.
    return sys.getrefcount(owner) if type(owner) is np.ndarray and owner.base is None else sys.maxsize


def _answer_references(response: InferenceResponse) -> int:
    return sys.getrefcount(response.answer)


def _unshared() -> tuple[int, int, int]:
    """Return the reference counts of what a model made and did not keep: an answer, an array, the memory's owner.

    Measured, since interpreters differ in how many references the call itself adds.
    """
    response = InferenceResponse("m", "1", "", [])
    response.answer = answer = {"y": np.empty(2)[:1]}
    output = OutputTensor("y", "FP64", answer["y"])
    del answer
    return _answer_references(response), _references(output), _owner_references(output)


_UNSHARED_ANSWER, _UNSHARED, _UNSHARED_OWNER = _unshared()
