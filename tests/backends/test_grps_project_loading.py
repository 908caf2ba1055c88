"""What a project's modules import, which objects serve which model, and what is left when it is closed."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.backends.grps_folders import IMPORTS, ask, entry, opened, own_module, write_project
from triglot.backends.grps.project import GrpsProject
from triglot.core.errors import MissingDependency, ModelLoadError
from triglot.pb.grps import grps_pb2
from triglot.telemetry.monitor import Monitor

ECHO = """
class Echo(Base):
    loads = 0

    def load(self):
        self.loads += 1
        return True

    def infer(self, inp, context):
        assert context.inferer is self and context.converter is None
        return GrpsMessage(str_data=f"{inp.str_data} {id(self)} {self.loads}")


inferer_register.register("inferer", Echo())
"""
SURFACE = {
    "grps_framework.apis.grps_pb2": [
        "DataType", "DT_FLOAT32", "DT_STRING", "GenericMapData", "GenericTensor", "GenericTensorData",
        "GrpsMessage", "Status",
    ],
    "grps_framework.apis.grps_pb2_grpc": ["GrpsServiceStub"],
    "grps_framework.conf.conf": ["global_conf"],
    "grps_framework.context.context": ["GrpsContext"],
    "grps_framework.converter.converter": ["Converter", "converter_register"],
    "grps_framework.converter.trt_tensor_converter": ["TrtTensorConverter"],
    "grps_framework.executor.executor": ["Executor"],
    "grps_framework.logger.logger": ["logger", "clogger"],
    "grps_framework.model_infer.inferer": ["ModelInferer", "inferer_register"],
    "grps_framework.model_inferer.inferer": ["ModelInferer", "inferer_register"],
    "grps_framework.monitor.monitor": ["app_monitor"],
    "grps_framework.test": ["GrpsTest"],
}  # fmt: skip


def failure(settings: Any, name: str = "") -> str:
    """Why the project's model is not loaded; nothing of it is left."""
    path = list(sys.path)
    with pytest.raises(ModelLoadError) as caught, opened(settings, name):
        pass
    assert not [module for module in sys.modules if module.partition(".")[0] in ("grps_framework", "src")]
    assert sys.path == path
    return str(caught.value)


def test_every_name_can_be_imported(tmp_path: Path) -> None:
    lines = [f"from {module} import {', '.join(names)}" for module, names in SURFACE.items()]
    lines += [f"import {module}" for module in SURFACE]
    lines += ["from grps_framework.apis import grps_pb2", "import grps_framework.apis.grps_pb2 as again"]
    code = "\n".join(
        [*lines, "assert again is grps_pb2", "assert issubclass(GrpsTest, __import__('unittest').TestCase)"]
    )
    with opened(write_project(tmp_path, f"{ECHO}\n{code}\n")) as model:
        assert ask(model, "x").startswith("x ")
        framework = sys.modules["grps_framework"]
        assert framework.context.context is sys.modules["grps_framework.context.context"]
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("grps_framework.unknown")
        with pytest.raises(ImportError, match="unknown"):
            exec("from grps_framework.test import unknown")


def test_configuration_and_loggers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = """
from grps_framework.conf.conf import global_conf
from grps_framework.logger.logger import logger

logger.info("server line")
clogger.err("user line")
clogger.crit("end")
"""
    with caplog.at_level(logging.INFO), opened(write_project(tmp_path, ECHO + code)):
        conf = own_module().global_conf
        assert conf.server_conf["max_concurrency"] == 8
        assert conf.inference_conf["models"][0]["version"] == "1.0.0"
        assert conf.loaded
    lines = [(record.name, record.levelname, record.message, record.filename) for record in caplog.records]
    assert lines == [
        ("grps.server", "INFO", "server line", "customized_inferer.py"),
        ("grps.user", "ERROR", "user line", "customized_inferer.py"),
        ("grps.user", "CRITICAL", "end", "customized_inferer.py"),
    ]


