"""Shadow traffic: copies that never answer, what differs, and the rule that takes a version's weight away."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import triglot
from tests.access import access_files
from tests.process import run_triglot
from tests.served_models import Function
from tests.transports.tls_server import Authority
from tests.waiting import wait_until
from triglot.core.tensor import datatype_of, object_array
from triglot.core.types import OutputTensor
from triglot.inline import RunningServer
from triglot.protocols.traffic.comparison import Difference, difference_of
from triglot.protocols.traffic.counts import quantile_ms
from triglot.protocols.traffic.shadow import MAX_RUNNING, MAX_WAITING
from triglot.testing import CLIENTS, GatedModel, KServeGrpc, KServeRest, serve

ROWS = """
import numpy as np
import triglot

class Rows(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1]), triglot.TensorSpec("name", "BYTES", [-1])]

    def infer(self, inputs):
        x = inputs["x"]
        y = x / 1000 + np.where(x == {wrong}, np.float32(1e-3), np.float32(0))
        return {{"y": y, "name": np.full(x.shape, b"row")}}
"""
X = [triglot.TensorSpec("x", "FP32", [-1])]
Y = [triglot.TensorSpec("y", "FP32", [-1])]
TRAFFIC = "/v2/models/rows/traffic"


class Waits(GatedModel):
    inputs, outputs = X, Y

    def __init__(self) -> None:
        super().__init__("infer")


def rows(first: int) -> dict[str, NDArray[np.float32]]:
    return {"x": np.arange(first, first + 10, dtype=np.float32)}


def write(folder: Path, toml: str) -> Path:
    """Version 1, and version 2 that differs at one row of a thousand."""
    for version, wrong in ((1, -1), (2, 777)):
        (folder / "rows" / str(version)).mkdir(parents=True)
        (folder / "rows" / str(version) / "model.py").write_text(ROWS.format(wrong=wrong))
    (folder / "rows" / "versions.toml").write_text("default = 1\n" + toml)
    return folder / "rows"


def shadow_of(client: KServeRest, path: str = TRAFFIC) -> dict[str, Any]:
    verdict: dict[str, Any] = client.get(path)["shadow"]["verdict"]
    return verdict


def until_compared(client: KServeRest, count: int, path: str = TRAFFIC) -> dict[str, Any]:
    """The verdict, once this many copies have ended."""
    found: list[dict[str, Any]] = []

    def have_ended() -> bool:
        found[:] = [shadow_of(client, path)]
        total: int = found[0]["compared"] + found[0]["failed"] + sum(found[0]["dropped"].values())
        return total >= count

    wait_until(have_ended)
    return found[0]


def test_row_that_differs_is_found_with_a_sample(tmp_path: Path) -> None:
    model = write(tmp_path, 'traffic = { "1" = 1 }\nshadow = { version = "2", percent = 100 }\n')
    with serve(model, shadow_samples=str(tmp_path / "differs")) as server, KServeRest(server) as client:
        with KServeGrpc(server) as caller:
            for first in range(0, 1000, 10):
                answer = caller.infer("rows", rows(first))
                assert np.array_equal(answer["y"], rows(first)["x"] / 1000)  # Of version 1, always.
                until_compared(client, first // 10 + 1)
        verdict = until_compared(client, 100)
        assert (verdict["same"], verdict["different"], verdict["failed"]) == (99, 1, 0)
        assert verdict["differing"] == {"y": 1}
        assert verdict["largest"]["y"] == pytest.approx(1e-3, rel=0.05)
        assert verdict["p99_ms_served"] > 0 < verdict["p99_ms_shadow"]
        shown = run_triglot("traffic", "rows", "--url", server.grpc_address).stdout
        assert "shadow 2: 100 compared, 1 differ (1 %), 0 failed, 0 dropped" in shown
        metrics = client.send("GET", "/metrics")[2].decode()
        assert 'triglot_shadow_copies_total{model="rows",result="different",shadow="2"} 1.0' in metrics
        assert 'triglot_shadow_largest_difference{model="rows",output="y",shadow="2"} 0.00' in metrics
        assert 'triglot_traffic_percent{model="rows",version="1"} 100.0' in metrics
    (samples,) = tmp_path.glob("differs*.tfrecord")
    with serve(model) as server:
        replay = ("replay", samples, "--to", server.grpc_address, "--tolerance", "1e-5", "--json")
        assert json.loads(run_triglot(*replay, "--model-version", "1").stdout)["equal"] == 1
        other = json.loads(run_triglot(*replay, "--model-version", "2").stdout)
        assert (other["different"], other["differences"][0]["output"]) == (1, "y")


@pytest.mark.parametrize("name", CLIENTS)
def test_calls_of_every_protocol_are_copied(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, 'shadow = { version = "2", percent = 50 }\n')
    with serve(model) as server, KServeRest(server) as client, CLIENTS[name](server) as caller:
        for _ in range(20):
            caller.infer("rows", {"x": np.array([777.0], np.float32)})
        verdict = until_compared(client, 9)
        assert (verdict["same"], verdict["failed"]) == (0, 0)
        assert verdict["different"] <= 11


@contextmanager
def shadowed(shadow: triglot.Model, **options: Any) -> Iterator[tuple[RunningServer, KServeRest]]:
    """A server of `fast`, whose calls are copied to `slow`."""
    fast = Function(lambda inputs: {"y": inputs["x"]}, inputs=X, outputs=Y)
    with serve({"fast": fast, "slow": shadow}, **options) as server, KServeRest(server) as client:
        client.post("/v2/models/fast/traffic", {"shadow": {"model": "slow"}})
        yield server, client


def test_copies_that_do_not_fit_are_dropped_and_counted() -> None:
    slow = Waits()
    with shadowed(slow) as (server, client):
        kept = MAX_RUNNING + MAX_WAITING
        with KServeGrpc(server) as caller:
            for _ in range(kept + 50):
                caller.infer("fast", rows(0))  # Answers although the shadow does not.
        assert client.get("/v2/models/fast/traffic")["shadow"]["verdict"]["dropped"]["full"] == 50
        slow.open_point("infer")
        verdict = until_compared(client, kept + 50, "/v2/models/fast/traffic")
        assert (verdict["same"], verdict["dropped"]["full"]) == (kept, 50)


def test_copy_ends_with_the_deadline_of_its_call() -> None:
    slow = Waits()
    with shadowed(slow) as (server, client), KServeGrpc(server, timeout=0.5) as caller:
        caller.infer("fast", rows(0))
        verdict = until_compared(client, 1, "/v2/models/fast/traffic")
        assert verdict["failed"] == 1
        assert "deadline" in verdict["last_error"]
        slow.open_point("infer")


def test_copies_count_for_no_quota(tmp_path: Path) -> None:
    anyone = access_files.anonymous(["inspect", "administer"])
    caller = access_files.client("caller", ["token"], ["infer"], concurrent=1, rate=1)
    file = access_files.write(tmp_path / "access.toml", anyone, caller)
    slow, headers = Waits(), {"authorization": "Bearer token"}
    with shadowed(slow, access=str(file)) as (server, client), KServeGrpc(server, headers=headers) as limited:
        limited.infer("fast", rows(0))
        slow.wait_until_at("infer")  # The copy runs, and the client's only call has ended.
        slow.open_point("infer")
        assert until_compared(client, 1, "/v2/models/fast/traffic")["same"] == 1


def test_failing_shadow_fails_no_call() -> None:
    def fail(inputs: Mapping[str, Any]) -> Any:
        raise ValueError("no")

    with shadowed(Function(fail, inputs=X, outputs=Y)) as (server, client), KServeGrpc(server) as caller:
        for _ in range(3):
            assert caller.infer("fast", rows(0))["y"].shape == (10,)
        assert until_compared(client, 3, "/v2/models/fast/traffic")["failed"] == 3
        client.post("/v2/models/fast/traffic", {"shadow": None})
        assert client.get("/v2/models/fast/traffic")["shadow"] is None


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "mutual TLS"])
def test_shadow_on_another_server(encrypted: bool, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls: dict[str, Any] = authority.server(mutual=True) if encrypted else {}
    with serve(write(tmp_path / "other", ""), **tls) as other:
        toml = f'shadow = {{ version = "2", address = "{other.grpc_address}", percent = 100 }}\n'
        if encrypted:
            issued, client_pem = authority.ca.issue_cert("client@here"), tmp_path / "client.pem"
            issued.private_key_and_cert_chain_pem.write_to_path(client_pem)
            files = {"ca": tls["tls_client_ca"], "certificate": client_pem, "key": client_pem}
            table = ", ".join(f'{name} = "{file}"' for name, file in files.items())
            toml = toml.replace(" }", f", tls = {{ {table} }} }}")
        with serve(write(tmp_path, toml)) as server, KServeRest(server) as client, KServeGrpc(server) as caller:
            caller.infer("rows", rows(0))
            caller.infer("rows", rows(770))
            verdict = until_compared(client, 2)
            assert (verdict["same"], verdict["different"], verdict["differing"]) == (1, 1, {"y": 1})


def test_shadow_on_a_server_that_asks_for_a_token(tmp_path: Path) -> None:
    """The token is read for each copy: one that is wrong at first may be replaced."""
    access, token = tmp_path / "access.toml", tmp_path / "token"
    hashed = hashlib.sha256(b"secret").hexdigest()
    access.write_text(f'[client.copies]\ntokens_sha256 = ["{hashed}"]\noperations = ["infer"]\n')
    token.write_text("wrong\n")
    with serve(write(tmp_path / "other", ""), access=str(access)) as other:
        toml = f'shadow = {{ version = "2", address = "{other.grpc_address}", token_file = "{token}" }}\n'
        with serve(write(tmp_path, toml)) as server, KServeRest(server) as client, KServeGrpc(server) as caller:
            caller.infer("rows", rows(0))
            assert until_compared(client, 1)["failed"] == 1
            token.write_text("secret\n")
            caller.infer("rows", rows(0))
            assert until_compared(client, 2)["same"] == 1


@pytest.mark.parametrize(
    ("shadow", "error"),
    [
        ('address = "127.0.0.1:1", token_file = "/none/token"', "No such file or directory: '/none/token'"),
        ('address = "127.0.0.1:1"', "failed to connect"),
        ('address = "127.0.0.1:1", tls = { ca = "/none/ca.pem" }', "No such file or directory: '/none/ca.pem'"),
        ('model = "none", version = "1"', "Request for unknown model: 'none' is not found"),
        ('version = "7"', "version 7"),
    ],
)
def test_missing_shadow_is_named(shadow: str, error: str, tmp_path: Path) -> None:
    model = write(tmp_path, f"shadow = {{ {shadow} }}\n")
    with serve(model) as server, KServeRest(server) as client, KServeGrpc(server) as caller:
        caller.infer("rows", rows(0))
        verdict = until_compared(client, 1)
        assert verdict["failed"] == 1
        assert error in verdict["last_error"]


# --- the rule ---


def test_rule_takes_the_weight_of_a_failing_version(tmp_path: Path) -> None:
    toml = 'traffic = { "1" = 50, "2" = 50 }\nrollback = { errors = 0.1, calls = 5 }\n'
    model = write(tmp_path, toml)
    failing = ROWS.format(wrong=777).replace('x = inputs["x"]', "raise ValueError")
    (model / "2" / "model.py").write_text(failing)
    audit = tmp_path / "audit"
    with serve(model, audit_log=str(audit)) as server, KServeRest(server) as client:

        def rolled_back() -> bool:
            for _ in range(4):
                try:
                    client.infer("rows", rows(0))
                except triglot.ServingError:
                    pass
            return "rollback" in client.get(TRAFFIC)["set_by"]

        wait_until(rolled_back)
        document = client.get(TRAFFIC)
        assert document["traffic"] == {"1": 100.0, "2": 0.0}
        assert document["set_by"] == "rollback of version 2: 1 of the calls failed, more than 0.1"
        for _ in range(10):
            client.infer("rows", rows(0))
    (line,) = map(json.loads, audit.read_text().splitlines())
    assert (line["model"], line["method"], line["outcome"]) == ("rows", "rollback", "OK")


def test_rule_on_latency(tmp_path: Path) -> None:
    toml = 'traffic = { "1" = 50, "2" = 50 }\nrollback = { p99_ms = 100, calls = 3 }\n'
    model = write(tmp_path, toml)
    slow = ROWS.format(wrong=777).replace("import numpy", "import time\n\nimport numpy")
    slow = slow.replace('x = inputs["x"]', 'x = inputs["x"]\n        time.sleep(0.2)')
    (model / "2" / "model.py").write_text(slow)
    with serve(model) as server, KServeRest(server) as client:

        def rolled_back() -> bool:
            client.infer("rows", rows(0))
            return "rollback" in client.get(TRAFFIC)["set_by"]

        wait_until(rolled_back)
        document = client.get(TRAFFIC)
        assert document["traffic"] == {"1": 100.0, "2": 0.0}
        assert re.fullmatch(r"rollback of version 2: p99 is [23]\d\d ms, more than 100", document["set_by"])


def test_rule_on_differences(tmp_path: Path) -> None:
    toml = 'traffic = { "1" = 99, "2" = 1 }\nshadow = { version = "2" }\n'
    rule = "rollback = { different = 0.01, calls = 3 }\n"
    with serve(write(tmp_path, toml + rule)) as server, KServeRest(server) as client:

        def rolled_back() -> bool:
            client.infer("rows", rows(770))
            return "rollback" in client.get(TRAFFIC)["set_by"]

        wait_until(rolled_back)
        assert "of the shadow's responses differ, more than 0.01" in client.get(TRAFFIC)["set_by"]


# --- comparisons ---


@pytest.mark.parametrize(
    ("expected", "got", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.00001], None),
        ([1.0, 2.0], [1.0, 2.001], Difference("y", 2.001 - 2.0)),
        ([np.nan, np.inf], [np.nan, np.inf], None),
        ([1.0], [np.nan], Difference("y", np.finfo(np.float64).max)),
        ([1.0], [1.0, 2.0], Difference("y")),
        ([True], [False], Difference("y", 1.0)),
        (np.array([7], np.int64), np.array([8], np.int64), Difference("y", 1.0)),
        (np.array([7], np.int64), np.array([7], np.int32), Difference("y")),
        (np.array([1], ml_dtypes.bfloat16), np.array([2], ml_dtypes.bfloat16), Difference("y", 1.0)),
        (object_array([b"a"], (1,)), object_array([b"a"], (1,)), None),
        (object_array([b"a"], (1,)), object_array([b"b"], (1,)), Difference("y")),
    ],
)
def test_what_differs(expected: Any, got: Any, difference: Difference | None) -> None:
    first, other = np.asarray(expected), np.asarray(got)
    outputs = [[OutputTensor("y", datatype_of(array), array)] for array in (first, other)]
    assert difference_of(outputs[0], outputs[1], 1e-5) == difference
    assert difference_of(outputs[0], [], 1e-5) == Difference("y")
    assert difference_of([], outputs[1], 1e-5) == Difference("y")


def test_quantile_lies_in_its_bucket() -> None:
    assert quantile_ms({}, 0.99) is None
    assert quantile_ms({"5": 100}, 1.0) == pytest.approx(10 * 1.8**5 / 1e3, rel=0.01)
    assert quantile_ms({"5": 99, "9": 1}, 0.99) == pytest.approx(10 * 1.8**5 / 1e3, rel=0.01)
