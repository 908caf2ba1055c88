"""What Triton Python models are given as a list, and what they may return."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from tests.backends.triton_served import (
    SECONDS,
    X_TO_Y,
    GrpcClient,
    in_common,
    ints,
    request,
    serving,
    write_model,
)
from tests.waiting import until
from triglot.core.operation import EVERYTHING

BATCHED = """
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 5000000 preferred_batch_size: [ 4 ] }
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
LIST = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(x, len(requests)) for x in map(self.x_of, requests)]

    def x_of(self, request):
        return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()

    def answer(self, x, count):
        if x[0, 0] < 0:
            code = pb_utils.TritonError.INVALID_ARG
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{x[0, 0]} in {count}", code))
        if x[0, 0] == 100:
            return None
        if x[0, 0] == 101:
            return {"Y": x}
        if x[0, 0] == 102:
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.astype(np.float32))])
        x += count  # Into its own copy.
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])
"""
FAILED = "Failed to process the request(s) for model instance 'm_0_0', message: "


async def outcomes(client: GrpcClient, *xs: int) -> list[Any]:
    """Of requests that come at the same time: the answer, or the code and the text of the error."""

    async def outcome(x: int) -> Any:
        try:
            return (await client.infer("m", {"X": ints(x)[None]})).outputs["Y"].item()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()

    return await asyncio.gather(*map(outcome, xs))


def has(outcome: Any, code: grpc.StatusCode, text: str) -> bool:
    return outcome[0] is code and text in outcome[1]


async def test_requests_come_as_a_list(tmp_path: Path) -> None:
    write_model(tmp_path, "m", LIST, BATCHED)
    async with serving(tmp_path) as client:
        assert await outcomes(client, 1, 2, 3, 4) == [5, 6, 7, 8]


async def test_each_response_may_have_an_error_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path, "m", LIST, BATCHED)
    async with serving(tmp_path) as client:
        first, second, third, fourth = await outcomes(client, 1, -2, 100, 101)
        assert first == 5
        assert has(second, grpc.StatusCode.INVALID_ARGUMENT, "-2 in 4")
        what = "Expected an 'InferenceResponse' object in the execute function return list, found type"
        assert has(third, grpc.StatusCode.INTERNAL, f"{what} 'NoneType'")
        assert has(fourth, grpc.StatusCode.INTERNAL, f"{what} 'dict'")


async def test_outputs_are_checked(tmp_path: Path) -> None:
    write_model(tmp_path, "m", LIST, X_TO_Y.replace("-1", "1, 1"))
    async with serving(tmp_path) as client:
        [outcome] = await outcomes(client, 102)
        assert has(outcome, grpc.StatusCode.INTERNAL, "output 'Y' as FP32, its signature says INT32")


@pytest.mark.parametrize("execution", ["thread", "process"])
@pytest.mark.parametrize("shape", [(1,), (), (3, 1, 2), (0, 4)])
async def test_outputs_may_have_any_shape(tmp_path: Path, shape: tuple[int, ...], execution: str) -> None:
    code = f"""
class TritonPythonModel:
    def execute(self, requests):
        y = pb_utils.Tensor("Y", np.arange({math.prod(shape)}, dtype=np.int32).reshape({shape}))
        return [pb_utils.InferenceResponse([y]) for _ in requests]
