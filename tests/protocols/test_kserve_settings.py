"""TraceSetting over gRPC and REST: what is set, inherited, taken back and refused (spec 1.3, 3.11)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.process import PLAIN_MODELS
from tests.protocol_clients.kserve_async import STATUS_OF, GrpcClient, RestClient
from tests.protocols.kserve_served import serve_models
from triglot.core.errors import Code, ServingError
from triglot.pb.kserve import inference_pb2 as pb
from triglot.telemetry.trace_settings import KEYS, TraceOptions
from triglot.telemetry.tracing import Tracer

MODELS = [PLAIN_MODELS / "half_plus_two", PLAIN_MODELS / "half_plus_three"]
START = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_file": [""],
    "trace_mode": ["triton"],
}
Settings = Mapping[str, Sequence[str]]
Answer = Settings | tuple[Code, str]


class GrpcTrace:
    def __init__(self, client: GrpcClient) -> None:
        self.client = client

    async def change(self, model: str = "", **settings: Any) -> Answer:
        request = pb.TraceSettingRequest(model_name=model)
        for key, value in settings.items():
            request.settings[key].value.extend([value] if isinstance(value, str) else value or [])
        code, text, reply = await self.client.call("TraceSetting", request.SerializeToString())
        if code is not Code.OK:
            return code, text
        found = pb.TraceSettingResponse.FromString(reply).settings
        return {key: list(setting.value) for key, setting in found.items()}

    get = change


class RestTrace:
    def __init__(self, client: RestClient) -> None:
        self.client = client

    async def get(self, model: str = "") -> Answer:
        return await self._answer("GET", model, b"")

    async def change(self, model: str = "", **settings: Any) -> Answer:
        return await self._answer("POST", model, json.dumps(settings).encode())

    async def _answer(self, verb: str, model: str, body: bytes) -> Answer:
        path = f"/v2/models/{model}/trace/setting" if model else "/v2/trace/setting"
        status, headers, reply = await self.client.call(verb, path, body)
        assert headers["Content-Type"] == "application/json"
        found = json.loads(reply)
        if status != STATUS_OF[Code.OK]:
            return next(code for code, number in STATUS_OF.items() if number == status), found["error"]
        assert isinstance(found["trace_level"], list)
        assert all(isinstance(value, str) for key, value in found.items() if key != "trace_level")
        return {key: value if key == "trace_level" else [value] for key, value in found.items()}


Trace = GrpcTrace | RestTrace


@pytest.fixture(params=["grpc", "rest"])
def interface(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def traced(interface: str, file: Path | str = "", **options: Any) -> AsyncIterator[Trace]:
    """A server's trace settings over one protocol."""
    async with serve_models(MODELS, trace_file=str(file), **options) as served:
        yield GrpcTrace(served.grpc) if interface == "grpc" else RestTrace(served.rest)


async def test_a_versions_settings_are_its_models() -> None:
    async with serve_models(MODELS) as served:
        path = "/v2/models/half_plus_two{}/trace/setting"
        status, _, _ = await served.rest.call("POST", path.format("/versions/1"), b'{"trace_rate": "7"}')
        assert status == 200
        for version in ("", "/versions/1"):
            _, _, reply = await served.rest.call("GET", path.format(version), b"")
            assert json.loads(reply)["trace_rate"] == "7"


# --- what is set ---


async def test_settings_at_the_start(interface: str, tmp_path: Path) -> None:
    async with traced(interface) as trace:
        assert await trace.get() == START
        assert await trace.get("half_plus_two") == START
    options = {"trace_level": "TENSORS, TIMESTAMPS", "trace_rate": 7, "trace_count": 5, "trace_log_frequency": 2}
    async with traced(interface, tmp_path / "traces", **options) as trace:
        assert await trace.get() == {
            "trace_level": ["TIMESTAMPS", "TENSORS"],
            "trace_rate": ["7"],
            "trace_count": ["5"],
            "log_frequency": ["2"],
            "trace_file": [str(tmp_path / "traces")],
            "trace_mode": ["triton"],
        }


