"""The OpenAPI document of several workers: whichever answers, it is the same."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

from tests.process import SECONDS, write_model
from tests.waiting import wait_until
from tests.workers.shared_ports import Workers

ASK = json.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [0]}]})


def documents(workers: Workers) -> dict[int, tuple[str | None, list[str]]]:
    """ETag and paths, by the worker that answers: a connection belongs to one."""
    found: dict[int, tuple[str | None, list[str]]] = {}

    def ask() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", workers.rest_port, timeout=SECONDS)
        try:
            connection.request("POST", "/v2/models/who/infer", ASK)
            pid = json.load(connection.getresponse())["outputs"][0]["data"][0]
            connection.request("GET", "/openapi.json")
            answer = connection.getresponse()
            found[pid] = answer.headers["ETag"], list(json.load(answer)["paths"])
        finally:
            connection.close()
        return len(found) == workers.count

    wait_until(ask)
    return found


def test_each_worker_has_the_same_document_also_when_models_come(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    path = "/v2/models/one/infer"
    with Workers(tmp_path, "--model-control-mode", "explicit", "--load-model", "who") as workers:
        before, other = documents(workers).values()
        assert before == other
        assert path not in before[1]
        assert workers.rest.post("/v2/repository/models/one/load", {})[0] == 200
        after, other = documents(workers).values()
        assert after == other
        assert path in after[1]
        assert after[0] != before[0]
        workers.stop()