"""
    more = f'max_batch_size: 4\nparameters {{ key: "execution" value {{ string_value: "{execution}" }} }}'
    write_model(tmp_path, "m", code, X_TO_Y + more)
    async with serving(tmp_path) as client:
        answer = await client.infer("m", {"X": ints(1, 2)[None]})
    np.testing.assert_array_equal(answer.outputs["Y"], np.arange(math.prod(shape)).reshape(shape), strict=False)
    assert answer.outputs["Y"].shape == shape


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("[]", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
        (
            "pb_utils.InferenceResponse([])",
            "Expected a list in the execute return, found type 'InferenceResponse'",
        ),
        ("None", "found type 'NoneType'"),
        ("1 / 0", f"{FAILED}ZeroDivisionError: division by zero"),
        ("sys.exit('bye')", f"{FAILED}SystemExit: bye"),
        ("[pb_utils.InferenceResponse([np.zeros(1)])]", "output_tensors: expected Tensors, got ndarray"),
        ("[pb_utils.InferenceResponse(error='no')]", "error: expected a TritonError, got str"),
        (
            "[pb_utils.InferenceResponse(parameters={'a': 0.5})]",
            f"{FAILED}TritonModelException: Expect parameters values to have type bool/int/str, "
            "found type <class 'float'>",
        ),
        (
            "pb_utils.InferenceRequest(inputs=[], parameters={'a': None})",
            "parameters values to have type bool/int/str, found type <class 'NoneType'>",
        ),
        (
            "[pb_utils.InferenceResponse(parameters={1: 'a'})]",
            "Expect parameters keys to have type str, found type <class 'int'>",
        ),
        ("[pb_utils.InferenceResponse(parameters=[])]", ", got <class 'list'>"),
        (
            "[pb_utils.InferenceResponse([pb_utils.Tensor('Y', [1])])]",
            "Tensor 'Y': expected a numpy array, got list",
        ),
        ("pb_utils.load_model('n')", "TritonModelException: "),
        ("pb_utils.load_model('n', files={'file:1/model.py': b''})", "files: not supported"),
        ("pb_utils.unload_model('m')", "TritonModelException: "),
        ("pb_utils.InferenceRequest(inputs=[1])", "inputs: expected Tensors, got int"),
        ("pb_utils.InferenceRequest(inputs=[]).exec()", "model_name: expected the model to call, got ''"),
        (
            "pb_utils.InferenceRequest(inputs=[]).get_response_sender()",
            "expected a request that was passed to execute",
        ),
        (
            "requests[0].set_release_flags(2)",
            f"{FAILED}TritonModelException: Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_what_execute_must_not_do(tmp_path: Path, kind: str, returned: str, text: str) -> None:
    code = f"class TritonPythonModel:\n    {kind} execute(self, requests):\n        return {returned}\n"
    write_model(tmp_path, "m", code, X_TO_Y, imports="import sys")
    async with serving(tmp_path) as client:
        code, message = await client.failure("m", {"X": ints(1)})
        assert (code, text in message) == (grpc.StatusCode.INTERNAL, True), message


CODES = {
    "UNKNOWN": grpc.StatusCode.UNKNOWN,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "INVALID_ARG": grpc.StatusCode.INVALID_ARGUMENT,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "UNSUPPORTED": grpc.StatusCode.UNIMPLEMENTED,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "CANCELLED": grpc.StatusCode.CANCELLED,
}


async def test_the_codes_of_errors(tmp_path: Path) -> None:
    names = ", ".join(f"pb_utils.TritonError.{name}" for name in CODES)
    code = f"""
class TritonPythonModel:
    def execute(self, requests):
        code = [{names}][pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()[0]]
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("so it is", code))]
"""
    write_model(tmp_path, "m", code, X_TO_Y)
    async with serving(tmp_path) as client:
        message = [await client.failure("m", {"X": ints(number)}) for number in range(len(CODES))]
    assert message == [(code, "so it is") for code in CODES.values()]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return in_common(monkeypatch)


SENDERS = """
import asyncio
import probe


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[value]], np.int32))])


class TritonPythonModel:
    KIND execute(self, requests):
        returned = []
        for request in requests:
            sender, answer = request.get_response_sender(), None
            STEPS
            returned.append(answer)
            del sender
        return returned

    def later(self, sender, value):
        probe.returned.wait(20)
        try:
            sender.send(response(value), 1)
        except pb_utils.TritonModelException as error:
            probe.seen.append(str(error))