def test_objects_serve_one_entry_each(tmp_path: Path) -> None:
    settings = write_project(
        tmp_path, ECHO, models=[entry("a"), entry("b"), entry("c")], nodes=["a-1.0.0", "c-1.0.0"]
    )
    project = GrpsProject(settings, Monitor())
    models = [project.model(name, "1.0.0") for name in "cba"]
    dag = project.dag()
    try:
        answers = [ask(model, "x").split() for model in models]
        registered = id(own_module().inferer_register.model_inferer_dict["inferer"])
        assert [int(identity) == registered for _, identity, _ in answers] == [False, False, True]
        assert len({identity for _, identity, _ in answers}) == 3
        assert {loads for *_, loads in answers} == {"1"}
        # The DAG runs the same objects, a's first.
        assert ask(dag, "x").split() == ["x", answers[2][1], "1", answers[0][1], "1"]
    finally:
        for model in [*models, dag]:
            model.close()


def test_settings_reach_the_inferer(tmp_path: Path) -> None:
    code = """
seen = []


class Seen(Base):
    def load(self):
        seen.append((self._path, self._device, self._args))
        return True

    def infer(self, inp, context):
        return inp


inferer_register.register("inferer", Seen())
"""
    models = [
        entry("a", device="Auto", inferer_path="./data/m.bin", inferer_args={"n": [1]}),
        entry("b", inferer_args=None),
        entry("c"),
    ]
    nodes = [f"{name}-1.0.0" for name in "abc"]
    with opened(write_project(tmp_path, code, models=models, nodes=nodes)):
        assert own_module().seen == [
            ("./data/m.bin", "auto", {"n": [1]}),
            ("", "cpu", None),
            ("", "cpu", {}),
        ]


def test_what_is_left_after_the_last_model_is_closed(tmp_path: Path) -> None:
    helper = "from grps_framework.apis.grps_pb2 import GrpsMessage\n"
    code = """
import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import neighbour
import top
from src.inner import deep
import colorsys_of_nobody as other
"""
    files = {
        "src/neighbour.py": helper,
        "src/inner/__init__.py": "",
        "src/inner/deep.py": "from .. import neighbour",
        "top.py": "",
        "venv/site-packages/colorsys_of_nobody.py": "",
        "test.py": "",
    }
    settings = write_project(tmp_path, code + ECHO, models=[entry("a"), entry("b")], files=files)
    src, test = ModuleType("src"), ModuleType("test")
    path, before = list(sys.path), set(sys.modules)
    sys.modules.update(src=src, test=test)
    sys.path.append(str(tmp_path / "venv" / "site-packages"))
    try:
        project = GrpsProject(settings, Monitor())
        assert "grps_framework" not in sys.modules
        models = [project.model(name, "1.0.0") for name in "ab"]
        assert str(tmp_path) in sys.path
        assert "test" not in sys.modules
        models[0].close()
        assert ask(models[1], "x").startswith("x ")
        assert sys.modules["top"].__file__ == str(tmp_path / "top.py")
        models[1].close()
        assert sys.modules["src"] is src
        assert sys.modules["test"] is test
        # What is installed stays, wherever it lies.
        assert set(sys.modules) - before == {"src", "test", "colorsys_of_nobody"}
        assert sys.path == [*path, str(tmp_path / "venv" / "site-packages")]
        with opened(settings, "a") as again:
            assert ask(again, "x").endswith(" 1")
    finally:
        sys.path[:] = path
        for name in ("src", "test", "colorsys_of_nobody"):
            sys.modules.pop(name, None)


def test_one_project_at_a_time(tmp_path: Path) -> None:
    first = write_project(tmp_path / "first", ECHO)
    second = write_project(tmp_path / "second", ECHO)
    with opened(first):
        with pytest.raises(ModelLoadError) as caught, opened(second):
            pass
        assert str(caught.value) == (
            f"{tmp_path / 'second'}: the grps project {tmp_path / 'first'} is loaded; "
            "one process runs one project at a time"
        )
    with opened(second) as model:
        assert ask(model, "x").startswith("x ")


def test_either_module_may_be_missing(tmp_path: Path) -> None:
    settings = write_project(tmp_path, files={"src/customized_converter.py": IMPORTS + ECHO})
    with opened(settings) as model:
        assert ask(model, "x").startswith("x ")


NO_LOAD = """
class Refuses(Base):
    def load(self):
        return None

    def infer(self, inp, context):
        return inp


inferer_register.register("inferer", Refuses())
"""
LOAD = "def load(self):\n        return None"
NO_INIT = NO_LOAD.replace(LOAD, "def init(self, *args):\n        raise OSError('no file')")
NEEDS_SIZE = NO_LOAD.replace(LOAD, "def __init__(self, size):\n        pass").replace("Refuses()", "Refuses(3)")
ENTRY = "conf/inference.yml: model m-1.0.0: "
MODULE = "src/customized_inferer.py: "


