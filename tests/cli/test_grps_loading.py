"""How `triglot grps` loads a project: on the main thread, once, in order, and what it says when it fails."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

from tests.cli.test_grps_start import ANY_PORTS, predict
from tests.process import Triglot, run_triglot
from tests.text_project import INFERER, inference, write_project

DEMANDING = """
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.model_infer.inferer import ModelInferer, inferer_register
from src.work import version_of

class Reader(ModelInferer):
    def init(self, path, device=None, args=None):
        super().init(path, device, args)

    def load(self):
        assert threading.current_thread() is threading.main_thread()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            self._text = pool.submit(version_of, 0).result()
        return True

    def infer(self, inp, context):
        return GrpsMessage(str_data=self._text)

inferer_register.register("reader", Reader())
"""
WORK = """
from grps_framework.conf.conf import global_conf
from grps_framework.logger.logger import logger

def version_of(index):
    logger.info("in a process of its own")
    return global_conf.inference_conf["models"][index]["version"]
"""
FAILING = INFERER.replace("return True", "return not_there")


def test_a_project_that_needs_the_main_thread_and_processes_of_its_own(tmp_path: Path) -> None:
    write_project(tmp_path, models=inference(("reader", "1.10")))
    (tmp_path / "src" / "customized_inferer.py").write_text(DEMANDING)
    (tmp_path / "src" / "work.py").write_text(WORK)
    with Triglot(tmp_path, command="grps", environment=ANY_PORTS) as server:
        assert predict(server, "")["str_data"] == "1.10"


def test_failed_model_is_logged_once_with_its_line(tmp_path: Path) -> None:
    write_project(tmp_path)
    (tmp_path / "src" / "customized_inferer.py").write_text(FAILING)
    completed = run_triglot("grps", tmp_path, environment=ANY_PORTS)
    assert completed.returncode == 1
    line = FAILING.split("\n").index("        return not_there") + 1
    assert f'customized_inferer.py", line {line}, in load' in completed.stderr
    assert completed.stderr.count("NameError: name 'not_there' is not defined") == 2
    log = (tmp_path / "logs" / "grps_server.log").read_text()
    assert len(re.findall(r" CRITICAL\] ", log)) == 1
    assert f"line {line}, in load" in log


def test_models_are_loaded_in_the_order_of_the_file(tmp_path: Path) -> None:
    write_project(tmp_path, models=inference(("reader", "2.0.0"), ("reader", "1.0.0")))
    with Triglot(tmp_path, command="grps", environment=ANY_PORTS) as server:
        assert predict(server, "")["str_data"] == "text"
        server.stop()
    log = (tmp_path / "logs" / "grps_server.log").read_text()
    assert log.count("read 4 characters") == 2
    assert re.search(r"reader +1\.0\.0 +grps .* READY", log)
    assert f"logs are written to {tmp_path}/logs" in log
    assert "health: not ready until Online is called" in log


def test_serve_knows_a_project_when_it_sees_one(tmp_path: Path) -> None:
    write_project(tmp_path)
    completed = run_triglot("serve", tmp_path)
    assert (completed.returncode, completed.stderr.splitlines()[-1]) == (
        1,
        f"triglot: {tmp_path}: this is a grps project; to serve it, run: triglot grps {tmp_path}",
    )


def test_a_test_that_does_not_exist(tmp_path: Path) -> None:
    write_project(tmp_path)
    (tmp_path / "test.py").unlink()
    completed = run_triglot("grps", tmp_path, "--unittest")
    assert completed.returncode == 1
    assert f"{tmp_path}: test.py not found; expected the project's tests in it" in completed.stderr


def test_the_log_of_an_archive_that_cannot_be_loaded_stays(tmp_path: Path) -> None:
    write_project(tmp_path / "project", models="models: []\ndag: {}\n")
    with tarfile.open(tmp_path / "server.mar", "w:gz") as archive:
        archive.add(tmp_path / "project", ".")
    before = f"import os; os.chdir({str(tmp_path)!r})"
    completed = run_triglot("grps", tmp_path / "server.mar", before=before, environment=ANY_PORTS)
    assert completed.returncode == 1
    assert " CRITICAL] " in (tmp_path / "logs" / "grps_server.log").read_text()
