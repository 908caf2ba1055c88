"""What a check of the tritonclient package is given: one of its four clients behind one face."""

import asyncio
import threading
from contextlib import asynccontextmanager

import numpy as np
from checks import Raises
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

GRPC, GRPC_AIO, HTTP, HTTP_AIO = "grpc", "grpc.aio", "http", "http.aio"


class _Awaitable:
    """A blocking client whose calls can be awaited, like those of its asyncio twin."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        method = getattr(self._client, name)

        async def call(*arguments, **named):
            return method(*arguments, **named)

        return call


class Subject:
    """A client of the package. `client` has its methods, all to be awaited; `plain` is the client itself."""

    def __init__(self, kind, module, plain, address):
        self.kind = kind
        self.module = module
        self.plain = plain
        self.address = address
        self.http = kind in (HTTP, HTTP_AIO)
        self.client = plain if kind in (GRPC_AIO, HTTP_AIO) else _Awaitable(plain)

    def input(self, name, array, **options):
        """The array as an input; `binary_data` is an option over HTTP."""
        tensor = self.module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, **options)
        return tensor

    def floats(self, *values):
        """The input of half_plus_two."""
        return [self.input("x", np.array(values, dtype=np.float32))]

    async def identity(self, datatype, array, **options):
        """What the identity model of the datatype answers."""
        result = await self.client.infer(f"identity_{datatype.lower()}", [self.input("x", array)], **options)
        return result.as_numpy("y")

    def response(self, result):
        """The response as a dict."""
        return result.get_response() if self.http else result.get_response(as_json=True)

    async def json(self, method, *arguments):
        """The answer of a metadata call as a dict; gRPC's has its int64 as text."""
        if self.http:
            return await getattr(self.client, method)(*arguments)
        return await getattr(self.client, method)(*arguments, as_json=True)

    async def refused(self, call, text, *, grpc, http):
        """Asserts that awaiting `call` raises the client's exception with this status and text."""
        with Raises(InferenceServerException) as caught:
            await call
        status = str(http) if self.http else f"StatusCode.{grpc}"
        assert caught.error.status() == status, f"{caught.error}, expected {status}"
        assert text in caught.error.message(), f"{caught.error} does not have {text!r}"

    async def infer_all(self, model, requests):
        """The results of many requests in flight at once, in order."""
        if self.kind == GRPC:
            return await asyncio.to_thread(self._infer_all_grpc, model, requests)
        if self.kind == HTTP:
            with self.module.InferenceServerClient(self.address, concurrency=10) as client:
                calls = [client.async_infer(model, inputs) for inputs in requests]
                return [call.get_result() for call in calls]
        return await asyncio.gather(*(self.client.infer(model, inputs) for inputs in requests))

    def _infer_all_grpc(self, model, requests):
        answers = [None] * len(requests)
        missing = threading.Semaphore(0)

        def keep(at):
            def callback(result, error):
                answers[at] = error or result
                missing.release()

            return callback

        for at, inputs in enumerate(requests):
            self.plain.async_infer(model, inputs, callback=keep(at))
        for _ in requests:
            assert missing.acquire(timeout=60), "a callback was not called"
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


@asynccontextmanager
async def open_subject(kind, module, address):
    """The subject of one kind of client, made as its users make it."""
    if kind in (GRPC_AIO, HTTP_AIO):
        async with module.InferenceServerClient(address) as client:
            yield Subject(kind, module, client, address)
    else:
        with module.InferenceServerClient(address) as client:
            yield Subject(kind, module, client, address)