async def test_what_is_set_is_what_is_answered(interface: str, tmp_path: Path) -> None:
    async with traced(interface, tmp_path / "traces") as trace:
        new: dict[str, Any] = {
            "trace_level": ["TIMESTAMPS", "TENSORS"],
            "trace_rate": "1",
            "trace_count": "9",
            "log_frequency": "3",
        }
        found = START | {
            "trace_level": ["TIMESTAMPS", "TENSORS"],
            "trace_rate": ["1"],
            "trace_count": ["9"],
            "log_frequency": ["3"],
            "trace_file": [str(tmp_path / "traces")],
        }
        assert await trace.change(**new) == found
        assert await trace.get() == found
        assert await trace.change(trace_level="OFF") == found | {"trace_level": ["OFF"]}
        assert await trace.change(trace_mode="triton") == found | {"trace_level": ["OFF"]}


async def test_models_inherit_until_they_have_their_own(interface: str) -> None:
    async with traced(interface) as trace:
        assert await trace.change(trace_rate="10") == START | {"trace_rate": ["10"]}
        assert await trace.get("half_plus_two") == START | {"trace_rate": ["10"]}
        own = START | {"trace_rate": ["2"], "log_frequency": ["4"]}
        assert await trace.change("half_plus_two", trace_rate="2", log_frequency="4") == own
        assert await trace.get() == START | {"trace_rate": ["10"]}
        assert await trace.get("half_plus_three") == START | {"trace_rate": ["10"]}

        await trace.change(trace_rate="20", trace_count="6")
        assert await trace.get("half_plus_two") == own | {"trace_count": ["6"]}
        cleared = await trace.change("half_plus_two", trace_rate=None)
        assert cleared == own | {"trace_rate": ["20"], "trace_count": ["6"]}
        assert await trace.change("half_plus_two", log_frequency=None, trace_level=None) == await trace.get()


async def test_server_returns_to_its_start_settings(interface: str) -> None:
    async with traced(interface, trace_rate=7) as trace:
        await trace.change(trace_rate="10", trace_count="3", log_frequency="1")
        keys = ["trace_rate", "trace_count", "trace_level", "trace_file", "trace_mode"]
        cleared: dict[str, Any] = dict.fromkeys(keys)
        assert await trace.change(**cleared) == START | {"trace_rate": ["7"], "log_frequency": ["1"]}


async def test_both_interfaces_have_the_same_settings() -> None:
    async with serve_models(MODELS) as served:
        await GrpcTrace(served.grpc).change("half_plus_two", trace_rate="3")
        assert await RestTrace(served.rest).get("half_plus_two") == START | {"trace_rate": ["3"]}


# --- what is refused ---

NUMBER = "expected an integer from {} to 2147483647, got '{}'"
INVALID = Code.INVALID_ARGUMENT
REFUSED: list[tuple[dict[str, Any], Code, str]] = [
    ({"rate": "1"}, INVALID, "unknown trace setting 'rate', expected trace_level, trace_rate, trace_count, "),
    ({"trace_rate": "0"}, INVALID, "trace_rate: " + NUMBER.format(1, "0")),
    ({"trace_rate": "often"}, INVALID, "trace_rate: " + NUMBER.format(1, "often")),
    ({"trace_rate": "1.5"}, INVALID, "trace_rate: " + NUMBER.format(1, "1.5")),
    ({"trace_rate": "2147483648"}, INVALID, "trace_rate: " + NUMBER.format(1, "2147483648")),
    ({"trace_rate": "9" * 5000}, INVALID, "trace_rate: expected an integer"),
    ({"trace_count": "-2"}, INVALID, "trace_count: " + NUMBER.format(-1, "-2")),
    ({"trace_count": ""}, INVALID, "trace_count: " + NUMBER.format(-1, "")),
    ({"log_frequency": "-1"}, INVALID, "log_frequency: " + NUMBER.format(0, "-1")),
    ({"trace_level": ["MAX"]}, INVALID, "trace_level: expected OFF, TIMESTAMPS or TENSORS, got 'MAX'"),
    ({"trace_level": ["OFF", "TENSORS"]}, INVALID, "trace_level: expected OFF alone, got 'OFF', 'TENSORS'"),
    ({"trace_level": ["TIMESTAMPS"]}, INVALID, "trace_level: requires a trace_file; start "),
    ({"trace_mode": "zipkin"}, INVALID, "trace_mode: expected 'triton' or 'opentelemetry', got 'zipkin'"),
    (
        {"trace_mode": "opentelemetry"},
        Code.UNIMPLEMENTED,
        "trace_mode cannot be changed over the network, only by the server's option trace_config",
    ),
    ({"trace_file": "/tmp/x"}, Code.UNIMPLEMENTED, "trace_file cannot be changed over the network"),
]


