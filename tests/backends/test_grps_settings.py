"""conf/server.yml and conf/inference.yml of a grps project: what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.backends.grps_conf import ABSENT, GPU, INFERENCE, SERVER, project, with_model, with_server
from triglot.backends.grps.server_settings import CustomHttp, GpuSettings
from triglot.backends.grps.settings import Batching, DagEntry, read_project


def test_the_usual_files(tmp_path: Path) -> None:
    read = project(tmp_path)
    server, (model,) = read.server, read.models
    assert read.folder == tmp_path
    assert (server.framework, server.host, server.http_port, server.grpc_port) == (
        "http+grpc",
        "0.0.0.0",
        7080,
        7081,
    )
    assert (server.max_connections, server.max_concurrency) == (1000, 32)
    assert (server.custom_http, server.gpu) == (None, None)
    assert (server.log_dir, server.log_backup_count) == ("./logs", 7)
    assert (model.name, model.version, model.id, model.device) == (
        "your_model",
        "1.0.0",
        "your_model-1.0.0",
        "cpu",
    )
    assert (model.inferer_type, model.inferer_name, model.inferer_path) == ("customized", "your_inferer", None)
    assert (model.converter_type, model.converter_name, model.converter_path) == (
        "customized",
        "your_converter",
        None,
    )
    assert (model.batching, model.inferer_args, model.converter_args) == (None, None, None)
    assert read.dag == DagEntry("your_dag", (("node-1", "your_model-1.0.0"),))
    assert (read.server_text, read.inference_text) == (SERVER, INFERENCE)
    assert read.server_conf == yaml.safe_load(SERVER)
    assert read.inference_conf == yaml.safe_load(INFERENCE)
    assert read.inference_conf["models"][0] is model.entry
    assert read.warnings == ()
    assert read.model("your_model-1.0.0") is model
    with pytest.raises(KeyError):
        read.model("your_model")


def test_brpc_of_the_cpp_server_is_grpc_here(tmp_path: Path) -> None:
    read = project(tmp_path, SERVER.replace("http+grpc", "http+brpc"))
    assert (read.server.framework, read.server.http_port, read.server.grpc_port) == ("http+grpc", 7080, 7081)
    (warning,) = read.warnings
    assert warning == (
        f"{tmp_path}/conf/server.yml: interface.framework: http+brpc is treated as http+grpc: the second port "
        "serves gRPC; GrpsBrpcService clients and brpc's own protocols and pages are not supported"
    )


def test_other_files_in_their_place(tmp_path: Path) -> None:
    project(tmp_path)
    other = tmp_path / "other.yml"
    other.write_text(SERVER.replace("7080", "8010"))
    assert read_project(tmp_path, server_conf=other).server.http_port == 8010
    other.write_text(INFERENCE.replace("your_dag", "other_dag"))
    assert read_project(tmp_path, inference_conf=other).dag.name == "other_dag"


@pytest.mark.parametrize("text", ["1.0", "1.10", "1", "1e3", "0x10", "no", "2024-01-01", "1_000", "true", "0.0"])
def test_versions_and_names_are_text(tmp_path: Path, text: str) -> None:
    inference = INFERENCE.replace("1.0.0", text).replace("name: your_model", f"name: {text}")
    read = project(tmp_path, inference=inference.replace(f"model: your_model-{text}", f"model: {text}-{text}"))
    (model,) = read.models
    assert (model.name, model.version, model.id) == (text, text, f"{text}-{text}")
    assert model.entry["version"] == text
    assert read.dag.nodes == (("node-1", f"{text}-{text}"),)


def test_text_stands_in_merged_maps_too(tmp_path: Path) -> None:
    base = (
        "base: &base {device: cpu, inferer_type: customized, inferer_name: i, converter_type: none, version: 1.10}"
    )
    inference = f"{base}\nmodels:\n- {{<<: *base, name: a}}\n- {{<<: *base, name: b, version: 2.0}}\n"
    dag = "dag: {type: sequential, name: d, nodes: [{name: n, type: model, model: a-1.10}]}"
    assert [model.id for model in project(tmp_path, inference=inference + dag).models] == ["a-1.10", "b-2.0"]


def test_arguments_keep_their_types(tmp_path: Path) -> None:
    arguments = {"streams": 2, "rate": 1.5, "version": 1.0, "on": True, "paths": ["a"]}
    (model,) = with_model(tmp_path, inferer_args=arguments).models
    assert model.inferer_args == arguments
    assert model.converter_args == {}


@pytest.mark.parametrize("port", ["8010", "'8010'", "' 8010 '"])
def test_http_alone(tmp_path: Path, port: str) -> None:
    server = SERVER.replace("http+grpc", "http").replace("7080,7081", port)
    assert project(tmp_path, server).server.http_port == 8010
    assert project(tmp_path, server).server.grpc_port is None


def test_spaces_between_ports(tmp_path: Path) -> None:
    server = project(tmp_path, SERVER.replace("7080,7081", "7080 , 7081")).server
    assert (server.http_port, server.grpc_port) == (7080, 7081)


def test_custom_http(tmp_path: Path) -> None:
    way = "interface.customized_predict_http"
    assert with_server(tmp_path, way, None).server.custom_http is None
    custom = {"path": "/v1/chat/completions"}
    defaults = CustomHttp("/v1/chat/completions", False, "query_param", "streaming", "application/octet-stream")
    assert with_server(tmp_path, way, custom).server.custom_http == defaults
    empty = {"ctrl_mode": None, "ctrl_key": None, "res_content_type": None}
    assert with_server(tmp_path, way, custom | {"streaming_ctrl": empty}).server.custom_http == defaults
    control = {"ctrl_mode": "body_param", "ctrl_key": "stream", "res_content_type": "text/event-stream"}
    full = custom | {"customized_body": True, "streaming_ctrl": control}
    assert with_server(tmp_path, way, full).server.custom_http == CustomHttp(
        "/v1/chat/completions", True, "body_param", "stream", "text/event-stream"
    )


def test_gpu(tmp_path: Path) -> None:
    def gpu(**values: object) -> GpuSettings | None:
        return with_server(tmp_path, "gpu", GPU | values).server.gpu

    assert gpu() == GpuSettings((0,), "torch", 1024, 60)
    assert gpu(devices=[1, 0, 1], mem_limit_mib=-1) == GpuSettings((1, 0), "torch", None, 60)
    assert gpu(mem_gc_enable=False, mem_gc_interval=None) == GpuSettings((0,), "torch", 1024, None)
    none = {"devices": [0], "mem_manager_type": "none"}
    assert with_server(tmp_path, "gpu", none).server.gpu == GpuSettings((0,), "none")


def test_the_number_of_old_logs_has_a_default(tmp_path: Path) -> None:
    assert with_server(tmp_path, "log.log_backup_count", ABSENT).server.log_backup_count == 7


def test_batching(tmp_path: Path) -> None:
    batching = {"type": "dynamic", "max_batch_size": 4, "batch_timeout_us": 50000}
    assert with_model(tmp_path, batching=batching).models[0].batching == Batching(4, 50000)
    assert with_model(tmp_path, batching=batching | {"type": "none"}).models[0].batching is None
    assert with_model(tmp_path, batching=None).models[0].batching is None


@pytest.mark.parametrize(
    ("values", "device"),
    [
        ({"inferer_type": "customized", "device": "Auto"}, "auto"),
        ({"inferer_type": "customized", "device": "original"}, "original"),
        ({"inferer_type": "tensorflow", "device": "GPU:1"}, "gpu:1"),
        ({"inferer_type": "tensorflow", "device": "original"}, "original"),
        ({"inferer_type": "torch", "device": "Original", "inp_device": "CUDA:0"}, "original_cuda:0"),
        ({"inferer_type": "torch", "device": "cpu", "inp_device": None}, "cpu"),
    ],
)
def test_devices(tmp_path: Path, values: dict[str, object], device: str) -> None:
    (model,) = with_model(tmp_path, inferer_path="data/model", **values).models
    assert model.device == device


def test_further_keys_are_left_out(tmp_path: Path) -> None:
    read = with_server(tmp_path, "interface.timeout", 5)
    assert read.warnings == ()
    assert read.server_conf["interface"]["timeout"] == 5


def test_misspelt_key_is_warned_of(tmp_path: Path) -> None:
    read = with_model(tmp_path, batchng={"type": "dynamic"})
    assert read.warnings == (
        f"{tmp_path}/conf/inference.yml: models[0].batchng: unknown key, ignored; did you mean 'batching'?",
    )


def test_an_alias_that_leads_round_in_a_circle(tmp_path: Path) -> None:
    read = project(tmp_path, SERVER + "extra: &extra {again: *extra}\n")
    assert read.server_conf["extra"]["again"] is read.server_conf["extra"]
