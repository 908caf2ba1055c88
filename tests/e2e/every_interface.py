"""Queries the state of one model over every interface, and computes the expected responses."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.server_process import ServerProcess
from tests.process import SECONDS
from tests.protocol_clients.channel import rpc
from tests.protocol_clients.kserve import server_ready
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import statuses
from tests.waiting import wait_until
from triglot.pb.grps.grps_pb2 import GrpsMessage
from triglot.pb.kserve import inference_pb2 as pb

PAGE = "/grps/v1/monitor/overview"
GRPS = "/grps.protos.v1.GrpsService/"
HEALTH = health_pb2.HealthCheckResponse
UNLOADED = "unloaded"


class State(enum.Enum):
    """State of a version."""

    START = enum.auto()
    LOADING = enum.auto()
    TAKEN_BACK = enum.auto()
    """It is loading, and was already requested to unload."""
    READY = enum.auto()
    KEPT = enum.auto()
    """It serves, and its replacement failed to load."""
    UNLOADING = enum.auto()
    FAILED = enum.auto()
    REPLACED = enum.auto()
    """Replaced by another version."""
    UNLOADED = enum.auto()


class StateNames(NamedTuple):
    """How a state is reported: in KServe's index, TensorFlow Serving's status, grps' metadata; "": not listed."""

    kserve: str
    status: str
    grps: str
    serves: bool = False


STATE_NAMES = {
    State.START: StateNames("UNKNOWN", "START", "UNKNOWN"),
    State.LOADING: StateNames("LOADING", "LOADING", "LOADING"),
    State.TAKEN_BACK: StateNames("LOADING", "LOADING", "LOADING"),
    State.READY: StateNames("READY", "AVAILABLE", "READY", serves=True),
    State.KEPT: StateNames("READY", "AVAILABLE", "READY", serves=True),
    State.UNLOADING: StateNames("UNLOADING", "UNLOADING", "UNLOADING"),
    State.FAILED: StateNames("UNAVAILABLE", "END", "UNAVAILABLE"),
    State.REPLACED: StateNames("", "END", ""),
    State.UNLOADED: StateNames("UNAVAILABLE", "END", ""),
}
LEAVING = (State.TAKEN_BACK, State.UNLOADING)


@dataclass(frozen=True)
class Story:
    """The expected state of a model and its server.

    `versions`: the state of each version that ever existed. `error` and `code`: why a version failed. `broken`:
    why a requested model has no versions at all. `server`: whether the server is ready. `known`: whether the
    health service knows the model.
    """

    versions: Mapping[int, State] = field(default_factory=dict)
    error: str = ""
    code: str = "UNKNOWN"
    broken: str = ""
    server: bool = True
    known: bool = True

    @property
    def serving(self) -> list[int]:
        """The versions that serve."""
        return sorted(number for number, state in self.versions.items() if STATE_NAMES[state].serves)

    def error_of(self, state: State) -> str:
        """Return why a version in this state failed; "" if it did not."""
        return self.error if state in (State.FAILED, State.KEPT) else ""


def expected_of(story: Story, name: str) -> dict[str, Any]:
    """Return the expected result of each query of `EveryInterface.ask`."""
    states = sorted(story.versions.items())
    serving = [str(number) for number in story.serving]
    ready = bool(serving)
    index = [
        (str(number), STATE_NAMES[state].kserve, UNLOADED if state is State.UNLOADED else story.error_of(state))
        for number, state in states
        if STATE_NAMES[state].kserve
    ]
    status = [
        (number, STATE_NAMES[state].status, story.error_of(state), story.code if story.error_of(state) else "OK")
        for number, state in reversed(states)
    ]
    none = f"Could not find any versions of model {name}" + (f": {story.broken}" if story.broken else "")
    no_versions = [(0, "NOT_FOUND", none, "")]
    no_index = [("", "UNAVAILABLE" if story.broken else "", story.broken)]
    listed = bool(story.broken) or any(STATE_NAMES[state].grps and state not in LEAVING for _, state in states)
    answers: dict[str, Any] = {
        "index": index if story.versions else no_index,
        "model ready": ready,
        "version ready": {number: STATE_NAMES[story.versions[number]].serves for number in story.versions},
        "server ready": story.server,
        "metadata": serving or "NOT_FOUND",
        "status": status or no_versions,
        "list": listed,
        "grps server": [
            (str(number), STATE_NAMES[state].grps) for number, state in states if STATE_NAMES[state].grps
        ],
        "grps model": serving[-1] if serving else "404",
        "grps ready": story.server,
    }
    health = ("SERVING" if ready else "NOT_SERVING") if story.known else "NOT_FOUND"
    answers = {
        f"{question}, {interface}": answer
        for question, answer in answers.items()
        for interface in ("gRPC", "REST")
    }
    del answers["list, gRPC"]
    return answers | {
        "health": health,
        "server health": "SERVING" if story.server else "NOT_SERVING",
        "page": index,
        "page's server": story.server,
    }


