"""A REST client that uses only the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tests.process import SECONDS

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Rest:
    """A client of the REST interface at a port of this machine."""

    port: int
    host: str = "127.0.0.1"

    def get(self, path: str) -> tuple[int, Any]:
        """Send a GET request; returns the response's status and decoded JSON."""
        return self._call(urllib.request.Request(self._url(path)))

    def infer(self, model: str, value: int = 7) -> tuple[int, Any]:
        """Send an inference request like `kserve.infer`; returns the status and the decoded response."""
        tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [value]}
        return self.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})

    def post(self, path: str, body: object, headers: Mapping[str, str] = NO_HEADERS) -> tuple[int, Any]:
        """Send a POST request with a JSON body, or one of bytes; returns status and decoded JSON, None without."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._call(urllib.request.Request(self._url(path), data, dict(headers)))

    def _url(self, path: str) -> str:
        return f"http://{self.host}:{self.port}{path}"

    def _call(self, request: urllib.request.Request) -> tuple[int, Any]:
        # No proxies: the server runs on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=SECONDS) as response:
                text = response.read()
                return response.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
