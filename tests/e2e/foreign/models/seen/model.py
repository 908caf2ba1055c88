"""Waits `ms` milliseconds; returns the metadata called `name`, and the days to the call's deadline (-1: none)."""

import asyncio

import numpy as np

import triglot


class Seen(triglot.Model):
    inputs = [triglot.TensorSpec("ms", "INT32", [1]), triglot.TensorSpec("name", "BYTES", [1])]
    outputs = [triglot.TensorSpec("value", "BYTES", [1]), triglot.TensorSpec("days", "INT32", [1])]

    async def infer(self, inputs, call):
        days = -1 if call.remaining is None else int(call.remaining // 86400)
        value = call.metadata.get(inputs["name"][0].decode(), "")
        await asyncio.sleep(inputs["ms"][0] / 1000)
        value = value if isinstance(value, bytes) else value.encode()
        return {"value": np.array([value], object), "days": np.array([days], np.int32)}
