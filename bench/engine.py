"""Loads the engine directly, in this process and without any protocol."""

import asyncio
import gc
import time

import numpy as np

from bench.measure import Round
from bench.payloads import tensor
from direct_work import direct_infer
from triglot.core.call import Call
from triglot.scheduling.servable import Servable


async def load(servable: Servable, elements: int, in_flight: int, seconds: float) -> Round:
    """Measure one round with `in_flight` tasks, each of which makes at least one call, and checks each result.

    The model's input `x` is FP32 of shape [1, elements]; its output `y` must be `x`, or its negation. CPU time is
    this process's. Raise `RuntimeError` for any other output.
    """
    inputs = {"x": tensor(1, elements)}
    latencies: list[float] = []
    clock = time.perf_counter

    async def client() -> None:
        finished_at = 0.0
        while finished_at < began + seconds:
            started = clock()
            with servable:
                answer = await direct_infer(servable, inputs, Call())
            finished_at = clock()
            latencies.append(finished_at - started)
            if abs(answer["y"][0, -1]) != abs(inputs["x"][0, -1]):
                raise RuntimeError("the model answered something else than it was asked")

    gc.collect()
    gc.disable()
    try:
        began, cpu = clock(), time.process_time()
        await asyncio.gather(*[client() for _ in range(in_flight)])
        elapsed, cpu = clock() - began, time.process_time() - cpu
    finally:
        gc.enable()
    p50, p99 = np.percentile(latencies, (50, 99))
    return Round(len(latencies) / elapsed, float(p50), float(p99), cpu / len(latencies))
