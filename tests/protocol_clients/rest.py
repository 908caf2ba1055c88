"""A client of REST of the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from process import SECONDS


@dataclass(frozen=True)
class Rest:
    """The REST interface at a port of this machine."""

    port: int
    host: str = "127.0.0.1"

    def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded JSON."""
        return self._call(urllib.request.Request(self._url(path)))

    def infer(self, model: str, value: int = 7) -> tuple[int, Any]:
        """As the function `infer`; the status and the whole answer."""
        tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [value]}
        return self.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and decoded JSON of the answer to a JSON body; None for an empty one."""
        return self._call(urllib.request.Request(self._url(path), json.dumps(body).encode()))

    def _url(self, path: str) -> str:
        return f"http://{self.host}:{self.port}{path}"

    def _call(self, request: urllib.request.Request) -> tuple[int, Any]:
        # No proxies: this is about this machine alone.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=SECONDS) as response:
                text = response.read()
                return response.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
