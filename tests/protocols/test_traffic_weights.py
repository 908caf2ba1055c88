"""Weights between versions: who gets which call, over every protocol, and how that is changed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import triglot
from tests.process import SECONDS, Triglot, run_triglot
from tests.waiting import wait_until
from tests.workers.shared_ports import Workers
from triglot.client import Client
from triglot.client.wire import Query, kserve_outputs, kserve_request
from triglot.core.errors import InvalidArgument, NotFound
from triglot.inline import ServedAt
from triglot.pb.kserve import inference_pb2
from triglot.protocols.traffic.weights import Points, Weights, point_of
from triglot.repository.config.traffic import weights_in, with_weights
from triglot.testing import CLIENTS, KServeGrpc, KServeRest, TensorFlowGrpc, serve

SAYS = """
import triglot

class Says(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [1])]
    outputs = [triglot.TensorSpec("y", "FP32", [1])]

    def infer(self, inputs):
        return {{"y": inputs["x"] * 0 + {version}}}
"""
COUNTS = """
import triglot
from triglot.model.scheduling import OldestStrategy, SequenceBatching

class Counts(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [1])]
    outputs = [triglot.TensorSpec("y", "FP32", [1])]
    sequence_batching = SequenceBatching(max_idle=60.0, strategy=OldestStrategy(30))

    def infer(self, inputs):
        return {{"y": inputs["x"] * 0 + {version}}}
