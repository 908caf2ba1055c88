"""Checks of the trace and log settings with the four clients of the tritonclient package.

python triton_settings.py GRPC_ADDRESS REST_ADDRESS FOLDER

The server traces into FOLDER/traces, a file for each request.
"""

import asyncio
import importlib
import json
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import checks
from triton_subject import open_subject as open_client

KINDS = ("grpc", "grpc.aio", "http", "http.aio")
SECONDS = 20
TRACED = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1", "trace_count": "-1", "log_frequency": "1"}
UNTRACED = dict.fromkeys(TRACED)
UNKNOWN_MODEL = "Request for unknown model: 'nope' is not found"


class Subject:
    """A client of each kind, and the server's folder of traces."""

    def __init__(self, clients, folder):
        self.clients = clients
        self.folder = folder

    def traces(self):
        """The traces that have been written, by the ids of their requests."""
        found = {}
        for file in self.folder.glob("traces.*[0-9]"):
            records = json.loads(file.read_text())
            (head,) = [record for record in records if "model_name" in record]
            found[head.get("request_id", "")] = records
        return found

    async def trace_of(self, request_id):
        """The records of a request, as soon as they are written."""
        end = time.monotonic() + SECONDS
        while (found := self.traces().get(request_id)) is None:
            assert time.monotonic() < end, "no trace"
            await asyncio.sleep(0.01)
        return found


async def trace_settings(client, **named):
    """The settings as plain values."""
    found = await client.client.update_trace_settings(**named)
    return plain(client, found, lambda value: list(value.value))


def plain(client, found, value_of):
    return found if client.http else {key: value_of(value) for key, value in found.settings.items()}


def first(value):
    return value[0] if isinstance(value, list) else value


async def check_trace_settings_by_every_client(t):
    for at, client in enumerate(t.clients):
        changed = await trace_settings(client, settings={"trace_rate": str(at + 5), "trace_level": ["OFF"]})
        assert first(changed["trace_rate"]) == str(at + 5)
        assert changed["trace_level"] == ["OFF"]
        assert first(changed["trace_file"]) == str(t.folder / "traces")
        for other in t.clients:
            found = await other.client.get_trace_settings()
            assert first(plain(other, found, lambda value: list(value.value))["trace_rate"]) == str(at + 5)
    await trace_settings(t.clients[0], settings=UNTRACED)


async def check_trace_settings_of_a_model(t):
    for client in t.clients:
        own = await trace_settings(client, model_name="half_plus_two", settings={"trace_rate": "7"})
        assert first(own["trace_rate"]) == "7"
        found = await client.client.get_trace_settings(model_name="half_plus_three")
        assert first(plain(client, found, lambda value: list(value.value))["trace_rate"]) == "1000"
        back = await trace_settings(client, model_name="half_plus_two", settings={"trace_rate": None})
        assert first(back["trace_rate"]) == "1000"


async def check_requests_are_traced(t):
    for client in t.clients:
        await trace_settings(client, model_name="half_plus_two", settings=TRACED)
        name = f"traced by {client.kind}"
        await client.client.infer("half_plus_two", client.floats(3), request_id=name)
        await client.client.infer("half_plus_three", client.floats(3), request_id=f"not {name}")
        records = await t.trace_of(name)
        assert f"not {name}" not in t.traces()
        activities = [record["activity"] for record in records if "activity" in record]
        assert activities == ["TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"]
        (names,) = [
            [stamp["name"] for stamp in record["timestamps"]] for record in records if "timestamps" in record
        ]
        assert (names[0], names[-1]) == ("REQUEST_START", "REQUEST_END")
        assert records[-1]["tensor"] == {"name": "y", "data": "3.5", "shape": "1", "dtype": "FP32"}
        await trace_settings(client, model_name="half_plus_two", settings=UNTRACED)
        await client.client.infer("half_plus_two", client.floats(3), request_id=f"after {name}")
    assert not [name for name in t.traces() if "after" in name]


async def check_trace_settings_that_are_refused(t):
    for client in t.clients:
        update = client.client.update_trace_settings
        await client.refused(update(settings={"trace_file": "x"}), "trace_file", grpc="UNIMPLEMENTED", http=501)
        await client.refused(update(settings={"trace_rate": "x"}), "trace_rate", grpc="INVALID_ARGUMENT", http=400)
        await client.refused(update(settings={"rate": "1"}), "'rate'", grpc="INVALID_ARGUMENT", http=400)
        await client.refused(
            client.client.get_trace_settings(model_name="nope"), UNKNOWN_MODEL, grpc="NOT_FOUND", http=404
        )


async def check_log_settings(t):
    start = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }

    def values(client, found):
        return plain(client, found, lambda value: getattr(value, value.WhichOneof("parameter_choice")))

    for client in t.clients:
        new = {"log_warning": False, "log_verbose_level": 1, "log_format": "ISO8601"}
        found = await client.client.update_log_settings(new)
        assert values(client, found) == start | new
        await client.client.infer("half_plus_two", client.floats(3))
        found = await client.client.update_log_settings({key: start[key] for key in new})
        assert values(client, found) == start
        assert values(client, await client.client.get_log_settings()) == start


async def check_log_settings_that_are_refused(t):
    for client in t.clients:
        update = client.client.update_log_settings
        await client.refused(update({"log_file": "x"}), "log_file", grpc="UNIMPLEMENTED", http=501)
        await client.refused(update({"log_format": "x"}), "log_format", grpc="INVALID_ARGUMENT", http=400)
        await client.refused(update({"info": True}), "'info'", grpc="INVALID_ARGUMENT", http=400)


@asynccontextmanager
async def open_subject():
    grpc, rest, folder = sys.argv[1:]
    async with AsyncExitStack() as stack:
        clients = []
        for kind in KINDS:
            module = importlib.import_module(f"tritonclient.{kind}")
            address = grpc if kind.startswith("grpc") else rest
            clients.append(await stack.enter_async_context(open_client(kind, module, address)))
        yield Subject(clients, Path(folder))


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], open_subject)
