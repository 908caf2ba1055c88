"""What Triton Python models ask of other models, and of the server."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from tests.backends.triton_served import DECOUPLED, X_TO_Y, in_common, ints, reply, request, serving, write_model
from tests.waiting import ever_later, until


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return in_common(monkeypatch)


CALLS = """
import probe


def twice(value):
    tensor = pb_utils.Tensor("X", np.array([value], np.int32))
    request = pb_utils.InferenceRequest(model_name="twice", inputs=[tensor], requested_output_names=["Y"])
    response = request.exec()
    return response.error().message() if response.has_error() else response.output_tensors()[0].as_numpy().item()


class TritonPythonModel:
    def initialize(self, args):
        probe.seen.append(twice(1))
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        probe.returned.wait(20)
        probe.seen.append(twice(2))

    def execute(self, requests):
        self.thread.join()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([twice(3)], np.int32))])]
"""
TWICE = """
class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 2)])]
"""


async def test_other_models_are_reached_from_anywhere(tmp_path: Path, probe: SimpleNamespace) -> None:
    write_model(tmp_path, "twice", TWICE, X_TO_Y)
    write_model(tmp_path, "zzz", CALLS, X_TO_Y)
    async with serving(tmp_path) as client:
        probe.returned.set()
        assert (await client.infer("zzz", {"X": ints(1)})).outputs["Y"].tolist() == [6]
        assert probe.seen == [2, 4]


async def test_async_exec_is_for_coroutines(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.InferenceRequest(model_name="m", inputs=[]).async_exec()
"""
    write_model(tmp_path, "m", code, X_TO_Y)
    async with serving(tmp_path) as client:
        _, message = await client.failure("m", {"X": ints(1)})
        assert "async_exec: expected a call from an async function, got one from a plain function" in message


async def test_exec_in_a_coroutine(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    async def execute(self, requests):
        request = pb_utils.InferenceRequest(model_name="twice", inputs=requests[0].inputs())
        async for answer in await request.async_exec(decoupled=True):
            assert answer.output_tensors()[0].as_numpy().tolist() == [2]
        answers = request.exec(decoupled=True)
        assert next(answers).output_tensors()[0].as_numpy().tolist() == [2]
        answers.cancel()
        assert not list(answers)
        return [pb_utils.InferenceResponse(request.exec().output_tensors())]
"""
    write_model(tmp_path, "twice", TWICE, X_TO_Y)
    write_model(tmp_path, "m", code, X_TO_Y)
    async with serving(tmp_path) as client:
        assert (await client.infer("m", {"X": ints(1)})).outputs["Y"].tolist() == [2]


TOGETHER = """
import asyncio
import probe


class TritonPythonModel:
    async def execute(self, requests):
        sender = requests[0].get_response_sender()
        probe.seen.append(1)
        while len(probe.seen) < 2:
            await asyncio.sleep(0.005)
        x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 2)]), 1)
"""
ASKS = """
class TritonPythonModel:
    async def execute(self, requests):
        sender = requests[0].get_response_sender()
        request = pb_utils.InferenceRequest(model_name="together", inputs=requests[0].inputs())
        for response in await request.async_exec(decoupled=True):
            sender.send(pb_utils.InferenceResponse(response.output_tensors()))
        sender.send(flags=1)
"""


async def test_coroutines_that_ask_a_decoupled_model_run_at_the_same_time(
    tmp_path: Path, probe: SimpleNamespace
) -> None:
    """On one instance: the other model answers the first when it has the second."""
    write_model(tmp_path, "together", TOGETHER, DECOUPLED)
    write_model(tmp_path, "m", ASKS, DECOUPLED)
    async with serving(tmp_path) as client:
        messages = [message async for message in client.stream([request("m", {"X": ints(x)}) for x in (1, 2)])]
    assert sorted(reply(message.infer_response).outputs["Y"].item() for message in messages) == [2, 4]


async def test_models_are_loaded_where_the_server_lets_them(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        before = pb_utils.is_model_ready("twice")
        pb_utils.load_model("twice", config='{"max_batch_size": 0}')
        there = pb_utils.is_model_ready("twice")
        pb_utils.unload_model("twice")
        after = pb_utils.is_model_ready(model_name="twice", model_version="1")
        y = np.array([before, there, after], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])]
"""
    twice = TWICE.replace("class TritonPythonModel:\n", AUTO)
    write_model(tmp_path, "twice", twice)
    write_model(tmp_path, "m", code, X_TO_Y)
    async with serving(tmp_path, model_control_mode="explicit", load_model="m") as client:
        assert (await client.infer("m", {"X": ints(1)})).outputs["Y"].tolist() == [0, 1, 0]


AUTO = """class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_INT32", "dims": [-1]})
        return config

"""


async def test_the_deadline_of_a_request_is_that_of_what_it_asks(tmp_path: Path, probe: SimpleNamespace) -> None:
    slow = """
import probe


class TritonPythonModel:
    def execute(self, requests):
        probe.begun.set()
        while not requests[0].is_cancelled():
            probe.returned.wait(0.01)
        probe.seen.append("cancelled")
        return [pb_utils.InferenceResponse([])]
"""
    asks = (
        CALLS[CALLS.index("def twice") : CALLS.index("    def initialize")]
        + """
    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(str(twice(1))))]
"""
    )
    write_model(tmp_path, "twice", slow, X_TO_Y)
    write_model(tmp_path, "m", asks, X_TO_Y)
    async with serving(tmp_path) as client:
        for later in ever_later(0.2):
            code, _ = await client.failure("m", {"X": ints(1)}, timeout=later)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            if probe.begun.is_set():
                break
        await until(lambda: probe.seen)


FREED = """
import weakref
import probe


class TritonPythonModel:
    def initialize(self, args):
        probe.seen += [weakref.ref(self), weakref.ref(type(self)), weakref.ref(threading.current_thread())]

    {kind} execute(self, requests):
        request = pb_utils.InferenceRequest(model_name="twice", inputs=requests[0].inputs())
        response = pb_utils.InferenceResponse(request.exec().output_tensors())
        probe.seen += [weakref.ref(requests[0].inputs()[0].as_numpy())]
        {answer}
"""
SENT = "requests[0].get_response_sender().send(response, 1)"


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(("config", "answer"), [(X_TO_Y, "return [response]"), (X_TO_Y, SENT), (DECOUPLED, SENT)])
async def test_nothing_of_a_closed_model_is_left(
    tmp_path: Path, probe: SimpleNamespace, kind: str, config: str, answer: str
) -> None:
    write_model(tmp_path, "twice", TWICE, X_TO_Y)
    write_model(tmp_path, "m", FREED.format(kind=kind, answer=answer), config)
    async with serving(tmp_path) as client:
        async for message in client.stream([request("m", {"X": ints(1)})]):
            assert not message.error_message
        *_, array = probe.seen
        await until(lambda: array() is None)

    def left() -> list[object]:
        gc.collect()
        return [reference() for reference in probe.seen if reference() is not None]

    await until(lambda: not left())


async def test_a_configuration_that_lacks_what_the_code_does_not_say(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.load_model(b"twice", config='{"max_batch_size": 16}')
"""
    write_model(tmp_path, "twice", TWICE, X_TO_Y)
    write_model(tmp_path, "m", code, X_TO_Y)
    async with serving(tmp_path, model_control_mode="explicit", load_model="m,twice") as client:
        _, message = await client.failure("m", {"X": ints(1)})
        assert (
            "expected inputs and outputs in the configuration in the request to load model 'twice', or" in message
        )
        assert (await client.infer("twice", {"X": ints(1)})).outputs["Y"].tolist() == [2]
