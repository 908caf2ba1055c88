"""Recognises CUDA errors after which the process can use no GPU again, by the texts of PyTorch and CuPy."""

from __future__ import annotations

import re

from triglot.core.errors import text_of

_LOST = re.compile(
    r"^(?:[\w.]+: )?(?:CUDA error|cudaError\w+|CUDA_ERROR_\w+): ("
    r"device-side assert triggered|an illegal memory access was encountered|"
    r"an illegal instruction was encountered|misaligned address|invalid program counter|"
    r"operation not supported on global/shared address space|"
    r"hardware stack error|unspecified launch failure|the launch timed out and was terminated|"
    r"uncorrectable ECC error encountered|uncorrectable NVLink error detected during the execution)",
    re.MULTILINE,
)
"""The texts of `cudaGetErrorString` for sticky errors, which every later CUDA call returns as well."""


def cuda_loss(error: BaseException | None) -> str:
    """Return the CUDA error by which the process lost its GPUs, from an error or its causes; "" if it did not."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if found := _LOST.search(text_of(error)):
            return found[1]
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return ""
