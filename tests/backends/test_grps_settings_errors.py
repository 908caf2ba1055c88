"""conf/server.yml and conf/inference.yml of a grps project: what is said of values that they cannot have."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.backends.grps_conf import ABSENT, DAG, GPU, MODEL, project, with_dag, with_model, with_server
from triglot.backends.grps.settings import read_project
from triglot.core.errors import ModelLoadError

# --- what is wrong with server.yml ---


@pytest.mark.parametrize(
    ("way", "value", "text"),
    [
        ("interface", ABSENT, "interface: expected a map with framework, host, port, "),
        (
            "interface",
            "http",
            "interface: expected a map with framework, ",
        ),
        ("interface.framework", ABSENT, "interface.framework: expected http or http+grpc, got nothing"),
        ("interface.framework", "grpc", "interface.framework: expected http or http+grpc, got 'grpc'"),
        ("interface.host", "localhost", "interface.host: expected an IPv4 address, got 'localhost'"),
        ("interface.host", "1.2.3.456", "interface.host: expected an IPv4 address, got '1.2.3.456'"),
        ("interface.host", None, "interface.host: expected an IPv4 address, got nothing"),
        (
            "interface.port",
            ABSENT,
            "interface.port: expected two ports, such as 7080,7081, for framework",
        ),
        ("interface.port", 7080, "expected two ports, such as 7080,7081, for framework http+grpc, got 7080"),
        ("interface.port", "7080,7080", "expected two different ports, got '7080,7080'"),
        (
            "interface.port",
            "7080,x",
            "for framework http+grpc, got '7080,x'",
        ),
        ("interface.port", "7080,70000", "expected ports between 1 and 65535, got '7080,70000'"),
        ("interface.port", "0,7081", "expected ports between 1 and 65535"),
        ("interface.port", True, "got True"),
        ("max_connections", 0, "max_connections: expected an integer of at least 1, got 0"),
        ("max_connections", True, "max_connections: expected an integer of at least 1, got True"),
        ("max_connections", 1.5, "max_connections: expected an integer of at least 1, got 1.5"),
        ("max_concurrency", "many", "max_concurrency: expected an integer of at least 1, got 'many'"),
        ("max_concurrency", 1001, "max_concurrency: expected at most max_connections, 1000, got 1001"),
        ("log", None, "log: expected a map with log_dir, log_backup_count, got nothing"),
        ("log.log_dir", "", "log.log_dir: expected a folder, got ''"),
        ("log.log_dir", "conf/server.yml", "log.log_dir: expected a folder, got a file, "),
        ("log.log_backup_count", 0, "log.log_backup_count: expected an integer of at least 1, got 0"),
        ("gpu", [], "gpu: expected a map with devices, "),
        ("gpu", GPU | {"devices": []}, "gpu.devices: expected a list of integers, such as [0], got []"),
        ("gpu", GPU | {"devices": ["0"]}, "gpu.devices: expected a list of integers, such as [0], got ['0']"),
        ("gpu", GPU | {"devices": [True]}, "gpu.devices: expected a list of integers, such as [0], got [True]"),
        ("gpu", GPU | {"devices": [-1]}, "gpu.devices: expected integers of at least 0, got [-1]"),
        ("gpu", GPU | {"mem_manager_type": "jax"}, "expected torch, tensorflow or none, got 'jax'"),
        (
            "gpu",
            GPU | {"mem_limit_mib": 0},
            "mem_limit_mib: expected at least 1 MiB, or -1 for no limit, got 0",
        ),
        ("gpu", GPU | {"mem_limit_mib": None}, "expected at least 1 MiB, or -1 for no limit, got nothing"),
        ("gpu", GPU | {"mem_gc_enable": 1}, "gpu.mem_gc_enable: expected true or false, got 1"),
        ("gpu", GPU | {"mem_gc_interval": 0}, "gpu.mem_gc_interval: expected an integer of at least 1, got 0"),
    ],
)
def test_wrong_server_files(tmp_path: Path, way: str, value: object, text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        with_server(tmp_path, way, value)
    assert str(caught.value).startswith(f"{tmp_path}/conf/server.yml: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (None, ", such as /predict, got nothing"),
        ("", ", such as /predict, got ''"),
        ("predict", " of '/' and letters, digits, '_', '-' and '/', got 'predict'"),
        ("/predict?x=1", " of '/' and letters"),
        ("/predict\n", " of '/' and letters"),
        ("/", " of '/' and letters"),
        ("/grps/v1/infer/predict", " that is not reserved by grps, got '/grps/v1/infer/predict'"),
        ("/grps/v1/health/online", " that is not reserved by grps"),
        ("/grps/v1/monitor/series", " that is not reserved by grps"),
        ("/grps/v1/js/flot_min", " that is not reserved by grps"),
        ("/grps/v1/metadata/model", " that is not reserved by grps"),
    ],
)
def test_wrong_custom_paths(tmp_path: Path, path: str | None, text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        with_server(tmp_path, "interface.customized_predict_http", {"path": path})
    assert f"interface.customized_predict_http.path: expected a path{text}" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"customized_body": "yes"}, "customized_body: expected true or false, got 'yes'"),
        ({"streaming_ctrl": "x"}, "streaming_ctrl: expected a map with ctrl_mode, ctrl_key, res_content_type"),
        (
            {"streaming_ctrl": {"ctrl_mode": "cookie"}},
            "streaming_ctrl.ctrl_mode: expected query_param, header_param or body_param, got 'cookie'",
        ),
    ],
)
def test_wrong_custom_http(tmp_path: Path, values: dict[str, object], text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        with_server(tmp_path, "interface.customized_predict_http", {"path": "/x"} | values)
    assert f"interface.customized_predict_http.{text}" in str(caught.value)


# --- what is wrong with inference.yml ---


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"name": ABSENT}, "models[0].name: expected a non-empty string, got nothing"),
        ({"name": []}, "models[0].name: expected a non-empty string, got []"),
        ({"version": None}, "models[0].version: expected a non-empty string, got nothing"),
        ({"device": ABSENT}, "models[0].device: expected a device, such as cpu, got nothing"),
        (
            {"inferer_type": "tensorrt"},
            "models[0].inferer_type: expected torch, tensorflow or customized, got 'tensorrt'",
        ),
        ({"inferer_name": ABSENT}, "models[0].inferer_name: expected a non-empty string, got nothing"),
        ({"inferer_type": "torch"}, "models[0].inferer_path: expected a non-empty string, got nothing"),
        (
            {"inferer_type": "torch", "inferer_path": "p", "device": "auto"},
            "models[0].device: expected cpu, cuda, gpu, cuda:N, gpu:N or original, got 'auto'",
        ),
        (
            {"inferer_type": "torch", "inferer_path": "p", "device": "original"},
            "models[0].inp_device: expected the inputs' device, which device 'original' requires, got nothing",
        ),
        (
            {"inferer_type": "torch", "inferer_path": "p", "device": "original", "inp_device": "original"},
            "models[0].inp_device: expected cpu, cuda, gpu, cuda:N or gpu:N, got 'original'",
        ),
        ({"inferer_args": [1]}, "models[0].inferer_args: expected a map, got [1]"),
        (
            {"converter_type": "numpy"},
            "models[0].converter_type: expected torch, tensorflow, tensorrt, customized or none, got 'numpy'",
        ),
        ({"converter_type": "customized"}, "models[0].converter_name: expected a non-empty string, got nothing"),
        (
            {"batching": "dynamic"},
            "models[0].batching: expected a map with type, max_batch_size, ",
        ),
        ({"batching": {}}, "models[0].batching.type: expected none or dynamic, got nothing"),
        (
            {"batching": {"type": "none", "batch_timeout_us": 1}},
            "models[0].batching.max_batch_size: expected an integer of at least 1, got nothing",
        ),
        (
            {"batching": {"type": "dynamic", "max_batch_size": 1, "batch_timeout_us": 0}},
            "models[0].batching.batch_timeout_us: expected an integer of at least 1, got 0",
        ),
        (
            {"device": ABSENT, "devise": "cpu"},
            "models[0].device: expected a device, such as cpu, got nothing; did you mean 'device' by 'devise'?",
        ),
    ],
)
def test_wrong_models(tmp_path: Path, values: dict[str, object], text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        with_model(tmp_path, **values)
    assert str(caught.value).startswith(f"{tmp_path}/conf/inference.yml: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("way", "value", "text"),
    [
        ("type", "parallel", "dag.type: expected sequential, got 'parallel'"),
        ("name", None, "dag.name: expected a non-empty string, got nothing"),
        ("nodes", [], "dag.nodes: expected a list of maps with name, type, model, got []"),
        ("nodes", ["n"], "dag.nodes: expected a list of maps with name, type, model, got 'n' as item 0"),
        ("nodes.0.type", "function", "dag.nodes[0].type: expected model, got 'function'"),
        ("nodes.0.model", "m-2", "dag.nodes[0].model: expected m-1, got 'm-2'"),
        ("nodes.0.name", "", "dag.nodes[0].name: expected a non-empty string, got ''"),
    ],
)
def test_wrong_dags(tmp_path: Path, way: str, value: object, text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        with_dag(tmp_path, way, value)
    assert text in str(caught.value)


def test_ids_are_unique(tmp_path: Path) -> None:
    models = [MODEL, MODEL | {"version": "2"}, MODEL]
    with pytest.raises(ModelLoadError, match=r"models\[2\]\.version: expected a unique name and version"):
        project(tmp_path, inference=yaml.safe_dump({"models": models, "dag": DAG}))


@pytest.mark.parametrize("models", [None, [], {}, ["m"]])
def test_models_are_required(tmp_path: Path, models: object) -> None:
    with pytest.raises(ModelLoadError, match="models: expected a list of maps with name, version, "):
        project(tmp_path, inference=yaml.safe_dump({"models": models, "dag": DAG}))


# --- files that are none ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "/server.yml: expected a map, got nothing"),
        ("- 1", "/server.yml: expected a map, got [1]"),
        ("a: b: c", "/server.yml:1: not YAML: mapping values are not allowed here"),
        ("x: 1\ny: [1", "/server.yml:2: not YAML: expected ',' or ']'"),
        ("x: !!python/object:os.system {}", "/server.yml:1: not YAML: could not determine a constructor"),
        ("x: 2024-02-31", "/server.yml: not YAML: day is out of range for month"),
        ("x: \x07", "/server.yml: not YAML: unacceptable character"),
    ],
)
def test_files_that_are_not_yaml(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        project(tmp_path, text)
    assert expected in str(caught.value)


def test_files_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="expected the folder of a grps project, found none"):
        read_project(tmp_path / "none")
    with pytest.raises(ModelLoadError, match=r"conf/server\.yml: No such file or directory"):
        read_project(tmp_path)
    project(tmp_path)
    (tmp_path / "conf" / "inference.yml").write_bytes(b"x: \xff")
    with pytest.raises(ModelLoadError, match=r"inference\.yml: expected UTF-8, got something else at byte 3"):
        read_project(tmp_path)
