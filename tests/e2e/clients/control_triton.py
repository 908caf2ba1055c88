"""Checks of tritonclient's four clients: models loaded and unloaded.

python control_triton.py GRPC_ADDRESS REST_ADDRESS grpc|grpc.aio|http|http.aio

The server controls its models explicitly, and has loaded none. Its repository has `says` with versions 1 and 2,
which answer their number or what the configuration's parameter `says` is, `broken`, which cannot be loaded, and
`other`.
"""

import importlib
import json
import sys

import checks
import numpy as np
from triton_subject import open_subject


def config(**fields):
    return json.dumps(fields)


def saying(number):
    return {"parameters": {"says": {"string_value": str(number)}}}


async def ask(t, version="", size=1):
    x = t.input("x", np.zeros(size, dtype=np.int32))
    result = await t.client.infer("says", [x], model_version=version)
    return result.as_numpy("y").tolist()[0]


async def index(t, name):
    """The model's lines: version, state, reason; once nothing of it is being unloaded."""
    while True:
        answer = await t.json("get_model_repository_index")
        rows = [row for row in (answer if t.http else answer["models"]) if row["name"] == name]
        found = [tuple(row.get(key, "") for key in ("version", "state", "reason")) for row in rows]
        if all(state != "UNLOADING" for _, state, _ in found):
            return found


async def check_never_loaded(t):
    assert await index(t, "says") == [("", "", "")]
    assert await t.client.is_server_ready() is True
    assert await t.client.is_model_ready("says") is False
    await t.refused(ask(t), "Request for unknown model: 'says' is not found", grpc="NOT_FOUND", http=404)


async def check_load(t):
    assert await t.client.load_model("says") is None
    assert await index(t, "says") == [("1", "READY", ""), ("2", "READY", "")]
    assert await t.client.is_model_ready("says") is True
    assert await t.client.is_model_ready("says", "1") is True
    assert [await ask(t, version) for version in ("", "1", "2")] == [2, 1, 2]
    metadata = await t.json("get_model_metadata", "says")
    assert metadata["versions"] == ["1", "2"]
    await t.client.load_model("says")
    assert await ask(t) == 2


async def check_config(t):
    await t.client.load_model("says", config=config(max_batch_size=3, **saying(33)))
    assert await ask(t, size=3) == 33
    assert await index(t, "says") == [("2", "READY", "")], "Triton's policy is the latest version"
    too_many = ask(t, size=4)
    await t.refused(too_many, "inference request batch-size must be <= 3", grpc="INVALID_ARGUMENT", http=400)
    await t.client.load_model("says", config=config(version_policy={"specific": {"versions": [1]}}))
    assert await ask(t) == 1
    assert await index(t, "says") == [("1", "READY", "")]
    await t.refused(ask(t, "2"), "Request for unknown model: 'says' version 2 is not", grpc="NOT_FOUND", http=404)
    await t.client.load_model("says")
    assert [await ask(t, version) for version in ("1", "2")] == [1, 2]


async def check_wrong_config(t):
    for text in ("", "[]", "{", '{"nonsense": 1}', config(name="other")):
        call = t.client.load_model("says", config=text)
        await t.refused(call, "the request to load model 'says'", grpc="INVALID_ARGUMENT", http=400)
    assert await ask(t) == 2


async def check_files(t):
    content = b"import os"
    call = t.client.load_model("says", config="{}", files={"file:1/model.py": content})
    text = "failed to load 'says', failed to poll from model repository: 'file:1/model.py': "
    await t.refused(call, text, grpc="INTERNAL", http=500)
    assert await ask(t) == 2


async def check_unload(t):
    assert await t.client.unload_model("says") is None
    assert await t.client.is_model_ready("says") is False
    assert await t.client.is_model_ready("says", "2") is False
    assert await t.client.is_server_ready() is True
    text = "Request for unknown model: 'says' "
    await t.refused(ask(t), text + "has no available versions", grpc="NOT_FOUND", http=404)
    await t.refused(ask(t, "2"), text + "version 2 is not at ready state", grpc="UNAVAILABLE", http=503)
    assert await index(t, "says") == [(version, "UNAVAILABLE", "unloaded") for version in ("1", "2")]


async def check_unload_dependents(t):
    for flag in (True, False):
        await t.client.load_model("says")
        await t.client.unload_model("says", unload_dependents=flag)
        assert await t.client.is_model_ready("says") is False


async def check_unload_of_nothing(t):
    await t.client.unload_model("nope")
    await t.client.unload_model("says")
    assert await index(t, "nope") == []


async def check_unknown_model(t):
    text = "failed to load 'nope', failed to poll from model repository"
    await t.refused(t.client.load_model("nope"), text, grpc="INTERNAL", http=500)


async def check_broken_model(t):
    text = "load failed for model 'broken': version 1 is at UNAVAILABLE state: "
    for _ in range(2):
        await t.refused(t.client.load_model("broken"), text, grpc="INVALID_ARGUMENT", http=400)
    ((version, state, reason),) = await index(t, "broken")
    assert (version, state) == ("1", "UNAVAILABLE")
    assert reason.endswith("OSError: no disk")
    assert await t.client.is_server_ready() is False
    await t.client.unload_model("broken")
    assert await index(t, "broken") == [("1", "UNAVAILABLE", "unloaded")]
    assert await t.client.is_server_ready() is True


async def check_two_models(t):
    for name in ("says", "other"):
        await t.client.load_model(name)
    assert await t.client.is_model_ready("says") is True
    await t.client.unload_model("says")
    assert await t.client.is_model_ready("other") is True
    await t.client.unload_model("other")


if __name__ == "__main__":
    grpc_address, rest_address, kind = sys.argv[1:]
    module = importlib.import_module(f"tritonclient.{kind}")
    address = grpc_address if kind.startswith("grpc") else rest_address
    checks.run([sys.modules["__main__"]], lambda: open_subject(kind, module, address))
