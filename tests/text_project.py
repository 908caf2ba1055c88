"""A small grps project whose responses have the text of one of its own files."""

from __future__ import annotations

from pathlib import Path

SERVER = """
interface: {framework: http+grpc, host: 127.0.0.1, port: "7080,7081"}
max_connections: 100
max_concurrency: 4
log: {log_dir: ./logs}
"""
MODEL = (
    "{name: %s, version: %s, device: cpu, inferer_type: customized, inferer_name: reader, converter_type: none}"
)
INFERER = '''
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.logger.logger import clogger, logger
from grps_framework.model_infer.inferer import ModelInferer, inferer_register

class Reader(ModelInferer):
    """Answers with a file that lies beside the project's code."""

    def init(self, path, device=None, args=None):
        super().init(path, device, args)

    def load(self):
        with open("./data/text.txt") as file:
            self._text = file.read()
        logger.info("read %d characters", len(self._text))
        return True

    def infer(self, inp, context):
        clogger.info("asked for %s", inp.str_data)
        return GrpsMessage(str_data=self._text + inp.str_data)

inferer_register.register("reader", Reader())
'''
TEST = """
import unittest
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.context.context import GrpsContext
from grps_framework.test import GrpsTest

class MyTestCase(GrpsTest):
    def test_infer(self):
        self.test_init()
        answer = self.executor.infer(GrpsMessage(str_data="!"), GrpsContext())
        self.assertEqual(answer.str_data, "text!")

    def test_wrong(self):
        self.fail("on purpose")
"""


def inference(*models: tuple[str, str], dag: str = "your_dag") -> str:
    """Return the text of an inference.yml with these models, given by name and version; the DAG runs the last."""
    listed = "".join(f"- {MODEL % model}\n" for model in models)
    nodes = f"[{{name: n, type: model, model: {models[-1][0]}-{models[-1][1]}}}]"
    return f"models:\n{listed}dag: {{type: sequential, name: {dag}, nodes: {nodes}}}\n"


def write_project(folder: Path, server: str = SERVER, models: str = inference(("reader", "1.0.0"))) -> Path:
    """Write the project into `folder`, which is returned."""
    files = {
        "conf/server.yml": server,
        "conf/inference.yml": models,
        "src/__init__.py": "",
        "src/customized_converter.py": "",
        "src/customized_inferer.py": INFERER,
        "data/text.txt": "text",
        "test.py": TEST,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