@pytest.mark.parametrize(
    ("code", "name", "text"),
    [
        ("", "", f"{ENTRY}inferer_name: no inferer 'inferer' is registered (registered: none); expected "
         "inferer_register.register('inferer', ...) in src/customized_inferer.py"),
        ("import nobodys", "", f"{MODULE}ModuleNotFoundError: No module named 'nobodys'"),
        ("def", "", f"{MODULE}SyntaxError: "),
        (NO_LOAD, "", f"{ENTRY}inferer inferer: load() returned None, expected True"),
        (NO_INIT, "", f"{ENTRY}inferer inferer: init(): OSError: no file"),
        (NEEDS_SIZE, "n", "conf/inference.yml: model n-1.0.0: inferer inferer: Refuses(): TypeError: "),
        ("class Half(Base):\n    pass\n\n\nHalf()", "", f"{MODULE}TypeError: Can't instantiate"),
    ],
)  # fmt: skip
def test_what_keeps_a_project_from_loading(tmp_path: Path, code: str, name: str, text: str) -> None:
    settings = write_project(tmp_path, code, models=[entry("m"), entry("n")])
    assert failure(settings, name).startswith(f"{tmp_path}/{text}")


def test_unregistered_converter(tmp_path: Path) -> None:
    models = [entry(converter_type="customized", converter_name="lost")]
    text = failure(write_project(tmp_path, ECHO, models=models))
    assert "model m-1.0.0: converter_name: no converter 'lost' is registered (registered: none); expected" in text


def test_a_failure_leaves_the_other_models_alone(tmp_path: Path) -> None:
    models = [entry("m"), entry("n", inferer_name="lost")]
    settings = write_project(tmp_path, ECHO, models=models)
    project = GrpsProject(settings, Monitor())
    model = project.model("m", "1.0.0")
    with pytest.raises(ModelLoadError, match=r"model n-1\.0\.0"):
        project.model("n", "1.0.0")
    assert ask(model, "x").startswith("x ")
    model.close()
    assert "grps_framework" not in sys.modules


CUSTOM_HTTP = {
    "framework": "http",
    "host": "0.0.0.0",
    "port": 7080,
    "customized_predict_http": {"path": "/custom", "customized_body": True},
}


def test_customised_http_needs_flask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = write_project(tmp_path, ECHO, interface=CUSTOM_HTTP)
    with opened(settings) as model:
        assert ask(model, "x").startswith("x ")
    monkeypatch.setitem(sys.modules, "flask", None)
    with pytest.raises(MissingDependency) as caught, opened(settings):
        pass
    assert str(caught.value) == (
        f"{tmp_path}/conf/server.yml: interface.customized_predict_http.customized_body needs flask, "
        "which is not installed; run: pip install flask"
    )
    with opened(write_project(tmp_path, ECHO, interface={**CUSTOM_HTTP, "customized_predict_http": None})):
        pass


def test_the_stub_calls_any_channel(tmp_path: Path) -> None:
    class Loopback:
        """A channel whose server answers with the method's path and the request's text."""

        def unary_unary(self, path: str, **codec: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def call(request: Any) -> Any:
                sent = grps_pb2.GrpsMessage.FromString(codec["request_serializer"](request))
                answer = grps_pb2.GrpsMessage(str_data=f"{path} {sent.str_data}")
                return codec["response_deserializer"](answer.SerializeToString())

            return call

        def unary_stream(self, path: str, **codec: Callable[[Any], Any]) -> Callable[[Any], Any]:
            once = self.unary_unary(path, **codec)
            return lambda request: iter([once(request)])

    code = "\nfrom grps_framework.apis.grps_pb2_grpc import GrpsServiceStub\n"
    with opened(write_project(tmp_path, ECHO + code)):
        stub = own_module().GrpsServiceStub(Loopback())
        message = own_module().GrpsMessage(str_data="x")
        assert stub.Predict(message).str_data == "/grps.protos.v1.GrpsService/Predict x"
        assert [each.str_data for each in stub.PredictStreaming(message)] == [
            "/grps.protos.v1.GrpsService/PredictStreaming x"
        ]
        assert stub.ModelMetadata(message).str_data.endswith("ModelMetadata x")
