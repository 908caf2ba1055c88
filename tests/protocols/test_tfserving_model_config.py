"""Configurations of TensorFlow Serving: what they say of models, and what is said of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triglot.core.errors import InvalidArgument
from triglot.model.config import ALL, LATEST, Recording, VersionPolicy
from triglot.parts import BACKENDS
from triglot.pb.tfserving import model_server_config_pb2 as pb
from triglot.protocols.tfserving.model_config import model_settings
from triglot.repository.config.model_config import parse_text
from triglot.repository.config.settings import NAME_RULE, ModelSettings, settings_fields, settings_of

FILE = """
# The models of the shop.
model_config_list: {
  config: {
    name: "half_plus_two"  # comments may stand here
    base_path: '/models/half_plus_two'
    model_platform: "tensorflow"
  },
  config {
    name: 'churn', base_path: "/models/"
                              "churn"
    model_platform: 'tensorflow';
    model_version_policy: { specific { versions: 42 versions: 43 versions: [7, 8] } }
    version_labels { key: "stable" value: 42 }
    version_labels: { key: 'canary', value: 43 }
    version_labels { key: 'next' value: 43 }
  }
  config { name: "a" base_path: "/a" model_platform: "tensorflow" model_version_policy { all {} } }
  config { name: "b" base_path: "/b" model_type: TENSORFLOW model_version_policy { latest { num_versions: 3 } } }
}
"""


def settings(text: str) -> list[ModelSettings]:
    return model_settings(parse_text(text.encode(), "models.config", pb.ModelServerConfig))


def settings_of_model(text: str = "") -> ModelSettings:
    """The settings of one model, with more fields than the three that it needs."""
    (model,) = settings(
        f"model_config_list {{ config {{ name: 'm' base_path: '/m' model_platform: 'tensorflow' {text} }} }}"
    )
    return model


def wrong(text: str) -> str:
    with pytest.raises(InvalidArgument) as caught:
        settings(text)
    return caught.value.message


def recorded(collector: str, rate: str = "0.5") -> str:
    """A model with a logging_config."""
    config = f"log_collector_config {{ {collector} }} sampling_config {{ sampling_rate: {rate} }}"
    return f"config {{ {MODEL} logging_config {{ {config} }} }}"


@pytest.mark.parametrize("kind", ["", "type: ''", "type: 'file'"])
def test_how_requests_are_recorded(kind: str) -> None:
    (model,) = settings("model_config_list {" + recorded(f"{kind} filename_prefix: '/records/m'") + "}")
    assert model.recording == Recording("/records/m", 0.5)
    assert settings_of(json.loads(json.dumps(settings_fields(model)))) == model
    assert settings_of_model().recording is None
    assert settings_of(settings_fields(settings_of_model())) == settings_of_model()


def test_a_configuration_file() -> None:
    assert settings(FILE) == [
        ModelSettings("half_plus_two", Path("/models/half_plus_two"), LATEST, {}),
        ModelSettings(
            "churn",
            Path("/models/churn"),
            VersionPolicy(specific=frozenset((42, 43, 7, 8))),
            {"stable": 42, "canary": 43, "next": 43},
        ),
        ModelSettings("a", Path("/a"), ALL),
        ModelSettings("b", Path("/b"), VersionPolicy(latest=3)),
    ]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", LATEST),
        ("model_version_policy {}", LATEST),
        ("model_version_policy { latest {} }", LATEST),
        ("model_version_policy { latest { num_versions: 0 } }", LATEST),
        ("model_version_policy { latest { num_versions: 2 } }", VersionPolicy(latest=2)),
        ("model_version_policy: { all: {} }", ALL),
        ("model_version_policy { specific {} }", VersionPolicy(specific=frozenset())),
        ("model_version_policy { specific { versions: 0x10 } }", VersionPolicy(specific=frozenset((16,)))),
    ],
)
def test_version_policies(text: str, policy: VersionPolicy) -> None:
    assert settings_of_model(text).policy == policy


def test_an_empty_list_wants_no_models() -> None:
    assert settings("model_config_list {}") == []


@pytest.mark.parametrize("platform", sorted({"tensorflow", *BACKENDS} - {"ensemble"}))
def test_platforms(platform: str) -> None:
    config = pb.ModelServerConfig()
    config.model_config_list.config.add(name="m", base_path="/m", model_platform=platform)
    assert model_settings(config) == [ModelSettings("m", Path("/m"))]


@pytest.mark.parametrize(
    ("base_path", "folder"),
    [("/m/", "/m"), ("file:///m", "/m"), ("/a b/ü", "/a b/ü"), ("/a/../m", "/a/../m")],
)
def test_base_paths(base_path: str, folder: str) -> None:
    config = pb.ModelServerConfig()
    config.model_config_list.config.add(name="m", base_path=base_path, model_platform="tensorflow")
    assert model_settings(config)[0].base_path == Path(folder)


MODEL = "name: 'm' base_path: '/m' model_platform: 'tensorflow'"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (
            f"config {{ {MODEL} }} config {{ {MODEL} }}",
            "Illegal to list model m multiple times in config list",
        ),
        (
            "config { name: 'm' base_path: 'rel/path' model_platform: 'tensorflow' }",
            "Expected model m to have an absolute path or URI; got base_path()=rel/path",
        ),
        (
            "config { name: 'm' model_platform: 'tensorflow' }",
            "Expected model m to have an absolute path or URI; got base_path()=",
        ),
        (
            "config { name: 'm' base_path: 'hdfs://host/m' model_platform: 'tensorflow' }",
            "Expected model m to be in a local folder, or at a URL with s3://, gs://, az://, hf://, https://; "
            "got base_path()=hdfs://host/m",
        ),
        ("config { base_path: '/m' model_platform: 'tensorflow' }", f"model name '': {NAME_RULE}"),
        (
            "config { name: 'm' base_path: '/m' }",
            "Illegal setting neither ModelServerConfig::model_type (deprecated) nor "
            "ModelServerConfig::model_platform, model name is m",
        ),
        (
            f"config {{ {MODEL} model_type: TENSORFLOW }}",
            "Illegal setting both ModelServerConfig::model_type (deprecated) and "
            "ModelServerConfig::model_platform, model name is m",
        ),
        (
            "config { name: 'm' base_path: '/m' model_type: OTHER }",
            "ModelServerConfig::model_type choice 2 not supported, model name is m",
        ),
        (
            "config { name: 'm' base_path: '/m' model_platform: 'tensorfow' }",
            "Model m requests unsupported platform tensorfow",
        ),
        (
            f"config {{ {MODEL} logging_config {{}} }}",
            "model m: logging_config: expected a filename_prefix like /records/m, got ''",
        ),
        (
            recorded("filename_prefix: 'records/m'"),
            "model m: logging_config: expected a filename_prefix like /records/m, got 'records/m'",
        ),
        (
            recorded("filename_prefix: '/records/'"),
            "model m: logging_config: expected a filename_prefix like /records/m, got '/records/'",
        ),
        (
            recorded("type: 'kafka' filename_prefix: '/records/m'"),
            "Cannot find LogCollector::Factory for type: kafka; model m: logging_config: expected '' or 'file'",
        ),
        (
            recorded("filename_prefix: '/records/m'", "1.5"),
            "model m: logging_config: expected a sampling_rate from 0 to 1, got 1.5",
        ),
        (
            f"config {{ {MODEL} logging_config {{ custom_logging_config {{}} }} }}",
            "model m: logging_config: custom_logging_config is not supported, expected log_collector_config",
        ),
    ],
)
def test_wrong_models(models: str, message: str) -> None:
    assert wrong(f"model_config_list {{ {models} }}") == message


@pytest.mark.parametrize("text", ["", "custom_model_config {}"])
def test_only_a_list_of_models_is_a_configuration(text: str) -> None:
    assert wrong(text) == (
        "ServerModelConfig type not supported by HandleReloadConfigRequest. "
        "Only ModelConfigList is currently supported"
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("model_config_list {\n  config { nam: 'm' }\n}", "2:12 : "),
        ("model_config_list {\n  config { name: m }\n}", "2:18 : "),
        ("model_config_list {\n  config {\n", "2:10 : "),
        ("model_config_list {}\nmodel_config_list {}", "2:"),
        ("model_config_list { config { name: 'm\n' } }", "1:36 : "),
        ("{}", "1:1 : "),
        ('{"model_config_list": {}}', "1:1 : "),
    ],
)
def test_a_text_that_is_no_configuration(text: str, place: str) -> None:
    message = wrong(text)
    assert message.startswith(f"Invalid protobuf file: 'models.config': {place}"), message
    assert len(message.splitlines()) == 1


def test_a_text_that_is_not_utf_8() -> None:
    with pytest.raises(InvalidArgument, match=r"^Invalid protobuf file: 'models.config': .*0xe9 in position 1"):
        parse_text(b"#\xe9", "models.config", pb.ModelServerConfig)


@pytest.mark.parametrize(
    ("models", "text"),
    [
        (
            "config { name: 'm' base_path: 'a' } config { name: 'm' base_path: 'b' }",
            "Illegal to list model m multiple",
        ),
        (
            "config { name: 'm' base_path: '/a' } config { name: 'n' base_path: 'b' }",
            "Expected model n to have an abs",
        ),
        ("config { name: 'm' base_path: '/a' }", "Illegal setting neither ModelServerConfig::model_type"),
    ],
)
def test_names_come_first_then_paths_then_platforms(models: str, text: str) -> None:
    assert wrong(f"model_config_list {{ {models} }}").startswith(text)


@pytest.mark.parametrize("platform", ["sklearn", "other"])
def test_a_platform_that_changes(platform: str) -> None:
    config = parse_text(
        f"model_config_list {{ config {{ name: 'm' base_path: '/m' model_platform: '{platform}' }} }}".encode(),
        "models.config",
        pb.ModelServerConfig,
    )
    with pytest.raises(InvalidArgument) as caught:
        model_settings(config, {"m": "tensorflow"})
    assert caught.value.message == (
        "Illegal to change a model's platform. For model m platform was tensorflow and new platform requested is "
        f"{platform}"
    )
