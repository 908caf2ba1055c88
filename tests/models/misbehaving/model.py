"""Does what it is asked, and all of it is wrong."""

import asyncio
import sys

import numpy as np

import triglot


class Misbehaving(triglot.Model):
    inputs = [triglot.TensorSpec("how", "BYTES", [1])]
    outputs = [triglot.TensorSpec("y", "FP32", [2])]

    def infer(self, inputs):  # noqa: PLR0911, PLR0912
        good = np.array([1, 2], dtype="f4")
        match inputs["how"][0].decode():
            case "not at all":
                return {"y": good}
            case "big endian":
                return {"y": good.astype(">f4")}
            case "value error":
                raise ValueError("the secret is 42")
            case "invalid argument":
                raise triglot.InvalidArgument("how must be 'not at all'")
            case "not found":
                raise triglot.NotFound("nothing is found")
            case "unavailable":
                raise triglot.Unavailable("not now")
            case "long text":
                raise triglot.InvalidArgument("é" * 50_000)
            case "lone surrogate":
                raise triglot.InvalidArgument("no text: \ud800")
            case "cancelled":
                raise asyncio.CancelledError
            case "exit":
                sys.exit("the secret is 42")
            case "wrong datatype":
                return {"y": np.array([1.0, 2.0])}
            case "no datatype":
                return {"y": np.array(["2026-01-01"], "M8[s]")}
            case "wrong shape":
                return {"y": np.ones(3, "f4")}
            case "missing output":
                return {"z": good}
            case "not a dict":
                return good
            case "nothing":
                return None
