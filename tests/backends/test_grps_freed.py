"""What a call holds, which may be much, is given back when it ends, and not left to the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.grps_folders import PATIENCE, batched, entry, own_module, write_project
from tests.backends.grps_served import PREDICT, Served, served
from triglot.core.call import Call
from triglot.pb.grps.grps_pb2 import GrpsMessage

INFERER = """
import weakref

KEPT = []

class Data:
    pass

class Inferer(Base):
    def infer(self, inp, context):
        data = Data()
        KEPT.append(weakref.ref(data))
        context.put_user_data("data", data)
        if inp.str_data == "raises":
            raise ValueError("boom")
        if inp.str_data == "reports":
            context.set_err_msg("boom")
        context.stream_respond(GrpsMessage(str_data="a"))
        if inp.str_data == "final":
            context.stream_respond(GrpsMessage(str_data="b"), final=True)
        return inp

    def batch_infer(self, inps, contexts):
        return [self.infer(*pair) for pair in zip(inps, contexts)]

inferer_register.register("inferer", Inferer())
"""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """pytest keeps what is logged, and with it the traces' frames."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def calls() -> int:
    """How many there are, of other tests as well."""
    return sum(type(held) is Call for held in gc.get_objects())


async def ask(server: Served, interface: str, text: str, model: str) -> None:
    message = GrpsMessage(str_data=text, model=model)
    if interface == "gRPC":
        await server.predict(message)
    elif interface == "gRPC stream":
        await server.stream(message)
    else:
        query = f"model={model}&streaming={'true' if interface == 'HTTP stream' else 'false'}"
        await server.ask("POST", f"{PREDICT}?{query}", {"str_data": text})


@pytest.mark.parametrize("text", ["is well", "raises", "reports", "final"])
@pytest.mark.parametrize("interface", ["gRPC", "gRPC stream", "HTTP", "HTTP stream"])
@pytest.mark.parametrize("model", ["m-1.0.0", "b-1.0.0"])
async def test_nothing_is_left_to_the_garbage_collector(
    tmp_path: Path, model: str, interface: str, text: str
) -> None:
    models = [entry("m"), entry("b", batching=batched(4, 1))]
    async with served(write_project(tmp_path, INFERER, models=models)) as server:
        gc.collect()
        gc.disable()
        before = calls()
        try:
            for _ in range(3):
                await ask(server, interface, text, model)
            kept, deadline = own_module().KEPT, time.monotonic() + PATIENCE
            assert len(kept) == 3
            # The instance's thread forgets a call a moment after it has handed over the answer.
            while any(data() is not None for data in kept) or calls() > before:
                assert time.monotonic() < deadline, "something is still held"
                await asyncio.sleep(0.001)
        finally:
            gc.enable()
