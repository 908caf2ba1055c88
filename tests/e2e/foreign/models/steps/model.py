"""Counts to `n`, a response every `ms` milliseconds; with n = -1 says within `ms` if a stream was closed."""

import asyncio
import collections
import contextlib

import numpy as np

import triglot


class Steps(triglot.Model):
    inputs = [triglot.TensorSpec("n", "INT32", [1]), triglot.TensorSpec("ms", "INT32", [1])]
    outputs = [triglot.TensorSpec("step", "INT32", [1])]

    def __init__(self):
        self.closed = collections.defaultdict(asyncio.Event)

    async def infer(self, inputs, call):
        n, seconds = int(inputs["n"][0]), inputs["ms"][0] / 1000
        if n < 0:
            yield {"step": np.array([await self.is_closed(call.request_id, seconds)], np.int32)}
            return
        step = 0
        try:
            while step < n:
                yield {"step": np.array([step], np.int32)}
                step += 1
                await asyncio.sleep(seconds)
        finally:
            if step < n:
                self.closed[call.request_id].set()

    async def is_closed(self, request_id, seconds):
        """Return whether the stream with this id was closed before its end; waits so many seconds for that."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.closed[request_id].wait(), seconds)
        return self.closed[request_id].is_set()