class EveryInterface:
    """Queries a server about a model over every interface.

    `watch` has the statuses that the health service's Watch stream sent, collected on a thread.
    """

    def __init__(self, server: ServerProcess, channel: grpc.Channel, name: str) -> None:
        self.rest = Rest(int(server.rest_address.rpartition(":")[2]))
        self.channel = channel
        self.name = name
        self.watch: list[str] = []
        self._health = health_pb2_grpc.HealthStub(channel)
        self._watching = self._health.Watch(health_pb2.HealthCheckRequest(service=name))
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self.watch.extend(HEALTH.ServingStatus.Name(answer.status) for answer in self._watching)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                self.watch.append(str(error))

    def close(self) -> None:
        """End the Watch stream."""
        self._watching.cancel()
        self._thread.join(SECONDS)

    def expect(self, story: Story) -> None:
        """Check that every interface reports this state now, and wait until the Watch stream does."""
        answers, expected = self.ask(story.versions), expected_of(story, self.name)
        assert answers == expected, {key: answers[key] for key in expected if answers[key] != expected[key]}
        serves = "SERVING" if story.serving else "NOT_SERVING"
        status = serves if story.known else "SERVICE_UNKNOWN"
        wait_until(lambda: self.watch[-1:] == [status])

    def until(self, version: int, state: State) -> None:
        """Wait until TensorFlow Serving's interface reports this state of a version."""
        wait_until(
            lambda: (
                STATE_NAMES[state].status in [status.state for status in self._statuses() if status[0] == version]
            )
        )

    def until_index(self, index: list[tuple[str, str, str]]) -> None:
        """Wait until KServe's index has these entries of version, state and reason for the model."""
        wait_until(lambda: self._index() == index)

    def ask(self, versions: Mapping[int, State]) -> dict[str, Any]:
        """Return the result of each query; `versions` are those whose readiness is queried."""
        numbers = list(versions)
        return {
            "index, gRPC": self._index(),
            "index, REST": self._rest_index(),
            "model ready, gRPC": self._ready(),
            "model ready, REST": self._rest_ready(),
            "version ready, gRPC": {number: self._ready(str(number)) for number in numbers},
            "version ready, REST": {number: self._rest_ready(f"/versions/{number}") for number in numbers},
            "server ready, gRPC": server_ready(self.channel),
            "server ready, REST": self.rest.get("/v2/health/ready")[0] == 200,
            "metadata, gRPC": self._metadata(),
            "metadata, REST": self._rest_metadata(),
            "status, gRPC": [tuple(status) for status in self._statuses()],
            "status, REST": self._rest_status(),
            "list, REST": self._listed(),
            "grps server, gRPC": self._grps_server(self._grps("ServerMetadata").str_data),
            "grps server, REST": self._grps_server(self.rest.get("/grps/v1/metadata/server")[1]["str_data"]),
            "grps model, gRPC": self._grps_model(),
            "grps model, REST": self._grps_rest_model(),
            "grps ready, gRPC": self._grps("CheckReadiness").status.code == 200,
            "grps ready, REST": self.rest.get("/grps/v1/health/ready")[0] == 200,
            "page": self._page(),
            "page's server": self.rest.get(PAGE)[1]["server"]["ready"],
            "health": self._checked(self.name),
            "server health": self._checked(""),
        }

    # --- KServe ---

    def _call(self, method: str, request: Any, reply: Any) -> Any:
        return rpc(self.channel, method, reply)(request, timeout=SECONDS)

    def _index(self) -> list[tuple[str, str, str]]:
        reply = self._call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return [(model.version, model.state, model.reason) for model in reply.models if model.name == self.name]

    def _rest_index(self) -> list[tuple[str, ...]]:
        _, rows = self.rest.post("/v2/repository/index", {})
        keys = ("version", "state", "reason")
        return [tuple(row.get(key, "") for key in keys) for row in rows if row["name"] == self.name]

    def _ready(self, version: str = "") -> bool:
        request = pb.ModelReadyRequest(name=self.name, version=version)
        return bool(self._call("ModelReady", request, pb.ModelReadyResponse).ready)

    def _rest_ready(self, version: str = "") -> bool:
        status, answer = self.rest.get(f"/v2/models/{self.name}{version}/ready")
        assert status in (200, 404, 503), answer
        return status == 200

    def _metadata(self) -> list[str] | str:
        try:
            request = pb.ModelMetadataRequest(name=self.name)
            return list(self._call("ModelMetadata", request, pb.ModelMetadataResponse).versions)
        except grpc.RpcError as error:
            return str(error.code().name)

    def _rest_metadata(self) -> list[str] | str:
        status, answer = self.rest.get(f"/v2/models/{self.name}")
        return answer["versions"] if status == 200 else {404: "NOT_FOUND"}.get(status, f"{status}")

    def _listed(self) -> bool:
        listed = [self.name in self.rest.get(path)[1]["models"] for path in ("/v2/models", "/v1/models")]
        assert listed[0] is listed[1]
        return listed[0]

    # --- TensorFlow Serving ---

    def _statuses(self) -> list[Any]:
        try:
            return list(statuses(self.channel, self.name))
        except grpc.RpcError as error:
            return [_NoStatus(0, error.code().name, error.details(), "")]

    def _rest_status(self) -> list[tuple[int, str, str, str]]:
        status, answer = self.rest.get(f"/v1/models/{self.name}")
        if status != 200:
            return [(0, {404: "NOT_FOUND"}.get(status, f"{status}"), answer["error"], "")]
        return [
            (
                int(status["version"]),
                status["state"],
                status["status"]["error_message"],
                status["status"]["error_code"],
            )
            for status in answer["model_version_status"]
        ]

    # --- grps ---

    def _grps(self, method: str, text: str = "") -> Any:
        return self._call(GRPS + method, GrpsMessage(str_data=text), GrpsMessage)

    def _grps_server(self, text: str) -> list[tuple[str, str]]:
        models = yaml.safe_load(text)["models"]
        return [(model["version"], model["state"]) for model in models if model["name"] == self.name]

    def _grps_model(self) -> str:
        answer = self._grps("ModelMetadata", self.name)
        return str(yaml.safe_load(answer.str_data)["version"] if answer.str_data else answer.status.code)

    def _grps_rest_model(self) -> str:
        status, answer = self.rest.post("/grps/v1/metadata/model", {"str_data": self.name})
        return str(yaml.safe_load(answer["str_data"])["version"]) if status == 200 else f"{status}"

    # --- the monitor's page, and health ---

    def _page(self) -> list[tuple[str, str, str]]:
        _, answer = self.rest.get(PAGE)
        rows = [row for row in answer["models"] if row["name"] == self.name]
        return [(str(row["version"]), row["state"], row["reason"]) for row in rows]

    def _checked(self, name: str) -> str:
        try:
            request = health_pb2.HealthCheckRequest(service=name)
            return str(HEALTH.ServingStatus.Name(self._health.Check(request, timeout=SECONDS).status))
        except grpc.RpcError as error:
            return str(error.code().name)


class _NoStatus(NamedTuple):
    version: int
    state: str
    error: str
    code: str
