"""`triglot tfserving` and `triglot grps` with several workers: lists of models, and projects."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.process import SECONDS, Triglot, write_model
from tests.protocol_clients.channel import rpc
from tests.protocol_clients.kserve import infer
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until
from tests.workers.shared_ports import WHO, Workers, ready
from triglot.pb.tfserving import management_pb2, model_server_config_pb2

ENVIRONMENT = {
    "TRIGLOT_HOST": "127.0.0.1",
    "TRIGLOT_GRPC_PORT": "0",
    "TRIGLOT_REST_PORT": "0",
    "TRIGLOT_DRAIN_DELAY": "0",
    "TRIGLOT_WORKERS": "2",
    "TRIGLOT_LOAD_RETRIES": "0",
    "TRIGLOT_ALLOWED_MODEL_ROOTS": "/",
}


class Lists(Workers):
    """`triglot tfserving ARGUMENTS` with two workers, which KServe's clients may call, too."""

    def __init__(self, *arguments: str | Path) -> None:
        self.count = 2
        protocols = {"TRIGLOT_PROTOCOLS": "kserve,tfserving"}
        Triglot.__init__(self, *arguments, command="tfserving", environment=ENVIRONMENT | protocols)


def reload(channel: grpc.Channel, **models: Path) -> Any:
    request = management_pb2.ReloadConfigRequest()
    for name, folder in models.items():
        config = model_server_config_pb2.ModelConfig(name=name, base_path=str(folder), model_platform="tensorflow")
        request.config.model_config_list.config.append(config)
    method = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
    return rpc(channel, method, management_pb2.ReloadConfigResponse)(request, timeout=SECONDS)


def test_list_of_models_is_replaced_in_every_worker_and_later_ones(tmp_path: Path) -> None:
    who, old, new = (tmp_path / name for name in ("who", "old", "new"))
    write_model(who / "1", WHO)
    write_model(old / "1")
    write_model(new / "1")
    file = tmp_path / "models.config"
    file.write_text(
        "model_config_list { "
        + "".join(
            f"config {{ name: '{folder.name}' base_path: '{folder}' model_platform: 'tensorflow' }} "
            for folder in (who, old)
        )
        + "}"
    )

    def names(channel: grpc.Channel) -> list[bool]:
        return [ready(channel, name) for name in ("who", "old", "new")]

    with Lists("--model_config_file", file) as workers:
        assert workers.on_each(names) == [[True, True, False]] * 2
        with workers.at(workers.pids()[1]) as channel:
            reload(channel, who=who, new=new)
        assert workers.on_each(names) == [[True, False, True]] * 2
        # What the file still names is not there any more.
        (old / "1" / "model.py").unlink()
        (old / "1").rmdir()
        old.rmdir()
        os.kill(workers.pids()[0], signal.SIGKILL)
        workers.wait_for_serving(3)
        assert workers.on_each(names) == [[True, False, True]] * 2
        workers.stop()


def test_a_list_with_a_model_that_cannot_be_loaded_counts_all_the_same(tmp_path: Path) -> None:
    who, bad = tmp_path / "who", tmp_path / "bad"
    write_model(who / "1", WHO)
    write_model(bad / "1", "import nothing_of_that_name\n")
    with Lists("--model_name", "who", "--model_base_path", who) as workers:
        with workers.at(workers.pids()[0]) as channel, pytest.raises(grpc.RpcError) as caught:
            reload(channel, who=who, bad=bad)
        assert caught.value.code() is grpc.StatusCode.UNKNOWN
        assert "1 model(s) did not become available" in caught.value.details()

        def statuses(_: grpc.Channel) -> int:
            return workers.rest.get("/v1/models/bad")[0]

        assert workers.on_each(statuses) == [200, 200]
        os.kill(workers.pids()[1], signal.SIGKILL)
        workers.wait_for_serving(3)
        # It serves what can be loaded.
        assert len(workers.on_each(lambda channel: infer(channel, "who"))) == 2
        with workers.at(workers.pids()[1]) as channel, pytest.raises(grpc.RpcError) as caught:
            reload(channel, **{"a/b": bad})
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_each_worker_of_a_grps_project_has_logs_of_its_own(tmp_path: Path) -> None:
    project = Path(__file__).parents[1] / "grps_projects" / "toys"
    copy = tmp_path / "toys"
    for file in project.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts and "logs" not in file.parts:
            target = copy / file.relative_to(project)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    with Triglot(copy, "--online", command="grps", environment=ENVIRONMENT) as workers:
        for number in (1, 2):
            workers.stderr.wait_for(rf"worker {number} \(pid \d+\) serves")
        rest = Rest(workers.ports()[1])
        for _ in range(5):
            status, answer = rest.get("/grps/v1/health/ready")
            assert status == 200, answer
        logs = copy / "logs"
        for name in ("grps_monitor.log", "grps_monitor-worker2.log"):
            wait_until((logs / name).exists)
        workers.stop()
    for number, name in ((1, "grps_server.log"), (2, "grps_server-worker2.log")):
        text = (logs / name).read_text()
        assert "gRPC on 127.0.0.1" in text, f"worker {number}"