"""
INPUT = {"x": np.zeros(1, np.float32)}
TRAFFIC = "/v2/models/says/traffic"
NINETY_TEN = 'traffic = { "1" = 90, "2" = 10 }\n'


def write_versions(folder: Path, toml: str = "", versions: int = 2, text: str = SAYS) -> Path:
    """The versions of a model `says`, each of which answers its number."""
    model = folder / "says"
    for version in range(1, versions + 1):
        (model / str(version)).mkdir(parents=True)
        (model / str(version) / "model.py").write_text(text.format(version=version))
    if toml:
        (model / "versions.toml").write_text(toml)
    return model


@contextmanager
def served(folder: Path, toml: str = "", **options: Any) -> Iterator[ServedAt]:
    with serve(write_versions(folder, toml), **options) as server:
        yield server


def answered(infer: Callable[[], Any], calls: int) -> Counter[int]:
    """How often each version answers."""
    return Counter(int(infer()["y"].item()) for _ in range(calls))


def by_grpc(server: ServedAt, calls: int) -> Counter[int]:
    with KServeGrpc(server) as client:
        return answered(lambda: client.infer("says", INPUT), calls)


# --- the choice ---

WEIGHTS = st.dictionaries(st.integers(1, 9), st.integers(0, 100), min_size=1).filter(
    lambda found: any(found.values())
)


@given(WEIGHTS, st.integers(100, 2000))
def test_each_version_gets_its_share(weights: dict[int, int], calls: int) -> None:
    parts, points = Weights(weights), Points()
    found = Counter(parts.at(points.next()) for _ in range(calls))
    for version, weight in weights.items():
        expected = weight / sum(weights.values()) * calls
        assert abs(found[version] - expected) <= (8 if weight else 0)


@given(st.integers(0, 100), st.integers(0, 100), st.text() | st.binary() | st.integers())
def test_change_moves_keys_one_way(before: int, after: int, key: Any) -> None:
    chosen = [Weights({3: 101 - weight, 4: weight}).at(point_of(key)) for weight in sorted((before, after))]
    assert chosen == sorted(chosen)


@given(
    st.dictionaries(st.sampled_from("12345"), st.integers(0, 50)),
    st.dictionaries(st.sampled_from("12345"), st.integers(0, 20)),
)
def test_others_share_the_rest(before: dict[str, float], changes: dict[str, float]) -> None:
    others = {name: weight for name, weight in (before or {"9": 1.0}).items() if name not in changes}
    if not any(others.values()) and sum(changes.values()) != 100:
        with pytest.raises(ValueError, match="no other version has a weight"):
            with_weights(before, "9", changes)
        return
    after = with_weights(before, "9", changes)
    assert sum(after.values()) == pytest.approx(100)
    assert changes.items() <= after.items()
    for version, weight in others.items():
        for other, its in others.items():
            assert after[version] * its == pytest.approx(after[other] * weight)


def test_wrong_weights() -> None:
    with pytest.raises(ValueError, match="expected at most 100 percent, got 101"):
        with_weights({}, "1", {"2": 101})
    with pytest.raises(ValueError, match=r"expected VERSION=WEIGHT, ..., got '3:90'"):
        weights_in("3:90")
    with pytest.raises(ValueError, match="traffic: 3: expected a number from 0, got nan"):
        weights_in("3=nan")


# --- over every protocol ---


@pytest.mark.parametrize("name", CLIENTS)
def test_calls_over_every_protocol(name: str, tmp_path: Path) -> None:
    with served(tmp_path, NINETY_TEN) as server, CLIENTS[name](server) as client:
        assert answered(lambda: client.infer("says", INPUT), 100) == {1: 90, 2: 10}
        assert answered(lambda: client.infer("says", INPUT, version=2), 5) == {2: 5}


def test_calls_of_other_routes(tmp_path: Path) -> None:
    routes: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "/v2/models/says/predict": ({"x": [0]}, lambda reply: reply["y"][0]),
        "/invocations": ({"instances": [0]}, lambda reply: reply["predictions"][0]),
        "/v1/projects/p/models/says:predict": ({"instances": [[0]]}, lambda reply: reply["predictions"][0]),
        "/v1/models/says:predict": ({"inputs": {"x": [0]}}, lambda reply: reply["outputs"][0]),
    }
    for route, (body, value) in routes.items():
        folder = tmp_path / route.replace("/", "_")
        with served(folder, NINETY_TEN) as server, KServeRest(server) as client:
            found = Counter(np.ravel(value(client.post(route, body))).item() for _ in range(50))
            assert found == {1: 45, 2: 5}, route


def test_names_and_labels_are_left_alone(tmp_path: Path) -> None:
    toml = 'default = "old"\n[versions]\nold = 1\nnew = 2\n[traffic]\nold = 10\nnew = 90\n'
    with served(tmp_path, toml) as server, KServeRest(server) as client:
        for label, version in (("old", 1), ("new", 2)):
            path = f"/v2/models/says/versions/{label}/infer"
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}]}
            assert {client.post(path, body)["model_version"] for _ in range(20)} == {str(version)}
            for protocol in ("kserve", "tensorflow_serving"):
                with Client(server.grpc_address, protocol=protocol) as caller:
                    found = {caller.infer("says", INPUT, version=label).model_version for _ in range(20)}
                assert found == {str(version)}
        assert answered(lambda: client.infer("says", INPUT), 20) == {1: 2, 2: 18}


def test_parameter_of_config_pbtxt(tmp_path: Path) -> None:
    model = write_versions(tmp_path)
    config = 'version_policy {{ all {{}} }} parameters {{ key: "traffic" value {{ string_value: "{}" }} }}'
    file = model / "config.pbtxt"
    file.write_text(config.format("1=90, 2=10"))
    with serve(model, model_control_mode="poll", poll_interval=0.05) as server:
        assert by_grpc(server, 100) == {1: 90, 2: 10}
        with KServeGrpc(server) as client:
            before = loads(client)
            file.write_text(config.format("1=50, 2=50"))
            wait_until(lambda: by_grpc(server, 10)[2] == 5)
            assert loads(client) == before  # Nothing was loaded again.


def loads(client: KServeGrpc) -> list[int]:
    """How many calls each version has had since it was loaded, at least 1."""
    call = "/inference.GRPCInferenceService/ModelStatistics"
    request = inference_pb2.ModelStatisticsRequest(name="says")
    reply = client.call(call, request, inference_pb2.ModelStatisticsResponse)
    return [min(1, statistics.inference_count) for statistics in reply.model_stats]


def test_list_of_models(tmp_path: Path) -> None:
    model = write_versions(tmp_path)
    file = tmp_path / "models.config"
    file.write_text(
        f"""model_config_list {{ config {{
            name: "says" base_path: "{model}" model_platform: "python" model_version_policy {{ all {{}} }}
            traffic {{ key: "1" value: 90 }} traffic {{ key: "2" value: 10 }}
        }} }}"""
    )
    environment = {"TRIGLOT_HOST": "127.0.0.1", "TRIGLOT_GRPC_PORT": "0", "TRIGLOT_REST_PORT": "0"}
    with Triglot(f"--model_config_file={file}", command="tfserving", environment=environment) as process:
        with TensorFlowGrpc(f"127.0.0.1:{process.ports()[0]}") as client:
            assert answered(lambda: client.infer("says", INPUT), 100) == {1: 90, 2: 10}
        process.stop()


def test_wrong_configuration_names_the_key(tmp_path: Path) -> None:
    for toml, text in (
        ('traffic = { "1" = -1 }', "versions.toml: traffic: 1: expected a number from 0, got -1"),
        ("sticky = 3", "versions.toml: sticky: expected the name of a header or parameter, got 3"),
        ("shadow = { percent = 5 }", "versions.toml: shadow: expected a version, a model or an address, got none"),
        (
            'shadow = { version = "2", percent = 0 }',
            "shadow: percent: expected a number above 0, up to 100, got 0",
        ),
        (
            'shadow = { version = "2", tls = {} }',
            "versions.toml: shadow: tls: expected with an address, got none",
        ),
        (
            'shadow = { version = "2", token_file = "t" }',
            "versions.toml: shadow: token_file: expected with an address, got none",
        ),
        (
            'shadow = { address = "there:1", tls = { cert = "a" } }',
            "shadow: tls: unknown key 'cert', expected ca, certificate, key",
        ),
        (
            'shadow = { address = "there:1", tls = { key = "a" } }',
            "shadow: tls: expected a certificate and its key, or neither",
        ),
        ("rollback = { calls = 5 }", "rollback: expected errors, different, p99_ms, at least one of them"),
        ("rollback = { error = 5 }", "rollback: unknown key 'error', expected errors, p99_ms, different, calls"),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with pytest.raises(triglot.ModelLoadError, match=text.replace("(", ".")), served(folder, toml):
            pass


# --- changes ---


def test_calls_change_weights(tmp_path: Path) -> None:
    with served(tmp_path) as server, KServeRest(server) as client:
        assert by_grpc(server, 10) == {2: 10}  # The highest version.
        changed = client.post(TRAFFIC, {"traffic": {"1": 100}})
        assert by_grpc(server, 10) == {1: 10}
        assert [row["percent"] for row in changed["versions"]] == [0.0, 100.0]
        changed = client.post(TRAFFIC, {"traffic": {"2": 10}})
        assert by_grpc(server, 20) == {1: 18, 2: 2}
        assert (changed["traffic"], changed["set_by"]) == ({"1": 90.0, "2": 10.0}, "call")
        assert client.post(TRAFFIC, {"reset": True})["set_by"] == "configuration"
        assert by_grpc(server, 10) == {2: 10}
        rows = {row["version"]: row for row in client.get(TRAFFIC)["versions"]}
        assert (rows[1]["requests"], rows[2]["requests"], rows[1]["errors"]) == (28, 22, 0)
        assert rows[1]["p99_ms"] >= rows[1]["p50_ms"] > 0


def test_wrong_changes(tmp_path: Path) -> None:
    with served(tmp_path) as server, KServeRest(server) as client:
        for body, error, text in (
            ({"traffic": {"3": 5}}, InvalidArgument, "version 3 of model 'says' is not ready, only 1, 2"),
            ({"traffic": {"1": 101}}, InvalidArgument, "traffic: expected at most 100 percent, got 101"),
            ({"traffic": {"1": 50, "2": 20}}, InvalidArgument, "no other version has a weight to take the rest"),
            (
                {"weights": {}},
                InvalidArgument,
                "unexpected key 'weights', expected traffic, sticky, shadow, reset",
            ),
            ({"shadow": {"version": "7"}}, InvalidArgument, "version 7 of model 'says' is not ready, only 1, 2"),
            ({"shadow": {"address": "here:1"}}, InvalidArgument, "only the model's versions.toml may send"),
        ):
            with pytest.raises(error, match=text):
                client.post(TRAFFIC, body)
        with pytest.raises(NotFound):
            client.post("/v2/models/none/traffic", {"reset": True})
        with pytest.raises(NotFound):
            client.get("/v2/models/none/traffic")


def test_changed_file_replaces_a_call(tmp_path: Path) -> None:
    with served(tmp_path, NINETY_TEN, model_control_mode="poll", poll_interval=0.05) as server:
        with KServeRest(server) as client:
            client.post(TRAFFIC, {"traffic": {"2": 100}})
        assert by_grpc(server, 10) == {2: 10}
        (tmp_path / "says" / "versions.toml").write_text('traffic = { "1" = 1 }\n')
        wait_until(lambda: by_grpc(server, 10) == {1: 10})


def test_share_of_a_removed_version(tmp_path: Path) -> None:
    options = {"model_control_mode": "poll", "poll_interval": 0.05}
    with served(tmp_path, 'traffic = { "1" = 50, "2" = 50, "7" = 50 }\n', **options) as server:
        assert by_grpc(server, 10) == {1: 5, 2: 5}
        (tmp_path / "says" / "1").rename(tmp_path / "removed")
        wait_until(lambda: by_grpc(server, 10) == {2: 10})


def test_command(tmp_path: Path) -> None:
    audit = tmp_path / "audit"
    with served(tmp_path / "models", audit_log=str(audit)) as server:
        to = ("traffic", "says", "--url", server.grpc_address)
        shown = run_triglot(*to, "--weight", "1=75")
        assert shown.returncode == 0, shown.stderr
        assert [line.split() for line in shown.stdout.splitlines()] == [
            ["version", "ready", "percent", "requests", "errors", "p50", "ms", "p99", "ms"],
            ["2", "yes", "25", "0", "0", "-", "-"],
            ["1", "yes", "75", "0", "0", "-", "-"],
            ["set", "by", "call"],
        ]
        assert abs(by_grpc(server, 40)[1] - 30) <= 1
        assert json.loads(run_triglot(*to, "--json").stdout)["traffic"] == {"1": 75, "2": 25}
        assert run_triglot(*to, "--reset").stdout.splitlines()[-1] == "set by configuration"
        refused = run_triglot(*to, "--weight", "3=5")
        assert (refused.returncode, refused.stderr) == (
            1,
            "triglot: version 3 of model 'says' is not ready, only 1, 2 (FAILED_PRECONDITION)\n",
        )
        wrong = run_triglot(*to, "--weight", "3")
        assert (wrong.returncode, wrong.stderr) == (2, "triglot: --weight: expected VERSION=PERCENT, got '3'\n")
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["OK", "OK", "FAILED_PRECONDITION"]
    assert {(line["model"], line["method"], line["operation"]) for line in lines} == {
        ("says", "SetTraffic", "model-control")
    }


def test_weights_and_counts_of_several_workers(tmp_path: Path) -> None:
    write_versions(tmp_path)

    def answers(channel: grpc.Channel) -> Counter[str]:
        """Versions that answer ten calls, all of one worker."""
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        request = kserve_request(Query(model="says", inputs=INPUT))
        return Counter(kserve_outputs(call(request, timeout=SECONDS)).model_version for _ in range(10))

    with Workers(tmp_path, count=3) as workers:
        to = ("traffic", "says", "--url", f"127.0.0.1:{workers.grpc_port}")
        assert run_triglot(*to, "--weight", "1=50", "--shadow", "2=100").returncode == 0
        assert workers.on_each(answers) == [{"1": 5, "2": 5}] * 3

        def document() -> Any:
            return json.loads(workers.get(TRAFFIC))

        wait_until(lambda: document()["shadow"]["verdict"]["compared"] == 15)  # Those of version 1.
        assert document()["shadow"]["verdict"]["different"] == 15
        assert {row["version"]: row["requests"] for row in document()["versions"]} == {1: 15, 2: 15}
        os.kill(workers.pids()[0], signal.SIGKILL)
        workers.wait_for_serving(4)
        assert workers.on_each(answers)[0] == {"1": 5, "2": 5}  # The successor has the weights, too.
        assert run_triglot(*to, "--weight", "1=0").returncode == 0
        assert workers.on_each(answers) == [{"2": 10}] * 3
        workers.stop()


def test_no_call_fails_during_changes(tmp_path: Path) -> None:
    failed: list[triglot.ServingError] = []
    ends, versions = threading.Event(), Counter[int]()

    def call(name: str) -> None:
        with CLIENTS[name](server) as client:
            while not ends.is_set():
                try:
                    versions[int(client.infer("says", INPUT)["y"].item())] += 1
                except triglot.ServingError as error:
                    failed.append(error)

    with served(tmp_path) as server, KServeRest(server) as client:
        callers = [
            threading.Thread(target=call, args=(name,)) for name in ("kserve_grpc", "tensorflow_grpc", "grps_http")
        ]
        for caller in callers:
            caller.start()
        for change in range(100):
            client.post(TRAFFIC, {"traffic": {"1": change}})
        ends.set()
        for caller in callers:
            caller.join()
    assert not failed
    assert versions.keys() == {1, 2}


# --- what sticks ---


def test_sticky_by_header_or_parameter(tmp_path: Path) -> None:
    toml = 'traffic = { "1" = 50, "2" = 50 }\nsticky = "X-User"\n'
    with served(tmp_path, toml) as server:
        chosen: dict[str, set[int]] = {}
        for user in map(str, range(20)):
            found = chosen[user] = set()
            for name in CLIENTS:
                with type(CLIENTS[name](server))(server, headers={"X-User": user}) as client:
                    found.update(answered(lambda: client.infer("says", INPUT), 2))
            with KServeRest(server) as client:
                tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}
                body = {"inputs": [tensor], "parameters": {"X-User": user}}
                found.add(int(client.post("/v2/models/says/infer", body)["model_version"]))
        assert all(len(found) == 1 for found in chosen.values())
        assert {1, 2} == set().union(*chosen.values())
        assert by_grpc(server, 10) == {1: 5, 2: 5}  # Without a key.


def test_sequences_stay_where_they_began(tmp_path: Path) -> None:
    def infer(client: KServeRest, sequence: int, **parameters: bool) -> int:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}
        body = {"inputs": [tensor], "parameters": {"sequence_id": sequence, **parameters}}
        return int(client.post("/v2/models/says/infer", body)["model_version"])

    model = write_versions(tmp_path, 'traffic = { "1" = 50, "2" = 50 }\n', text=COUNTS)
    with serve(model) as server, KServeRest(server) as client:
        began = {sequence: infer(client, sequence, sequence_start=True) for sequence in range(1, 21)}
        assert set(began.values()) == {1, 2}
        client.post(TRAFFIC, {"traffic": {"1": 100}})
        assert {sequence: infer(client, sequence) for sequence in began} == began
        # An id that is used again begins, and stays, in the version that has the weight now.
        again = next(sequence for sequence, version in began.items() if version == 2)
        assert [infer(client, again, sequence_start=True), infer(client, again)] == [1, 1]