"""
FINAL = "sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"
LATER = "threading.Thread(target=self.later, args=(sender, 2)).start()"
SECOND = "Unable to send response. Non-decoupled model cannot send more than one response."
NO_FIRST = "Unable to send response. Non-decoupled model cannot send complete final before sending a response."


def senders(folder: Path, *steps: str, kind: str = "def", config: str = X_TO_Y.replace("-1", "1, 1")) -> None:
    code = SENDERS.replace("KIND", kind).replace("STEPS", "\n            ".join(steps))
    write_model(folder, "m", code, config)


@pytest.mark.parametrize(
    ("steps", "expected", "logged"),
    [
        (["sender.send(response(1), 1)"], 1, ""),
        (["sender.send(response(1))", FINAL], 1, ""),
        (["sender.send(response(1))"], 1, ""),
        ([LATER], 2, ""),
        (["sender.send(response(1))", "sender.send(response(3))"], 1, SECOND),
        (["sender.send(response(1), 1)", "sender.send(response(3), 1)"], 1, SECOND),
        (["sender.send(response(1), 1)", "answer = response(3)"], 1, SECOND),
        (["sender.send(response(1))", "answer = response(3)"], 1, SECOND),
        (["sender.send(response(1))", "1 / 0"], 1, "division by zero"),
        (["sender.send(response(1), 1)", FINAL], 1, "Response sender has been closed."),
        ([FINAL], f"{FAILED}TritonModelException: {NO_FIRST}", NO_FIRST),
        (["pass"], "released the request's response sender", ""),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_response_may_be_sent(
    tmp_path: Path,
    probe: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    steps: list[str],
    expected: int | str,
    logged: str,
) -> None:
    senders(tmp_path, *steps, kind=kind)
    async with serving(tmp_path) as client:
        asked = asyncio.create_task(outcomes(client, 1))
        probe.returned.set()
        [outcome] = await asked
    if isinstance(expected, str):
        assert has(outcome, grpc.StatusCode.INTERNAL, expected)
    else:
        assert outcome == expected
    assert (logged in caplog.text) if logged else not caplog.text


async def test_nothing_is_sent_after_what_was_returned(tmp_path: Path, probe: SimpleNamespace) -> None:
    senders(tmp_path, "answer = response(1)", LATER)
    async with serving(tmp_path) as client:
        assert await outcomes(client, 1) == [1]
        probe.returned.set()
        await until(lambda: probe.seen)
    assert probe.seen == [SECOND]


async def test_what_was_sent_stays_when_the_others_fail(tmp_path: Path, probe: SimpleNamespace) -> None:
    steps = (
        'xs = [pb_utils.get_input_tensor_by_name(one, "X").as_numpy().item() for one in requests]',
        "if xs[len(returned)] == 1: sender.send(response(1))",
        "if xs[len(returned)] == 2: answer = 'a'",
        "if returned and 3 in xs: 1 / 0",
    )
    senders(tmp_path, *steps, config=BATCHED.replace("[ 4 ]", "[ 2 ]"))
    async with serving(tmp_path) as client:
        first, second = await outcomes(client, 1, 3)
        assert first == 1
        assert has(second, grpc.StatusCode.INTERNAL, "division by zero")
        first, second = await outcomes(client, 1, 2)
        assert first == 1
        assert has(second, grpc.StatusCode.INTERNAL, "found type 'str'")


SHAPES = """
import probe


class TritonPythonModel:
    def execute(self, requests):
        probe.seen.append(sorted(len(one.as_numpy()[0]) for request in requests for one in request.inputs()))
        probe.returned.wait(20)
        for request in requests:
            request.get_response_sender().send(pb_utils.InferenceResponse([]), 1)
