"""Project folders as they are: order of the steps, DAGs, errors, the shared pool, metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool

from tests.backends.grps_folders import (
    IMPORTS,
    PATIENCE,
    GrpsCall,
    answer_of,
    ask,
    entry,
    opened,
    own_module,
    result,
    stream,
    threads,
    write_project,
)
from triglot.backends.grps.project import GrpsProject
from triglot.core.errors import Cancelled, Code, DeadlineExceeded, Internal, InvalidArgument
from triglot.executors.declarations import check_declarations
from triglot.executors.work import takes_call
from triglot.pb.grps import grps_pb2
from triglot.telemetry.monitor import Monitor

ECHO = """
class Echo(Base):
    def infer(self, inp, context):
        return inp


inferer_register.register("inferer", Echo())
"""
DOUBLE = """
class Double(Base):
    def infer(self, inp, context):
        return inp * 2


inferer_register.register("inferer", Double())
"""
NUMBERS = (
    IMPORTS
    + """
class Numbers(Converter):
    def init(self, path=None, args=None):
        super().init(path, args)

    def preprocess(self, inp, context):
        return int(inp.str_data)

    def postprocess(self, inp, context):
        return GrpsMessage(str_data=str(inp) + (self._args or {}).get("sign", ""))


converter_register.register("numbers", Numbers())
"""
)
CONVERTED = {"converter_type": "customized", "converter_name": "numbers"}
STEPS = """
class Steps(Base):
    def infer(self, inp, context):
        text = inp.str_data
        context.put_user_data("seen", [*(context.get_user_data("seen") or []), self._args["sign"]])
        if text == "ERR" + self._args["sign"]:
            context.set_err_msg("err in " + self._args["sign"])
            return GrpsMessage(str_data="dropped")
        if context.if_streaming():
            context.stream_respond(GrpsMessage(str_data="s" + self._args["sign"]))
        if text == "seen" and self._args["sign"] == "A":
            return inp
        if text == "seen":
            return GrpsMessage(str_data="".join(context.get_user_data("seen")))
        return GrpsMessage(str_data=text + ">" + self._args["sign"])


inferer_register.register("inferer", Steps())
"""
MISTAKES = """
class Mistakes(Base):
    def infer(self, inp, context):
        kind = inp.str_data
        if kind == "raise":
            raise ValueError("boom")
        if kind == "exit":
            raise SystemExit("enough")
        if kind == "silent":
            raise RuntimeError
        if kind == "text":
            context.set_err_msg("my error")
        elif kind == "flag":
            context.set_has_err(True)
        elif kind == "taken back":
            context.set_err_msg("my error")
            context.set_has_err(False)
        elif kind == "dict":
            return {}
        elif kind == "class":
            return GrpsMessage
        elif kind == "nothing":
            return None
        elif kind == "memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return inp


