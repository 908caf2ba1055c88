"""Model configurations that load requests bring."""

from __future__ import annotations

from pathlib import Path

import pytest
from reading_configs import meaning

from triglot.model.config import LATEST, InstanceGroup, ModelConfig, TensorConfig, VersionPolicy
from triglot.repository.config.model_config import config_of, parse_override


def test_the_configuration_of_a_load_request(tmp_path: Path) -> None:
    text = """{
        "backend": "onnxruntime", "maxBatchSize": 4, "version_policy": {"latest": {"num_versions": 2}},
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3, "-1"]}],
        "instance_group": [{"kind": "KIND_CPU", "count": "2"}],
        "parameters": {"a": {"string_value": "b"}}
    }"""
    warnings: list[str] = []
    config = config_of(parse_override(text, "m"), tmp_path, "the request", warnings)
    assert meaning(config) == ModelConfig(
        backend="onnx",
        version_policy=VersionPolicy(latest=2),
        max_batch_size=4,
        inputs=(TensorConfig("x", "FP32", (3, -1)),),
        instance_groups=(InstanceGroup("CPU", 2),),
        parameters={"a": "b"},
    )
    assert config.source == "the request"
    assert warnings == []


@pytest.mark.parametrize("text", ["{}", ' \r\n\t{ "name" : "m" } '])
def test_a_load_request_may_say_little(tmp_path: Path, text: str) -> None:
    assert meaning(config_of(parse_override(text, "m"), tmp_path, "", [])) == ModelConfig(version_policy=LATEST)