@pytest.mark.parametrize(("settings", "code", "text"), REFUSED)
async def test_nothing_of_a_wrong_request_is_taken(
    interface: str, settings: dict[str, Any], code: Code, text: str
) -> None:
    right = {"trace_count": "3", "log_frequency": "4"}
    async with traced(interface) as trace:
        for model in ("", "half_plus_two"):
            answer = await trace.change(model, **right | settings)
            assert isinstance(answer, tuple)
            assert answer[0] is code
            assert text in answer[1]
        assert await trace.get() == await trace.get("half_plus_two") == START


async def test_unknown_models(interface: str) -> None:
    expected = Code.NOT_FOUND, "Request for unknown model: 'nope' is not found"
    async with traced(interface) as trace:
        assert await trace.get("nope") == expected
        assert await trace.change("nope", trace_rate="3") == expected


async def test_numbers_of_several_values() -> None:
    async with traced("grpc") as trace:
        assert await trace.change(trace_rate=["1", "2"]) == (
            INVALID,
            "trace_rate: expected one value, got '1', '2'",
        )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the request has no body, expected a JSON object of settings"),
        (b"[]", "expected an object, got an array"),
        (b"{", "failed to parse the request JSON"),
        (b'{"trace_rate": 1.5}', "trace_rate: expected a string, got a number"),
        (b'{"trace_rate": true}', "trace_rate: expected a string, got a boolean"),
        (b'{"trace_rate": ["1"]}', "trace_rate: expected a string, got an array"),
        (b'{"trace_level": [1.5]}', "trace_level: expected a string, got a number"),
        (b'{"trace_level": {"a": 1}}', "trace_level: expected a string, got an object"),
        (b'{"trace_rate": 1' + b"0" * 400 + b"}", "trace_rate: expected a"),
    ],
)
async def test_bodies_that_are_wrong(body: bytes, text: str) -> None:
    async with serve_models(MODELS) as served:
        status, _, reply = await served.rest.call("POST", "/v2/trace/setting", body)
        assert status == STATUS_OF[INVALID]
        assert text in json.loads(reply)["error"]
        assert await RestTrace(served.rest).get() == START


async def test_json_integers_and_single_levels(tmp_path: Path) -> None:
    async with traced("rest", tmp_path / "traces") as trace:
        found = await trace.change(trace_rate=5, trace_count=-1, trace_level="TENSORS")
        assert isinstance(found, dict)
        assert (found["trace_rate"], found["trace_level"]) == (["5"], ["TENSORS"])
        found = await trace.change(trace_level=[])
        assert isinstance(found, dict)
        assert found["trace_level"] == ["OFF"], "an empty list clears, as over gRPC"


async def test_damaged_messages() -> None:
    async with serve_models(MODELS) as served:
        for rpc in ("TraceSetting", "LogSettings"):
            code, _, _ = await served.grpc.call(rpc, b"\x0a\xff")
            assert code is INVALID


async def test_the_metadata_names_both_extensions() -> None:
    async with serve_models(MODELS) as served:
        _, _, reply = await served.rest.call("GET", "/v2")
        assert {"trace", "logging"} <= set(json.loads(reply)["extensions"])


values = st.sampled_from(["OFF", "TIMESTAMPS", "TENSORS", "-1", "0", "1", "77", "x", "triton", "opentelemetry"])
changes = st.dictionaries(
    st.sampled_from([*KEYS, "other"]), st.none() | st.lists(values | st.text(max_size=3), min_size=1, max_size=2)
)


def updated(tracer: Tracer, changes: Any, model: str) -> Code:
    try:
        tracer.update(changes, model)
    except ServingError as error:
        return error.code
    return Code.OK


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), changes), max_size=8))
def test_any_changes_are_taken_whole_or_not_at_all(steps: list[tuple[str, Any]]) -> None:
    tracer = Tracer(TraceOptions("file"))
    for model, change in steps:
        before = {name: tracer.settings(name) for name in ("", "a", "b")}
        code = updated(tracer, change, model)
        if code is not Code.OK:
            assert code in (INVALID, Code.UNIMPLEMENTED)
            assert {name: tracer.settings(name) for name in ("", "a", "b")} == before
        else:
            after = tracer.settings(model)
            for key, texts in change.items():
                if texts is None:
                    assert after[key] == (tracer if model else Tracer(TraceOptions("file"))).settings()[key]
                else:
                    assert sorted(set(texts)) == sorted(after[key])
        levels = [tracer.settings(name)["trace_level"] for name in ("", "a", "b")]
        assert tracer.on == any(level != ["OFF"] for level in levels)
