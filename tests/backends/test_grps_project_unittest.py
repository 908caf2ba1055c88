"""A project's own test class, run as `grpst archive` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.backends.grps_folders import entry, write_project
from triglot.backends.grps.unit_test import run_unittest
from triglot.core.errors import ModelLoadError

ECHO = """
class Echo(Base):
    def infer(self, inp, context):
        request = context.get_http_request()
        if request is not None:
            context.set_http_response(str(request.get_json()["a"]))
            return None
        if inp.str_data == "raise":
            raise ValueError("boom")
        if inp.str_data == "err":
            context.set_err_msg("my error")
        with open(self._path) as file:
            return GrpsMessage(str_data=inp.str_data + file.read())

    def batch_infer(self, inps, contexts):
        return [GrpsMessage(str_data=f"{inp.str_data}@{len(inps)}") for inp in inps]


inferer_register.register("inferer", Echo())
"""
TEST = """
import unittest

import flask
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.conf.conf import global_conf
from grps_framework.context.context import GrpsContext
from grps_framework.executor.executor import Executor
from grps_framework.test import GrpsTest
from src.customized_inferer import inferer_register


class MyTestCase(GrpsTest):
    def test_infer(self):
        self.assertGreater(len(inferer_register.model_inferer_dict), 0)
        self.test_init()
        context = GrpsContext()
        self.assertEqual(self.executor.infer(GrpsMessage(str_data="a"), context).str_data, "a from the file")
        self.assertFalse(context.has_err())
        self.assertEqual(self.executor.infer(GrpsMessage(str_data="a"), context, "b-1.0.0").str_data, "a@1")
        with self.assertRaisesRegex(RuntimeError, "Model c-1.0.0 not found."):
            self.executor.infer(GrpsMessage(), context, "c-1.0.0")
        with self.assertRaises(ValueError):
            self.executor.infer(GrpsMessage(str_data="raise"), context)
        self.assertIsNone(Executor().infer(GrpsMessage(str_data="err"), context, ""))
        self.assertEqual(context.get_err_msg(), "my error")

    def test_http(self):
        self.test_init()
        request = flask.Request(environ={"REQUEST_METHOD": "POST"})
        request._cached_json = ({"a": 3}, {"a": 3})
        request.headers = {"Content-Type": "application/json"}
        context = GrpsContext(http_request=request)
        self.executor.infer(GrpsMessage(), context)
        self.assertEqual(context.get_http_response().data, b"3")
        self.assertEqual(context.get_http_response().status_code, 200)

    def test_wrong(self):
        self.assertEqual(global_conf.server_conf["max_concurrency"], 9)
"""
MODELS = [
    entry("a", inferer_path="data/suffix"),
    entry("b", batching={"type": "dynamic", "max_batch_size": 1, "batch_timeout_us": 1}),
]
FILES = {"test.py": TEST, "data/suffix": " from the file"}


def test_the_projects_own_test(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = write_project(tmp_path, ECHO, models=MODELS, files=FILES)
    here = Path.cwd()
    assert run_unittest(settings)
    assert "OK" in capfd.readouterr().err
    assert run_unittest(settings, "test.MyTestCase.test_http")
    assert not run_unittest(settings, "test.MyTestCase.test_wrong")
    assert "8 != 9" in capfd.readouterr().err
    assert not run_unittest(settings, "test")
    assert Path.cwd() == here
    assert "grps_framework" not in sys.modules
    assert "src" not in sys.modules


@pytest.mark.parametrize("name", ["test.MyTestCase.test_lost", "test.Lost", "test.nothing"])
def test_missing_test_class(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"test.py": "import unittest\nnothing = unittest.TestSuite\n"}
    settings = write_project(tmp_path, ECHO, models=MODELS, files=files)
    assert not run_unittest(settings, name)
    capfd.readouterr()


def test_missing_test_module(tmp_path: Path) -> None:
    """Python has a package `test` of its own, which is not meant."""
    settings = write_project(tmp_path, ECHO, models=MODELS)
    for name in ("lost", "test.MyTestCase.test_infer"):
        with pytest.raises(ModelLoadError, match=rf"{name.partition('.')[0]}\.py not found; expected"):
            run_unittest(settings, name)


def test_a_project_that_cannot_be_imported(tmp_path: Path) -> None:
    here = Path.cwd()
    settings = write_project(tmp_path, "import a_module_of_nobody", files=FILES)
    with pytest.raises(ModelLoadError, match="a_module_of_nobody"):
        run_unittest(settings)
    assert Path.cwd() == here
