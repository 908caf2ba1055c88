"""Models on demand: a call loads its model, and the least recently used idle ones make room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gates import Gate
from tests.process import write_model
from tests.waiting import wait_until
from triglot import testing
from triglot.config.options import Config, ConfigError
from triglot.core.errors import Code, ServingError
from triglot.inline import ServedAt
from triglot.pb.kserve import inference_pb2 as pb
from triglot.repository.manager.on_demand import Limits, Resident, plan_room

SERVICE = "/inference.GRPCInferenceService/"
COUNTED = """
import numpy as np
import triglot

class Counted(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def load(self, folder):
        with (folder / "loads").open("a") as loads:
            print("load", file=loads)
        self.weights = np.ones({numbers})

    def infer(self, inputs):
        return {{"y": inputs["x"] + 1}}
"""
ENSEMBLE = """
platform: "ensemble"
input {{ name: "x" data_type: TYPE_INT32 dims: [1] }}
output {{ name: "y" data_type: TYPE_INT32 dims: [1] }}
ensemble_scheduling {{
  step {{
    model_name: "{first}"
    model_version: -1
    input_map {{ key: "x" value: "x" }}
    output_map {{ key: "y" value: "z" }}
  }}
  step {{
    model_name: "{second}"
    model_version: -1
    input_map {{ key: "x" value: "z" }}
    output_map {{ key: "y" value: "y" }}
  }}
}}
"""


def write_counted(repository: Path, *names: str, numbers: int = 1) -> None:
    for name in names:
        write_model(repository / name, COUNTED.format(numbers=numbers))


def loads(repository: Path, name: str) -> int:
    file = repository / name / "loads"
    return len(file.read_text().splitlines()) if file.exists() else 0


class Caller(testing.KServeGrpc):
    """Calls models, and asks what is where."""

    def __call__(self, model: str, value: int = 1) -> int:
        answer: int = self.infer(model, {"x": np.array([value], np.int32)})["y"].item()
        return answer

    def ready(self, model: str) -> bool:
        request = pb.ModelReadyRequest(name=model)
        return bool(self.call(SERVICE + "ModelReady", request, pb.ModelReadyResponse).ready)

    def index(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of each model."""
        index = self.call(SERVICE + "RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return {model.name: (model.state, model.reason) for model in index.models}

    def loaded(self) -> set[str]:
        return {name for name, (state, _) in self.index().items() if state == "READY"}

    def load(self, model: str) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=model)
        self.call(SERVICE + "RepositoryModelLoad", request, pb.RepositoryModelLoadResponse)

    def unload(self, model: str) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        self.call(SERVICE + "RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse)


@contextmanager
def serving(repository: Path, **options: Any) -> Iterator[tuple[ServedAt, Caller]]:
    with testing.serve(repository, load_on_demand=True, **options) as server, Caller(server) as caller:
        yield server, caller


@pytest.mark.parametrize("client_class", testing.CLIENTS.values(), ids=testing.CLIENTS)
@pytest.mark.parametrize(("grpc", "http"), [("h2", "h1"), ("aio", "aiohttp")])
def test_first_call_loads_model_over_every_protocol(
    tmp_path: Path, client_class: Callable[[ServedAt], testing.Client], grpc: str, http: str
) -> None:
    write_counted(tmp_path, "called", "other")
    with serving(tmp_path, grpc_transport=grpc, http_transport=http) as (server, caller):
        assert caller.index() == dict.fromkeys(("called", "other"), ("UNAVAILABLE", "not loaded; a call loads it"))
        assert not caller.ready("called")
        with client_class(server) as client:
            assert client.infer("called", {"x": np.array([1], np.int32)})["y"].tolist() == [2]
        assert caller.ready("called")
        assert caller.loaded() == {"called"}


def test_stream_waits_for_the_models_of_its_requests(tmp_path: Path) -> None:
    write_counted(tmp_path, "first", "second")
    requests = []
    for number, name in enumerate(["first", "second", "first"]):
        request = pb.ModelInferRequest(model_name=name, id=str(number))
        request.inputs.add(name="x", datatype="INT32", shape=[1]).contents.int_contents.append(number)
        requests.append(request)
    with serving(tmp_path) as (_, caller):
        answers = list(caller.stream(SERVICE + "ModelStreamInfer", requests, pb.ModelStreamInferResponse))
    assert [answer.error_message for answer in answers] == ["", "", ""]
    assert [answer.infer_response.id for answer in answers] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("method", "request_message", "response_class"),
    [
        ("ModelMetadata", pb.ModelMetadataRequest(name="called"), pb.ModelMetadataResponse),
        ("ModelConfig", pb.ModelConfigRequest(name="called"), pb.ModelConfigResponse),
    ],
)
def test_metadata_loads_model(tmp_path: Path, method: str, request_message: Any, response_class: Any) -> None:
    write_counted(tmp_path, "called")
    with serving(tmp_path) as (_, caller):
        assert caller.call(SERVICE + method, request_message, response_class)
        assert caller.ready("called")


def test_statistics_load_nothing(tmp_path: Path) -> None:
    write_counted(tmp_path, "called")
    with serving(tmp_path) as (_, caller):
        with pytest.raises(ServingError, match=r"'called' is not found"):
            caller.call(
                SERVICE + "ModelStatistics", pb.ModelStatisticsRequest(name="called"), pb.ModelStatisticsResponse
            )
        assert caller.loaded() == set()


def test_waiting_calls_share_a_load_and_keep_their_deadlines(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open(1)
    with (
        serving(tmp_path) as (server, caller),
        ThreadPoolExecutor(4) as threads,
        Caller(server, timeout=0.3) as hurried,
    ):
        waiting = [threads.submit(caller, "gate") for _ in range(3)]
        gate.wait_until_it_waits("load")
        with pytest.raises(ServingError) as caught:
            hurried("gate")
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        gate.open("load")
        assert [call.result() for call in waiting] == [1, 1, 1]


def test_least_recently_used_model_is_evicted(tmp_path: Path) -> None:
    write_counted(tmp_path, "a", "b", "c")
    with serving(tmp_path, max_loaded_models=2) as (_, caller):
        for name in ("a", "b", "a", "c"):
            assert caller(name) == 2
        assert caller.loaded() == {"a", "c"}
        assert caller.index()["b"] == ("UNAVAILABLE", "unloaded")
        assert not caller.ready("b")
        assert caller("b") == 2
        assert caller.loaded() == {"b", "c"}
    assert [loads(tmp_path, name) for name in "abc"] == [1, 2, 1]


def test_memory_is_bounded_by_what_models_need(tmp_path: Path) -> None:
    """A file of a megabyte, and ten in memory, as measured by the first load of each."""
    write_counted(tmp_path, "a", "b", "c", "d", numbers=10 * 2**20 // 8)
    # A process of its own: this one has freed memory, which a load may take without growing.
    with serving(tmp_path, process=True, max_model_memory=25 * 2**20) as (_, caller):
        for name in ("a", "b", "c", "d"):
            assert caller(name) == 2
        assert len(caller.loaded()) <= 3


def test_models_in_processes_count_with_their_processes(tmp_path: Path) -> None:
    write_model(tmp_path / "a", COUNTED.format(numbers=1) + '\n    execution = "process"\n')
    write_counted(tmp_path, "b")
    with serving(tmp_path, max_model_memory=2**20) as (_, caller):
        assert caller("a") == 2
        assert caller("b") == 2
        assert caller.loaded() == {"b"}
        with pytest.raises(ServingError, match=r"there is no room for model 'a'.*max_model_memory is 1048576"):
            caller("a")


def test_models_of_clients_stay(tmp_path: Path) -> None:
    write_counted(tmp_path, "a", "b", "c")
    with serving(tmp_path, max_loaded_models=2, load_model="a") as (_, caller):
        assert caller.loaded() == {"a"}
        caller.load("b")
        with pytest.raises(ServingError, match=r"no room for model 'c'.*max_loaded_models is 2, 2 are used"):
            caller("c")
        caller.unload("b")
        assert caller("c") == 2
        with pytest.raises(ServingError, match=r"'b' has no available versions"):
            caller("b")
        assert caller.loaded() == {"a", "c"}


def test_busy_models_stay(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open("load")
    write_counted(tmp_path, "a", "b")
    with serving(tmp_path, max_loaded_models=2) as (_, caller), ThreadPoolExecutor(1) as threads:
        running = threads.submit(caller, "gate", 7)
        gate.wait_until_it_waits(7)
        for name in ("a", "b", "a"):
            assert caller(name) == 2
        assert "gate" in caller.loaded()
        gate.open(7)
        assert running.result() == 7


def test_call_waits_until_the_only_other_model_is_idle(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open("load")
    write_counted(tmp_path, "a")
    with serving(tmp_path, max_loaded_models=1) as (_, caller), ThreadPoolExecutor(2) as threads:
        running = threads.submit(caller, "gate", 7)
        gate.wait_until_it_waits(7)
        waiting = threads.submit(caller, "a")
        gate.open(7)
        assert (running.result(), waiting.result()) == (7, 2)
        assert gate.is_closed()


def test_failed_load_answers_its_calls_and_is_not_repeated_at_once(tmp_path: Path) -> None:
    write_counted(tmp_path, "broken")
    text = (tmp_path / "broken" / "model.py").read_text()
    (tmp_path / "broken" / "model.py").write_text(text.replace("self.weights =", "self.weights = missing +"))
    with serving(tmp_path, debug=True) as (_, caller):
        for _ in range(5):
            with pytest.raises(ServingError, match=r"NameError.*; a call in [0-9.]+ s loads it again"):
                caller("broken")
        assert loads(tmp_path, "broken") == 1
        (tmp_path / "broken" / "model.py").write_text(text)
        wait_until(lambda: _answers(caller, "broken"))


def _answers(caller: Caller, model: str) -> bool:
    try:
        return caller(model) == 2
    except ServingError:
        return False


def test_ensemble_comes_with_its_models(tmp_path: Path) -> None:
    write_counted(tmp_path, "a", "b", "c")
    (tmp_path / "both" / "1").mkdir(parents=True)
    (tmp_path / "both" / "config.pbtxt").write_text(ENSEMBLE.format(first="a", second="b"))
    with serving(tmp_path, max_loaded_models=3) as (_, caller):
        for name in ("c", "a", "both", "c", "both"):
            assert caller(name) == (3 if name == "both" else 2)
        assert caller.loaded() == {"a", "b", "both"}


def test_new_model_is_found_by_its_first_call(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, caller):
        with pytest.raises(ServingError, match=r"unknown model: 'new' is not found"):
            caller("new")
        write_counted(tmp_path, "new")
        wait_until(lambda: _answers(caller, "new"))


# --- the plan ---

MODELS = [
    Resident("old", 10, 1.0),
    Resident("busy", 10, 2.0, busy=True),
    Resident("pinned", 10, 0.0, stays=True),
    Resident("new", 10, 3.0),
]


@pytest.mark.parametrize(
    ("limits", "more", "evicted", "with_busy"),
    [
        (Limits(), (1, 10), [], []),
        (Limits(models=5), (1, 10), [], []),
        (Limits(models=4), (1, 10), ["old"], ["old"]),
        (Limits(models=3), (1, 10), ["old", "new"], ["old", "new"]),
        (Limits(models=2), (1, 10), None, ["old", "new", "busy"]),
        (Limits(models=1), (1, 10), None, None),
        (Limits(bytes=45), (1, 10), ["old"], ["old"]),
        (Limits(bytes=45), (1, 20), ["old", "new"], ["old", "new"]),
        (Limits(models=4, bytes=100), (2, 0), ["old", "new"], ["old", "new"]),
    ],
)
def test_plan_of_room(
    limits: Limits, more: tuple[int, int], evicted: list[str] | None, with_busy: list[str] | None
) -> None:
    assert plan_room(MODELS, limits, *more) == evicted
    assert plan_room(MODELS, limits, *more, busy_too=True) == with_busy


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_loaded_models": 2}, "max_loaded_models: only with load_on_demand"),
        ({"max_model_memory": 2}, "max_model_memory: only with load_on_demand"),
        ({"load_on_demand": True, "model_control_mode": "poll"}, "expected model_control_mode explicit, got poll"),
        ({"load_on_demand": True, "load_model": "*"}, "load_model: expected names with load_on_demand"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Config(**options)