"""


@pytest.mark.parametrize("more", ["", "model_transaction_policy { decoupled: true }"], ids=["one", "decoupled"])
@pytest.mark.parametrize(
    ("ragged", "lists"), [("", [[1], [2, 2], [3]]), ("allow_ragged_batch: true", [[1], [2, 2, 3]])]
)
async def test_requests_of_a_list_have_equal_shapes_unless_they_need_not(
    tmp_path: Path, probe: SimpleNamespace, ragged: str, lists: list[list[int]], more: str
) -> None:
    config = X_TO_Y.replace("[ -1 ] } ]", f"[ -1 ] {ragged} }} ]", 1)
    write_model(tmp_path, "m", SHAPES, f"{config} max_batch_size: 8 dynamic_batching {{ }} {more}")

    async def ask(size: int) -> None:
        async for message in client.stream([request("m", {"X": ints(*range(size))[None]})]):
            assert not message.error_message

    async with serving(tmp_path) as client:
        servable = client.server.dataplane.servable(EVERYTHING, "m")
        first = asyncio.create_task(ask(1))
        await until(lambda: probe.seen)
        others = [asyncio.create_task(ask(size)) for size in (2, 2, 3)]
        await until(lambda: servable.queue_depth == 3)
        probe.returned.set()
        await asyncio.gather(first, *others)
    assert sorted(probe.seen) == lists


IDENTITY = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {one.name().replace("IN", "OUT"): one.as_numpy() for one in request.inputs()}
        zeros = np.zeros((1, 1), np.int32)
        names = ["OUTPUT0", "OUTPUT1"] if FILLED else list(given)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, given.get(name, zeros)) for name in names])
"""
TENSORS = """
max_batch_size: 4
input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "INPUT1" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
]
output [
  { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 1 ] }
]
"""
WAITS = "dynamic_batching { preferred_batch_size: [ 2 ], max_queue_delay_microseconds: 60000000 }"
BOTH = {"INPUT0": "INPUT0", "INPUT1": "INPUT1"}, {"OUTPUT0": "OUTPUT0", "OUTPUT1": "OUTPUT1"}
Map = dict[str, str]


def write_ensemble(folder: Path, name: str, *steps: tuple[str, Map, Map]) -> None:
    (folder / name / "1").mkdir(parents=True)
    lines = [
        f'step {{ model_name: "{model}" model_version: -1 '
        + " ".join(f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items())
        + " ".join(f' output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items())
        + " }"
        for model, inputs, outputs in steps
    ]
    text = f'platform: "ensemble"\n{TENSORS}ensemble_scheduling {{ {" ".join(lines)} }}'
    (folder / name / "config.pbtxt").write_text(text)


async def test_optional_inputs_as_in_tritons_own_tests(tmp_path: Path) -> None:
    write_model(tmp_path, "waits", IDENTITY.replace("FILLED", "True"), TENSORS + WAITS)
    write_model(tmp_path, "filled", IDENTITY.replace("FILLED", "True"), TENSORS)
    write_model(tmp_path, "given", IDENTITY.replace("FILLED", "False"), TENSORS)
    inner = {"OUTPUT0": "inner0", "OUTPUT1": "inner1"}
    write_ensemble(tmp_path, "around", ("waits", *BOTH))
    write_ensemble(
        tmp_path,
        "pipeline",
        ("filled", BOTH[0], {"OUTPUT0": "inner"}),
        ("filled", {"INPUT1": "inner"}, BOTH[1]),
    )
    write_ensemble(
        tmp_path,
        "connected",
        ("given", BOTH[0], inner),
        ("given", {"INPUT0": "inner0", "INPUT1": "inner1"}, BOTH[1]),
    )

    async def ask(model: str, *names: str, all_outputs: bool = False) -> dict[str, int]:
        inputs = {name: ints(int(name[-1]) + 5)[None] for name in names}
        outputs = () if all_outputs else [name.replace("IN", "OUT") for name in names]
        answer = await client.infer(model, inputs, outputs=outputs, timeout=SECONDS)
        return {name: array.item() for name, array in answer.outputs.items()}

    async with serving(tmp_path) as client:
        statistics = client.server.dataplane.servable(EVERYTHING, "waits").statistics
        for model in ("waits", "around"):
            for names in (("INPUT0", "INPUT1"), ("INPUT1",)):
                wanted = {name.replace("IN", "OUT"): int(name[-1]) + 5 for name in names}
                found = await asyncio.gather(ask(model, *names), ask(model, *names))
                assert list(found) == [wanted, wanted]
        assert {size: awaited.count for size, awaited in statistics.batches.items()} == {2: 4}
        for model in ("waits", "around"):
            mixed = [asyncio.create_task(ask(model, *names)) for names in (["INPUT0"], ["INPUT1"], [*BOTH[0]])]
            answered = asyncio.as_completed(mixed)
            for pending_answer in (next(answered), next(answered)):
                assert await pending_answer in [{"OUTPUT0": 5}, {"OUTPUT1": 6}, {"OUTPUT0": 5, "OUTPUT1": 6}]
            assert sum(not awaited.done() for awaited in mixed) == 1  # It waits for company.
            for task in mixed:
                task.cancel()
        assert await ask("pipeline", "INPUT0", "INPUT1", all_outputs=True) == {"OUTPUT0": 0, "OUTPUT1": 5}
        assert await ask("connected", "INPUT0", all_outputs=True) == {"OUTPUT0": 5}


SUMS = """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, count):
        names = ("START", "READY", "CORRID", "X")
        start, ready, corrid, x = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names)
        assert (start.shape, x.shape, ready.item(), corrid.item()) == ((1, 1), (1, 1), 1, request.correlation_id())
        if x.item() < 0:
            error = pb_utils.TritonError("below 0", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        self.sums[corrid.item()] = x.item() + (0 if start.item() else self.sums[corrid.item()])
        y = np.array([[self.sums[corrid.item()] * 10 + count]], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
"""
SEQUENCES = """
max_batch_size: 4
sequence_batching {
  %s { max_queue_delay_microseconds: 5000000 %s }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


@pytest.mark.parametrize(
    "strategy", [("oldest", "preferred_batch_size: [ 3 ]"), ("direct", "minimum_slot_utilization: 0.75")]
)
async def test_sequences_come_as_a_list(tmp_path: Path, strategy: tuple[str, str]) -> None:
    write_model(tmp_path, "m", SUMS, SEQUENCES % strategy)

    async def ask(client: GrpcClient, number: int, x: int, start: bool) -> Any:
        parameters = {"sequence_id": number, "sequence_start": start}
        try:
            return (await client.infer("m", {"X": ints(x)[None]}, parameters=parameters)).outputs["Y"].item()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()

    async with serving(tmp_path) as client:
        first = await asyncio.gather(*[ask(client, number, number, True) for number in (1, 2, 3)])
        assert list(first) == [13, 23, 33]
        second = await asyncio.gather(
            ask(client, 1, 1, False), ask(client, 2, -1, False), ask(client, 3, 1, False)
        )
        assert (second[0], second[2]) == (23, 43)
        assert has(second[1], grpc.StatusCode.INVALID_ARGUMENT, "below 0")


THREADS = """
import probe


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.thread = threading.get_ident()

    def execute(self, requests):
        assert threading.get_ident() == self.thread
        probe.seen.append(self.name)
        if len(probe.seen) == 3:
            probe.returned.set()
        assert probe.returned.wait(20)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([1], np.int32))]) for _ in requests]

    def finalize(self):
        probe.seen.append(f"end of {self.name}")
