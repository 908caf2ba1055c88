"""Decoupled Triton Python models: any number of responses, from any thread, at any time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.backends.triton_served import (
    DECOUPLED,
    SECONDS,
    X_TO_Y,
    GrpcClient,
    in_common,
    ints,
    reply,
    request,
    serving,
    write_model,
)
from tests.waiting import ever_later, until
from triglot.core.call import Call
from triglot.core.operation import EVERYTHING
from triglot.core.response_buffer import STREAM_BUFFER as BUFFER
from triglot.core.types import InferenceRequest, InputTensor
from triglot.repository.config.completed import completed

HEAD = """
import probe


def x_of(request):
    return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([value], np.int32))])

"""
FINAL = "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return in_common(monkeypatch)


def model(folder: Path, execute: str, config: str = DECOUPLED, kind: str = "def") -> None:
    body = "\n".join(f"        {line}" for line in execute.splitlines())
    write_model(
        folder, "m", f"{HEAD}class TritonPythonModel:\n    {kind} execute(self, requests):\n{body}\n", config
    )


async def outcome(client: GrpcClient, *xs: int, empty_final: bool = False, model: str = "m") -> list[Any]:
    """The values of a request's stream, and an error's text; with `empty_final` what each says of being final."""
    fields = {"parameters": {"triton_enable_empty_final_response": True}} if empty_final else {}
    found: list[Any] = []
    async for message in client.stream([request(model, {"X": ints(*xs)}, **fields)]):
        if message.error_message:
            found.append(message.error_message)
            continue
        answer = reply(message.infer_response)
        values = [array.item() for array in answer.outputs.values()]
        found += [(*values, answer.parameters["triton_final_response"])] if empty_final else values
    return found


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_final_responses(tmp_path: Path, probe: SimpleNamespace, kind: str) -> None:
    execute = f"""for request in requests:
    sender = request.get_response_sender()
    for value in x_of(request)[:-1]:
        sender.send(response(value))
    sender.send(response(9), {FINAL}) if x_of(request)[-1] else sender.send({FINAL})"""
    model(tmp_path, execute, kind=kind)
    async with serving(tmp_path) as client:
        assert await outcome(client, 1, 2, 0, empty_final=True) == [(1, False), (2, False), (True,)]
        assert await outcome(client, 1, 2, 1, empty_final=True) == [(1, False), (2, False), (9, True)]
        assert await outcome(client, 1, 2, 0) == [1, 2]
        assert await outcome(client, 0) == []


ENSEMBLE = """
platform: "ensemble"
input [ { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling {
  max_inflight_requests: 4
  step { model_name: "m" input_map { key: "X" value: "X" } output_map { key: "Y" value: "numbers" } }
  step { model_name: "twice" input_map { key: "X" value: "numbers" } output_map { key: "Y" value: "Y" } }
}
"""
TWICE = """
class TritonPythonModel:
    def execute(self, requests):
        taken = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        assert all(array.shape == (1, 1) for array in taken)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array * 2)]) for array in taken]
