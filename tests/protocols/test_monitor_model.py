"""What the monitor page shows of one model, and of the server that it makes calls to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import numpy as np
import pytest

import triglot
from tests.process import write_model
from tests.transports.live import Live, live
from triglot import testing
from triglot.core.tensor import Array
from triglot.model.config import ALL
from triglot.protocols.monitor.routes import MODEL, OVERVIEW
from triglot.repository.config.settings import ModelSettings

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Odd(triglot.Model):
    inputs = [
        triglot.TensorSpec("x", "FP32", [-1, 2]),
        triglot.TensorSpec(HOSTILE, "BYTES", None, optional=True),
        triglot.TensorSpec("large", "FP16", [3, 224, 224]),
    ]
    outputs = [triglot.TensorSpec("y", "INT64", [])]

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": np.array(1)}


async def found(server: triglot.Server, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{server.rest_port}{path}?{urlencode(query)}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        assert response.headers["Cache-Control"] == "no-store"
        return await response.json()


async def details(server: Live, **query: str) -> Any:
    return await found(server.server, MODEL, **query)


async def test_a_model_that_serves() -> None:
    async with live({"odd": Odd()}) as server:
        document = await details(server, name="odd")
        assert (document["name"], document["labels"], document["error"]) == ("odd", {}, "")
        serves = document["serves"]
        assert (serves["version"], serves["platform"], serves["default_signature"]) == (
            1,
            "python",
            "serving_default",
        )
        assert not any(serves[name] for name in ("decoupled", "sequences", "speaks_json", "nodes"))
        signature = serves["signatures"]["serving_default"]
        x, hostile, large = signature["inputs"]
        assert x == {
            "name": "x",
            "datatype": "FP32",
            "shape": [-1, 2],
            "optional": False,
            "fields": {
                "kserve": "fp32_contents",
                "dtype": "DT_FLOAT",
                "tfserving": "float_val",
                "grps": "flat_float32",
            },
            "sample": {"shape": [1, 2], "data": [[1.5, 1.5]], "binary": False},
        }
        assert (hostile["name"], hostile["shape"], hostile["optional"]) == (HOSTILE, None, True)
        assert hostile["sample"] == {"shape": [1], "data": ["text"], "binary": False}
        # Nobody reads so many numbers; and these have no field of their own.
        assert (large["sample"], large["fields"]) == ({"shape": [3, 224, 224], "data": None, "binary": False}, {})
        assert signature["outputs"][0]["shape"] == []
        assert serves["config"]["name"] == "odd"
        assert await details(server, name="odd", version="1") == document


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({"name": "nobody"}, "nobody"),
        ({}, "''"),
        ({"name": HOSTILE}, "<img"),
        ({"name": "odd", "version": "2"}, "2"),
        ({"name": "odd", "version": "../1"}, "../1"),
        ({"name": "odd", "version": "9" * 5000}, "999"),
    ],
)
async def test_what_does_not_serve_has_an_error(query: dict[str, str], text: str) -> None:
    async with live({"odd": Odd()}) as server:
        document = await details(server, **query)
        assert text in document["error"]
        assert (document["serves"], document["name"]) == (None, query.get("name", ""))
        assert (await details(server, name="odd"))["serves"] is not None


async def test_labels_and_the_reason_of_a_model_without_a_version(tmp_path: Path) -> None:
    for version in ("1", "2"):
        write_model(tmp_path / "good" / version)
    models = [
        ModelSettings("good", tmp_path / "good", ALL, labels={"stable": 1, "canary": 2}),
        ModelSettings("empty", tmp_path / "empty"),
    ]
    config = triglot.Config(grpc_port=0, rest_port=0, drain_delay=0, exit_on_load_error=False)
    async with triglot.Server([], config, models=models) as server:
        good = await found(server, MODEL, name="good", version="1")
        assert (good["labels"], good["serves"]["version"]) == ({"stable": 1, "canary": 2}, 1)
        assert str(tmp_path / "empty") in (await found(server, MODEL, name="empty"))["error"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"protocols": ["kserve", "tfserving", "grps"], "loads": False, "grps_streaming": "streaming"}),
        ({"protocols": "grps,tfserving", "model_control_mode": "explicit"}, {"loads": False}),
        ({"model_control_mode": "explicit", "load_model": "*"}, {"loads": True}),
        ({"grps_customized_body": True}, {"protocols": ["kserve", "tfserving"]}),
        ({"grps_streaming_key": "s"}, {"grps_streaming": "s"}),
        ({"grps_streaming_mode": "header_param"}, {"grps_streaming": ""}),
    ],
)
async def test_what_the_page_has_to_know_of_the_server(options: dict[str, Any], expected: dict[str, Any]) -> None:
    async with live({"odd": Odd()}, **options) as server:
        about = (await found(server.server, OVERVIEW))["server"]
        assert {name: about[name] for name in expected} == expected
        assert (about["grpc_port"], about["tls"]) == (server.server.grpc_port, False)


async def test_a_closed_port_has_no_number(tmp_path: Path) -> None:
    write_model(tmp_path / "good")
    async with testing.serve(tmp_path, grpc_port=-1) as server:
        assert (await found(server.server, OVERVIEW))["server"]["grpc_port"] is None


async def test_without_the_page_no_details_are_served() -> None:
    async with live({"odd": Odd()}, protocols="tfserving") as server:
        url = f"http://127.0.0.1:{server.server.rest_port}{MODEL}?name=odd"
        async with server.session.get(url) as response:
            assert response.status == 404