"""


async def test_instances_are_threads_with_an_object_of_their_own(tmp_path: Path, probe: SimpleNamespace) -> None:
    write_model(tmp_path, "m", THREADS, X_TO_Y + "instance_group [ { count: 3 kind: KIND_CPU } ]")
    async with serving(tmp_path) as client:
        await asyncio.gather(*[client.infer("m", {"X": ints(1)}) for _ in range(3)])
        names = [f"m_0_{number}" for number in range(3)]
        assert sorted(probe.seen) == names
        await client.infer("m", {"X": ints(1)})
    assert sorted(probe.seen[4:]) == [f"end of {name}" for name in names]


LOOPS = """
import asyncio
import probe


class TritonPythonModel:
    async def execute(self, requests):
        probe.seen.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([1], np.int32))]) for _ in requests]


class Sync(TritonPythonModel):
    def execute(self, requests):
        return asyncio.get_event_loop().run_until_complete(super().execute(requests))
"""


@pytest.mark.parametrize("code", [LOOPS, LOOPS + "\n\nTritonPythonModel = Sync\n"], ids=["async", "own"])
async def test_a_coroutine_has_a_loop_that_stays(tmp_path: Path, probe: SimpleNamespace, code: str) -> None:
    write_model(tmp_path, "m", code, X_TO_Y)
    async with serving(tmp_path) as client:
        for _ in range(2):
            await client.infer("m", {"X": ints(1)})
    first, other = probe.seen
    assert first is other
    assert first is not asyncio.get_running_loop()
