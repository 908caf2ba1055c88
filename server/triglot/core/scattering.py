"""Which arrays of an answer may be sent from where they lie, as pieces of a `Scattered`.

Strategy: what leaves so must not change until it has left, and a model may write its next answer into the arrays
of its last one. So an array is sent from where it lies only where nobody is left who could write to it: it is laid
over a request's bytes, or CPython's count of references says that the model has kept neither it nor its memory.
Any other is copied, as small ones are.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from triglot.core.scattered import SCATTER_BYTES
from triglot.core.types import InferenceResponse, OutputTensor

OF_THE_CALL = 1
"""Once, a model's answer is the result of the future, or the execution, that its call has waited for."""


def may_scatter(response: InferenceResponse) -> bool:
    """Whether there is an array that is worth it, and none that may change while it is sent.

    To be asked before anything else refers to the arrays.
    """
    found = False
    for output in response.outputs:
        if output.array.nbytes >= SCATTER_BYTES:
            if not _stays(output, response):
                return False
            found = True
    return found


def _stays(output: OutputTensor, response: InferenceResponse) -> bool:
    if output.array.flags.writeable:
        return _is_let_go(output, response)
    base: Any = output.array.base
    while type(base) is np.ndarray and not base.flags.writeable and base.base is not None:
        base = base.base
    return isinstance(base, bytes) or (isinstance(base, memoryview) and base.readonly)


def _is_let_go(output: OutputTensor, response: InferenceResponse) -> bool:
    """Whether the model has kept nothing of it; no name here may refer to the array."""
    if response.answer is None or _answer_references(response) > _UNSHARED_ANSWER + OF_THE_CALL:
        return False
    # The model's dict, which is still there, has the array once, and so has the output.
    if _references(output) > _UNSHARED:
        return False
    return output.array.base is None or _owner_references(output) <= _UNSHARED_OWNER


def _references(output: OutputTensor) -> int:
    return sys.getrefcount(output.array)


def _owner_references(output: OutputTensor) -> int:
    owner = output.array.base
    # What is no array may share its memory with whomever it likes.
    return sys.getrefcount(owner) if type(owner) is np.ndarray and owner.base is None else sys.maxsize


def _answer_references(response: InferenceResponse) -> int:
    return sys.getrefcount(response.answer)


def _unshared() -> tuple[int, int, int]:
    """What is counted for what a model has made and let go: an answer, an array, the owner of an array's memory.

    Measured, since interpreters differ in what they count for the measuring itself.
    """
    response = InferenceResponse("m", "1", "", [], answer={"y": np.empty(2)[:1]})
    output = OutputTensor("y", "FP64", response.answer["y"])  # type: ignore[index]  # The dict above.
    return _answer_references(response), _references(output), _owner_references(output)


_UNSHARED_ANSWER, _UNSHARED, _UNSHARED_OWNER = _unshared()