"""


@pytest.mark.parametrize("policy", ["", "model_transaction_policy { decoupled: false }"])
async def test_an_ensemble(tmp_path: Path, probe: SimpleNamespace, policy: str) -> None:
    """It is what its steps are, whatever its configuration says; between the steps a batch of one."""
    model(
        tmp_path,
        f"""for request in requests:
    sender = request.get_response_sender()
    for value in x_of(request):
        sender.send(response(value))
    sender.send({FINAL})""",
    )
    batched = "max_batch_size: 2 dynamic_batching {}" + X_TO_Y.replace("-1", "1")
    write_model(tmp_path, "twice", TWICE, batched)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "config.pbtxt").write_text(ENSEMBLE + policy)
    async with serving(tmp_path) as client:
        numbers = range(40)
        assert await outcome(client, *numbers, model="e") == [2 * number for number in numbers]
        final = [(2, False), (4, False), (True,)]
        assert await outcome(client, 1, 2, empty_final=True, model="e") == final
        assert await outcome(client, model="e") == []
        refused = "ModelInfer RPC doesn't support models with decoupled transaction policy"
        assert await client.failure("e", {"X": ints(1)}) == (grpc.StatusCode.UNIMPLEMENTED, refused)
        config = client.server.dataplane.loaded_from(EVERYTHING, "e")
        assert completed(config).model_transaction_policy.decoupled


@pytest.mark.parametrize("name", ["m", "e"])
async def test_a_full_queue(tmp_path: Path, probe: SimpleNamespace, name: str) -> None:
    """Of `default_queue_policy`; in an ensemble it is the step's error."""
    policy = "dynamic_batching { default_queue_policy { max_queue_size: 2 } }"
    probe.gate = threading.Event()
    model(
        tmp_path,
        f"""probe.seen.append(x_of(requests[0])[0])
probe.gate.wait({SECONDS})
requests[0].get_response_sender().send(response(5), {FINAL})""",
        DECOUPLED + policy,
    )
    write_model(tmp_path, "twice", TWICE.replace("(1, 1)", "(1,)"), X_TO_Y)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "config.pbtxt").write_text(ENSEMBLE.replace("max_inflight_requests: 4", ""))
    async with serving(tmp_path) as client:
        asked = [asyncio.create_task(outcome(client, 0, model=name))]
        await until(lambda: probe.seen)
        asked += [asyncio.create_task(outcome(client, number, model=name)) for number in range(1, 8)]
        await until(lambda: sum(task.done() for task in asked) == 5)
        probe.gate.set()
        found = await asyncio.gather(*asked)
        answer = [5] if name == "m" else [10]
        errors = [outcome[0] for outcome in found if outcome != answer]
        assert (found.count(answer), len(errors)) == (3, 5)
        full = "Exceeds maximum queue size: 2 requests are queued, the most that max_queue_size allows"
        expected = full if name == "m" else f"in ensemble 'e', model 'm': {full}"
        assert {error.removeprefix("[request id: <id_unknown>] ") for error in errors} == {expected}


