"""The server's name in its metadata is an option: some clients' scripts insist on a name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kserve_served import serve_models

from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb
from triglot.version import __version__


@pytest.mark.parametrize("name", ["triglot", "triton", "größe €"])
async def test_both_interfaces_return_the_name(name: str) -> None:
    options: dict[str, Any] = {} if name == "triglot" else {"server_name": name}
    async with serve_models(**options) as served:
        code, _, reply = await served.grpc.call("ServerMetadata", b"")
        assert code is Code.OK
        metadata = pb.ServerMetadataResponse.FromString(reply)
        assert (metadata.name, metadata.version) == (name, __version__)
        for path in ("/v2", "/v2/"):
            _, _, body = await served.rest.call("GET", path)
            assert json.loads(body) == {
                "name": name,
                "version": __version__,
                "extensions": list(metadata.extensions),
            }
