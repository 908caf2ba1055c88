"""What a check of all of tritonclient's functions is given."""

import asyncio
import functools
import importlib
import itertools
from contextlib import asynccontextmanager

import numpy as np
import triton_subject
from triton_all_calls import Calls
from tritonclient import utils
from tritonclient.utils import shared_memory

_numbers = itertools.count(1)


class AllSubject(triton_subject.Subject):
    """The models of tests/models_triton, and what has been called so far."""

    def __init__(self, *of, calls):
        super().__init__(*of)
        self.calls = calls
        self.next = lambda: next(_numbers)

    def pair(self, first, second, dtype=np.int32, **options):
        """The inputs of add/sub models: rows of one number."""
        return [
            self.input(f"INPUT{at}", np.full((1, 16), value, dtype), **options)
            for at, value in enumerate((first, second))
        ]

    def empty(self, name, shape, dtype):
        """An input without data yet."""
        return self.module.InferInput(name, shape, utils.np_to_triton_dtype(np.dtype(dtype)))

    def wanted(self, name, **options):
        return self.module.InferRequestedOutput(name, **options)

    async def config(self, model, version=""):
        """A model's configuration as a dict."""
        answer = await self.json("get_model_config", model, version)
        return answer if self.http else answer["config"]

    async def statistics(self, model, version=""):
        """Those of one model, with integers."""
        answer = await self.json("get_inference_statistics", model, version)
        return [_plain(stats) for stats in answer["model_stats"]]

    async def settings(self, method, *arguments):
        """Settings as name → value, however the client says it."""
        answer = await self.json(method, *arguments)
        return answer if self.http else {key: _value(setting) for key, setting in answer["settings"].items()}


def _value(setting):
    """A SettingValue's, as the REST interface has it; zero is not written."""
    if "value" in setting:
        return setting["value"] if len(setting["value"]) > 1 else setting["value"][0]
    return next(iter(setting.values()), None)


def _plain(value):
    """gRPC's JSON has 64-bit integers as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, str) and value.isdecimal() else value


@asynccontextmanager
async def open_all(kind, address):
    """The subject of one kind of client; its functions are noted from here on."""
    module = importlib.import_module(f"tritonclient.{kind}")
    # What an asynchronous call gives its caller has no public name; the asyncio clients have no such calls.
    more = (
        [importlib.import_module("tritonclient.grpc._client").CallContext] if kind == triton_subject.GRPC else []
    )
    but = ["InferAsyncRequest"] if kind == triton_subject.HTTP_AIO else []
    calls = Calls(module, utils, shared_memory, more=more, but=but)
    make = functools.partial(AllSubject, calls=calls)
    if kind in (triton_subject.GRPC_AIO, triton_subject.HTTP_AIO):
        async with module.InferenceServerClient(address) as client:
            yield make(kind, module, client, address)
    else:
        with module.InferenceServerClient(address) as client:
            yield make(kind, module, client, address)


async def close(subject, client):
    """Close a client of any kind."""
    done = client.close()
    if asyncio.iscoroutine(done):
        await done