@pytest.mark.parametrize(
    ("execute", "expected"),
    [
        ("1 / 0", "message: ZeroDivisionError: division by zero"),
        ("raise pb_utils.TritonModelException('not today')", "message: TritonModelException: not today"),
        ("return []", "is using the decoupled mode and the execute function must return None, got list"),
        ("pass", "the model released the request's response sender without sending"),
        (
            "requests[0].get_response_sender()",
            "the model released the request's response sender without sending",
        ),
        (
            "requests[0].get_response_sender().send("
            "pb_utils.InferenceResponse(error=pb_utils.TritonError('no', 3)))",
            "no",
        ),
        ("requests[0].get_response_sender().send()", "must be provided when the response flags is set to zero"),
        ("requests[0].get_response_sender().send(flags=2)", "Unsupported flag provided."),
        ("requests[0].get_response_sender().send('a')", "response: expected an InferenceResponse, got str"),
        ("raise SystemExit('bye')", "message: SystemExit: bye"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_what_ends_with_an_error(
    tmp_path: Path, probe: SimpleNamespace, kind: str, execute: str, expected: str
) -> None:
    model(tmp_path, execute, kind=kind)
    async with serving(tmp_path) as client:
        for _ in range(2):
            [outcome_text] = await outcome(client, 1)
            assert expected in outcome_text


async def test_nothing_is_sent_after_the_final_flag(tmp_path: Path, probe: SimpleNamespace) -> None:
    execute = f"""sender = requests[0].get_response_sender()
sender.send(response(1))
sender.send({FINAL})
for arguments in ((response(2),), (None, 1)):
    try:
        sender.send(*arguments)
    except pb_utils.TritonModelException as error:
        probe.seen.append(str(error))"""
    model(tmp_path, execute)
    async with serving(tmp_path) as client:
        assert await outcome(client, 1) == [1]
    assert probe.seen == ["Unable to send response. Response sender has been closed."] * 2


async def test_after_an_error_the_rest_is_passed_over(tmp_path: Path, probe: SimpleNamespace) -> None:
    execute = f"""sender = requests[0].get_response_sender()
sender.send(response(1))
sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("halfway")))
sender.send(response(2))
sender.send({FINAL})
probe.returned.set()"""
    model(tmp_path, execute)
    async with serving(tmp_path) as client:
        assert await outcome(client, 1) == [1, "halfway"]
        await asyncio.to_thread(probe.returned.wait, SECONDS)
        assert probe.returned.is_set()


async def test_an_error_after_the_end_is_nobodys(tmp_path: Path, probe: SimpleNamespace) -> None:
    model(tmp_path, f"requests[0].get_response_sender().send(response(1), {FINAL})\n1 / 0")
    async with serving(tmp_path) as client:
        assert await outcome(client, 1) == [1]
        assert await outcome(client, 1) == [1]


async def test_responses_may_lack_outputs_and_have_parameters(tmp_path: Path, probe: SimpleNamespace) -> None:
    execute = f"""sender = requests[0].get_response_sender()
sender.send(pb_utils.InferenceResponse(parameters={{"step": 1}}))
sender.send(pb_utils.InferenceResponse([]), {FINAL})"""
    model(tmp_path, execute)
    async with serving(tmp_path) as client:
        messages = [
            reply(response.infer_response) async for response in client.stream([request("m", {"X": ints(1)})])
        ]
    assert [(message.outputs, message.parameters) for message in messages] == [
        ({}, {"step": 1, "triton_final_response": False}),
        ({}, {"triton_final_response": True}),
    ]


PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
SEQUENCES = "sequence_batching { oldest { max_candidate_sequences: 4 } }"


@pytest.mark.parametrize("more", ["", PROCESS, SEQUENCES], ids=["thread", "process", "sequences"])
async def test_unrequested_outputs_are_omitted(tmp_path: Path, more: str) -> None:
    code = f"""class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            wanted = "".join(sorted(request.requested_output_names()))
            tensors = [pb_utils.Tensor(name, np.frombuffer(wanted.encode(), np.uint8)) for name in ("Y", "Z", "W")]
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse(tensors))
            sender.send(pb_utils.InferenceResponse(tensors[1:]), {FINAL})
"""
    z = 'output [ { name: "Z" data_type: TYPE_UINT8 dims: [ -1 ] } ]\n'
    config = DECOUPLED.replace('"Y" data_type: TYPE_INT32', '"Y" data_type: TYPE_UINT8') + z
    write_model(tmp_path, "m", code, config + more)
    asks = """class TritonPythonModel:
    def execute(self, requests):
        request = pb_utils.InferenceRequest(
            model_name="m", inputs=requests[0].inputs(), requested_output_names=["Y"],
            correlation_id=7, flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        names = [sorted(one.name() for one in answer.output_tensors()) for answer in request.exec(decoupled=True)]
        assert names == [["Y"], []], names
        return [pb_utils.InferenceResponse([])]
"""
    write_model(tmp_path, "asks", asks, X_TO_Y)

    async def answers(*names: str) -> list[dict[str, bytes]]:
        fields = {"outputs": names, "parameters": {"sequence_id": 3, "sequence_start": True}}
        messages = [
            reply(response.infer_response)
            async for response in client.stream([request("m", {"X": ints(1)}, **fields)])
        ]
        return [{name: array.tobytes() for name, array in message.outputs.items()} for message in messages]

    async with serving(tmp_path) as client:
        assert await answers("Y") == [{"Y": b"Y"}, {}]
        assert await answers("Z") == [{"Z": b"Z"}, {"Z": b"Z"}]
        assert await answers() == [{"Y": b"YZ", "Z": b"YZ"}, {"Z": b"YZ"}]
        await client.infer("asks", {"X": ints(1)})


async def test_requests_are_answered_at_the_same_time(tmp_path: Path, probe: SimpleNamespace) -> None:
    """One instance; the senders of both requests send in turn once both have come."""
    execute = f"""probe.senders += [(request.get_response_sender(), x_of(request)[0]) for request in requests]
if len(probe.senders) == 2:
    def run():
        for _ in range(3):
            for sender, value in probe.senders:
                sender.send(response(value))
        for sender, _ in probe.senders:
            sender.send({FINAL})
        probe.senders.clear()
    threading.Thread(target=run).start()"""
    model(tmp_path, execute)
    async with serving(tmp_path) as client:
        first = asyncio.create_task(outcome(client, 1))
        await until(lambda: probe.senders)
        assert await outcome(client, 2) == [2, 2, 2]
        assert await first == [1, 1, 1]


@pytest.mark.parametrize(("batching", "lists"), [("", [1, 1, 1, 1]), ("dynamic_batching { }", [1, 2, 1])])
async def test_queued_requests_are_executed_together_when_batched(
    tmp_path: Path, probe: SimpleNamespace, batching: str, lists: list[int]
) -> None:
    execute = f"""probe.seen.append(len(requests))
probe.returned.wait(20)
for request in requests:
    request.get_response_sender().send({FINAL})"""
    config = DECOUPLED.replace("-1", "1") + f"max_batch_size: 2\n{batching}"
    model(tmp_path, execute, config)
    async with serving(tmp_path) as client:
        waiting = client.server.dataplane.servable(EVERYTHING, "m").model
        calls = []
        for number in range(4):
            calls.append(asyncio.create_task(drained(client.stream([request("m", {"X": ints(1)[None]})]))))
            # The first one runs, and the others wait.
            await until(lambda: probe.seen)
            await until(lambda number=number: len(vars(waiting)["_queue"]) == number)  # type: ignore[misc]  # A default.
        probe.returned.set()
        await asyncio.gather(*calls)
    assert probe.seen == lists


async def test_one_request_at_a_time_without_batches_whatever_its_shape(
    tmp_path: Path, probe: SimpleNamespace
) -> None:
    execute = f"""probe.seen.append([x_of(request).shape for request in requests])
probe.returned.wait(20)
for request in requests:
    request.get_response_sender().send({FINAL})"""
    model(tmp_path, execute)
    async with serving(tmp_path) as client:
        waiting = client.server.dataplane.servable(EVERYTHING, "m").model
        requests = [request("m", {"X": ints(*range(size))}) for size in (0, 0, 2, 0)]
        calls = [asyncio.create_task(drained(client.stream([request]))) for request in requests]
        await until(lambda: probe.seen and len(vars(waiting)["_queue"]) == 3)
        probe.returned.set()
        await asyncio.gather(*calls)
    assert sorted(probe.seen) == [[(0,)], [(0,)], [(0,)], [(2,)]]


async def drained(messages: Any) -> int:
    return len([message async for message in messages if not message.error_message])


def called(call: Call, client: GrpcClient) -> Any:
    x = ints(1)
    tensors = [InputTensor("X", "INT32", x.shape, x)]
    return client.server.dataplane.infer_stream(InferenceRequest("m", inputs=tensors), call)


async def test_a_slow_client_holds_up_the_model_that_runs_for_it_alone(
    tmp_path: Path, probe: SimpleNamespace
) -> None:
    execute = f"""sender = requests[0].get_response_sender()
for number in range({4 * BUFFER}):
    sender.send(response(number))
    probe.seen.append(number)
sender.send({FINAL})"""
    model(tmp_path, execute)
    async with serving(tmp_path) as client:
        answers = called(Call(), client)
        for number in range(4 * BUFFER):
            assert (await anext(answers)).outputs[0].array.item() == number
            assert len(probe.seen) <= number + 1 + BUFFER
        assert [answer async for answer in answers] == []


async def test_who_leaves_is_noticed(tmp_path: Path, probe: SimpleNamespace) -> None:
    execute = f"""sender = requests[0].get_response_sender()
sender.send(response(1))
for number in range({4 * BUFFER}):
    sender.send(response(number))
while not sender.is_cancelled():
    probe.returned.wait(0.005)
assert requests[0].is_cancelled()
sender.send({FINAL})
probe.seen.append("left")"""
    model(tmp_path, execute)
    async with serving(tmp_path) as client:
        for _ in range(2):
            answers = called(Call(), client)
            await anext(answers)
            await answers.aclose()
            await until(lambda: probe.seen)
            assert probe.seen.pop() == "left"


async def test_one_that_waits_may_leave(tmp_path: Path, probe: SimpleNamespace) -> None:
    execute = f"""probe.seen.append(int(x_of(requests[0])[0]))
probe.returned.wait(20)
requests[0].get_response_sender().send({FINAL})"""
    model(tmp_path, execute)
    async with serving(tmp_path) as client:
        first = asyncio.create_task(outcome(client, 1))
        await until(lambda: probe.seen)
        second = asyncio.create_task(outcome(client, 2))
        waiting = client.server.dataplane.servable(EVERYTHING, "m").model
        await until(lambda: len(vars(waiting)["_queue"]) == 1)
        second.cancel()
        await until(lambda: not len(vars(waiting)["_queue"]))
        probe.returned.set()
        assert await first == []
        assert await outcome(client, 3) == []
    assert probe.seen == [1, 3]


async def test_a_deadline_ends_a_stream(tmp_path: Path, probe: SimpleNamespace) -> None:
    model(tmp_path, "probe.senders.append(requests[0].get_response_sender())")
    for later in ever_later(0.1):
        async with serving(tmp_path, default_timeout=later) as client:
            [message] = [
                response async for response in client.stream([request("m", {"X": ints(1)})], timeout=None)
            ]
            assert f"timeout of {later:g} seconds passed" in message.error_message
        if probe.senders:
            break
    assert probe.senders[0].is_cancelled()
    probe.senders.clear()


async def test_coroutines_run_at_the_same_time(tmp_path: Path, probe: SimpleNamespace) -> None:
    """On one instance: the first waits for what the second brings."""
    execute = f"""sender = requests[0].get_response_sender()
probe.seen.append(1)
while len(probe.seen) < 2:
    await asyncio.sleep(0.005)
await asyncio.sleep(0)
sender.send(response(x_of(requests[0])[0]), {FINAL})"""
    write_model(
        tmp_path,
        "m",
        f"{HEAD}class TritonPythonModel:\n    async def execute(self, requests):\n"
        + "".join(f"        {line}\n" for line in execute.splitlines()),
        DECOUPLED,
        imports="import asyncio",
    )
    async with serving(tmp_path) as client:
        assert list(await asyncio.gather(outcome(client, 1), outcome(client, 2))) == [[1], [2]]


async def test_auto_complete_makes_it_decoupled(tmp_path: Path, probe: SimpleNamespace) -> None:
    code = f"""{HEAD}class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_model_transaction_policy({{"decoupled": True}})
        return config

    def initialize(self, args):
        assert pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.thread = threading.get_ident()

    def execute(self, requests):
        assert threading.get_ident() == self.thread
        requests[0].get_response_sender().send(response(3), {FINAL})

    def finalize(self):
        assert threading.get_ident() == self.thread
        probe.seen.append("end")
"""
    write_model(tmp_path, "m", code, X_TO_Y)
    async with serving(tmp_path) as client:
        assert await outcome(client, 1) == [3]
        code_, _ = await client.failure("m", {"X": ints(1)})
        assert code_ is grpc.StatusCode.UNIMPLEMENTED
    assert probe.seen == ["end"]