inferer_register.register("inferer", Mistakes())
"""


def two_steps(folder: Path) -> Any:
    models = [entry("a", inferer_args={"sign": "A"}), entry("b", inferer_args={"sign": "B"})]
    return write_project(folder, STEPS, models=models, nodes=["a-1.0.0", "b-1.0.0"])


def test_converter_and_inferer(tmp_path: Path) -> None:
    models = [entry(**CONVERTED, converter_args={"sign": "!"})]
    settings = write_project(tmp_path, DOUBLE, models=models, files={"src/customized_converter.py": NUMBERS})
    for name in ("", "m"):
        with opened(settings, name) as model:
            assert ask(model, "21") == "42!"
            with pytest.raises(Internal) as caught:
                ask(model, "abc")
            assert caught.value.message == "ValueError: invalid literal for int() with base 10: 'abc'"


def test_without_a_converter_messages_go_to_the_inferer(tmp_path: Path) -> None:
    settings = write_project(tmp_path, ECHO)
    message = grps_pb2.GrpsMessage(model="m-1.0.0", gmap=grps_pb2.GenericMapData(s_i64={"n": 1 << 60}))
    with opened(settings) as model:
        encoded = model.infer({}, GrpsCall(message))
        assert grps_pb2.GrpsMessage.FromString(encoded) == message
        assert model.infer({}, GrpsCall()) == b""


def test_what_a_model_says_of_itself(tmp_path: Path) -> None:
    settings = write_project(tmp_path, ECHO, max_concurrency=3)
    with opened(settings, "m") as model:
        check_declarations(model)
        assert takes_call(model)
        assert (model.platform, model.instances) == ("grps", 3)
        assert model.takes_messages
        assert model.any_tensors
        assert model.description == entry()
    with opened(settings) as model:
        assert model.description is not None
        assert model.description["name"] == "the_dag"


def test_dag_passes_messages_on(tmp_path: Path) -> None:
    with opened(two_steps(tmp_path)) as model:
        assert ask(model, "x") == "x>A>B"
        assert ask(model, "seen") == "AB"
        assert stream(model, "x").texts == ["sA", "sB"]


def test_an_error_stops_a_dag(tmp_path: Path) -> None:
    with opened(two_steps(tmp_path)) as model:
        with pytest.raises(Internal) as caught:
            ask(model, "ERRA")
        assert caught.value.message == "err in A"
        call = GrpsCall(grps_pb2.GrpsMessage(str_data="ERRA"), streaming=True)
        with pytest.raises(Internal):
            model.infer({}, call)
        assert call.answers == []


def test_a_model_of_a_dag_runs_alone(tmp_path: Path) -> None:
    with opened(two_steps(tmp_path), "b") as model:
        assert ask(model, "x") == "x>B"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("raise", "ValueError: boom"),
        ("exit", "SystemExit: enough"),
        ("silent", "RuntimeError"),
        ("text", "my error"),
        ("flag", ""),
        ("dict", "Output type must be GrpsMessage."),
        ("class", "Output type must be GrpsMessage."),
        ("nothing", "Output type must be GrpsMessage."),
    ],
)
def test_errors_of_a_project_reach_the_caller(tmp_path: Path, kind: str, text: str) -> None:
    with opened(write_project(tmp_path, MISTAKES)) as model:
        with pytest.raises(Internal) as caught:
            ask(model, kind)
        assert caught.value.message == text
        assert caught.value.code is Code.INTERNAL
        assert ask(model, "taken back") == "taken back"


def test_a_stream_needs_no_result(tmp_path: Path) -> None:
    with opened(write_project(tmp_path, MISTAKES)) as model:
        assert stream(model, "dict").answers == []
        with pytest.raises(Internal, match="ValueError: boom"):
            model.infer({}, GrpsCall(grps_pb2.GrpsMessage(str_data="raise"), streaming=True))


def test_damaged_bytes_are_refused(tmp_path: Path) -> None:
    with opened(write_project(tmp_path, ECHO)) as model:
        call = GrpsCall()
        assert call.exchange is not None
        call.exchange.message = b"\x0a\xff"
        with pytest.raises(InvalidArgument, match="the request is not a GrpsMessage"):
            model.infer({}, call)


def test_a_gpu_without_memory_is_counted(tmp_path: Path) -> None:
    monitor = Monitor()
    with opened(write_project(tmp_path, MISTAKES), monitor=monitor) as model:
        for kind in ("memory", "raise"):
            with pytest.raises(Internal):
                ask(model, kind)
    assert monitor.drain() == [("*gpu_oom_count", "inc", 1)]


def test_messages_of_another_package_are_messages(tmp_path: Path) -> None:
    """A class of another descriptor pool: what a project gets that imports grps' own client package."""
    file = descriptor_pb2.FileDescriptorProto()
    grps_pb2.DESCRIPTOR.CopyToProto(file)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("grps.protos.v1.GrpsMessage"))
    code = """
class Foreign(Base):
    def infer(self, inp, context):
        if context.if_streaming():
            context.stream_respond(foreign(str_data="streamed"))
        return foreign(str_data="foreign")


inferer_register.register("inferer", Foreign())
"""
    with opened(write_project(tmp_path, code)) as model:
        own_module().foreign = message
        assert ask(model, "") == "foreign"
        assert stream(model).texts == ["streamed"]
        assert model.infer({}, GrpsCall().child())["str_data"].tolist() == [b"foreign"]


def test_all_models_share_the_pool(tmp_path: Path) -> None:
    code = """
inside, gate = threading.Semaphore(0), threading.Event()


class Held(Base):
    def infer(self, inp, context):
        inside.release()
        assert gate.wait(30)
        return inp


inferer_register.register("inferer", Held())
"""
    settings = write_project(tmp_path, code, models=[entry("a"), entry("b")], max_concurrency=2)
    project = GrpsProject(settings, Monitor())
    models = [project.model(name, "1.0.0") for name in "ab"]
    try:
        inside, gate = own_module().inside, own_module().gate
        with threads(2) as pool:
            held = [pool.submit(ask, model, model.description["name"]) for model in models if model.description]
            for _ in held:
                assert inside.acquire(timeout=PATIENCE)
            late = GrpsCall()
            late.deadline = 0.0
            with pytest.raises(DeadlineExceeded):
                models[0].infer({}, late)
            assert not inside.acquire(blocking=False)
            gate.set()
            assert [result(future) for future in held] == ["a", "b"]
        cancelled = GrpsCall()
        cancelled.cancel()
        with pytest.raises(Cancelled):
            models[1].infer({}, cancelled)
        assert ask(models[0], "again") == "again"
    finally:
        for model in models:
            model.close()


def test_metrics_of_the_projects_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = """
import numpy as np


class Measured(Base):
    def infer(self, inp, context):
        app_monitor.inc("count", 1)
        app_monitor.avg("avg", 1.5)
        app_monitor.max("max", np.float64(2))
        app_monitor.min("min", True)
        app_monitor.cdf("cdf", 3)
        app_monitor.cdf("cdf", np.float32(1))
        app_monitor.inc("count", "many")
        app_monitor.inc(None, 1)
        return inp


inferer_register.register("inferer", Measured())
"""
    monitor = Monitor()
    with opened(write_project(tmp_path, code), monitor=monitor) as model:
        ask(model, "")
    values = monitor.drain()
    assert values == [
        ("count", "inc", 1),
        ("avg", "avg", 1.5),
        ("max", "max", 2.0),
        ("min", "min", 1),
        ("cdf", "cdf", 3),
    ]
    assert {type(value) for _, _, value in values} == {int, float}
    assert len([record for record in caplog.records if "app_monitor" in record.message]) == 3


def test_one_call_counts_as_one(tmp_path: Path) -> None:
    with opened(write_project(tmp_path, ECHO)) as model:
        call = GrpsCall(grps_pb2.GrpsMessage(str_data="x"))
        assert answer_of(model.infer({}, call)) == "x"
        assert call.batch_size == 1
    assert "grps_framework" not in sys.modules
