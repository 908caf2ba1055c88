"""Does what it is asked, and all of it is wrong, on the event loop."""

import asyncio
import sys

import numpy as np

import triglot


class Misbehaving(triglot.Model):
    inputs = [triglot.TensorSpec("how", "BYTES", [1])]
    outputs = [triglot.TensorSpec("y", "FP32", [2])]

    async def infer(self, inputs):
        match inputs["how"][0].decode():
            case "not at all":
                return {"y": np.array([1, 2], dtype="f4")}
            case "value error":
                raise ValueError("the secret is 42")
            case "invalid argument":
                raise triglot.InvalidArgument("how must be 'not at all'")
            case "cancelled":
                raise asyncio.CancelledError
            case "exit":
                sys.exit("the secret is 42")
            case "wrong shape":
                return {"y": np.ones(3, "f4")}
