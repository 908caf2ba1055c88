"""Checks of GetModelMetadata, GetModelStatus and HandleReloadConfigRequest with TensorFlow Serving's client."""

import asyncio
import shutil
import tempfile
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    predict_pb2,
    session_service_pb2,
)
from tensorflow_serving.config import logging_config_pb2, model_server_config_pb2
from tfs_subject import SECONDS, Code, answer_of, call, failure, predict_request, refused, start

SIGNATURE_DEF = "signature_def"
AVAILABLE = ("AVAILABLE", 0, "")
END_STATUS = ("END", 0, "")
STEPS = 50_000
"""Of the slow model: a third of a second, or so."""

# --- what a server says of its models ---


def saved_signatures(version):
    """What stands in a SavedModel."""
    saved = saved_model_pb2.SavedModel.FromString((version / "saved_model.pb").read_bytes())
    (graph,) = [graph for graph in saved.meta_graphs if list(graph.meta_info_def.tags) == ["serve"]]
    return dict(graph.signature_def)


async def check_metadata_of_every_model(subject):
    folders = [folder for folder in sorted(subject.folder.iterdir()) if not folder.name.startswith("warm_")]
    assert len(folders) > 20
    for folder in folders:
        response = await subject.metadata(folder.name, SIGNATURE_DEF)
        (version,) = folder.iterdir()
        spec = response.model_spec
        assert (spec.name, spec.version.value, spec.signature_name) == (folder.name, int(version.name), "")
        assert list(response.metadata) == [SIGNATURE_DEF]
        definitions = get_model_metadata_pb2.SignatureDefMap()
        assert response.metadata[SIGNATURE_DEF].Unpack(definitions), response.metadata
        assert dict(definitions.signature_def) == saved_signatures(version), folder.name


async def check_metadata_of_versions(subject):
    for version, number in ((None, 2), (1, 1), ("stable", 1), ("canary", 2)):
        response = await subject.metadata(("versions", version), SIGNATURE_DEF)
        assert response.model_spec.version.value == number


async def check_what_metadata_refuses(subject):
    field = "GetModelMetadataRequest must specify at least one metadata_field"
    for asked, code, text in (
        (subject.metadata("half_plus_two"), Code.INVALID_ARGUMENT, field),
        (
            subject.metadata("half_plus_two", SIGNATURE_DEF, "graph"),
            Code.INVALID_ARGUMENT,
            "Metadata field graph is not supported",
        ),
        (
            subject.metadata("absent", SIGNATURE_DEF),
            Code.NOT_FOUND,
            "Servable not found for request: Latest(absent)",
        ),
        (
            subject.metadata(("versions", "best"), SIGNATURE_DEF),
            Code.INVALID_ARGUMENT,
            "Unrecognized servable version label: best",
        ),
    ):
        await refused(asked, code, text)
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=[SIGNATURE_DEF])
    await refused(call(subject.predictions.GetModelMetadata, request), Code.INVALID_ARGUMENT, "Missing ModelSpec")


async def check_status(subject):
    assert await subject.status("half_plus_two") == [(123, *AVAILABLE)]
    assert await subject.status("versions") == [(2, *AVAILABLE), (1, *AVAILABLE)]
    assert await subject.status(("versions", 1)) == [(1, *AVAILABLE)]
    # A label narrows nothing.
    assert await subject.status(("versions", "stable")) == [(2, *AVAILABLE), (1, *AVAILABLE)]
    for model, text in (
        ("absent", "Could not find any versions of model absent"),
        ("", "Could not find any versions of model "),
        (("versions", 7), "Could not find version 7 of model versions"),
    ):
        await refused(subject.status(model), Code.NOT_FOUND, text)
    await refused(
        call(subject.models.GetModelStatus, get_model_status_pb2.GetModelStatusRequest()),
        Code.INVALID_ARGUMENT,
        "Missing ModelSpec",
    )


async def check_calls_that_no_public_server_has(subject):
    """The package has their messages, and no stubs."""
    for path, request_class in (
        ("SessionService/SessionRun", session_service_pb2.SessionRunRequest),
        ("PredictionService/PredictStreamed", predict_pb2.PredictRequest),
    ):
        run = subject.channel.unary_unary(
            f"/tensorflow.serving.{path}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=bytes,
        )
        code, _ = await failure(call(run, request_class(model_spec={"name": "half_plus_two"})))
        assert code is Code.UNIMPLEMENTED, path


# --- other models while the server runs ---


def model_config(name, base_path, *versions, labels=None, **fields):
    config = model_server_config_pb2.ModelConfig(
        name=name,
        base_path=str(base_path),
        version_labels=labels or {},
        **({"model_platform": "tensorflow"} | fields),
    )
    if versions:
        config.model_version_policy.specific.versions.extend(versions)
    return config


async def reload(stubs, *configs, **fields):
    request = model_management_pb2.ReloadConfigRequest(**fields)
    request.config.model_config_list.config.extend(configs)
    response = await call(stubs.models.HandleReloadConfigRequest, request)
    assert (response.status.error_code, response.status.error_message) == (0, "")
    return response


async def until(ask, expected):
    """Ask until the answer is the expected one; the answers before it."""
    answers = []
    async with asyncio.timeout(SECONDS):
        while (answer := await ask()) != expected:
            answers.append(answer)
            # For blocking stubs: so that the time limit has its turn.
            await asyncio.sleep(0)
    return answers


def y_of(stubs, model):
    return stubs.y(model, [1.0])


@asynccontextmanager
async def two_versions(subject):
    """A base path with versions 1 and 2: half_plus_two and half_plus_three; the other server has half_plus_two."""
    with tempfile.TemporaryDirectory() as folder:
        for number, name in ((1, "half_plus_two"), (2, "half_plus_three")):
            shutil.copytree(subject.folder / name / "00000123", Path(folder) / str(number))
        await reload(subject.other, two(subject))
        yield Path(folder)


def two(subject):
    return model_config("two", subject.folder / "half_plus_two")


def new_name():
    """A model's name that the server has never heard of: it remembers what it served."""
    return f"model_{uuid.uuid4().hex}"


def not_found(model):
    return Code.NOT_FOUND, f"Servable not found for request: Latest({model})"


async def check_reload_adds_and_removes_models(subject):
    other, name = subject.other, new_name()
    await reload(other, two(subject))
    assert await y_of(other, "two") == ([2.5], 123)
    await reload(other, two(subject), model_config(name, subject.folder / "half_plus_three"))
    assert [await y_of(other, model) for model in ("two", name)] == [([2.5], 123), ([3.5], 123)]
    assert await other.status(name) == [(123, *AVAILABLE)]
    await reload(other, model_config(name, subject.folder / "half_plus_three"))
    await refused(y_of(other, "two"), *not_found("two"))
    await until(lambda: other.status("two"), [(123, *END_STATUS)])
    assert await y_of(other, name) == ([3.5], 123)


async def check_reload_to_nothing(subject):
    other = subject.other
    await reload(other, two(subject))
    await reload(other)
    await refused(y_of(other, "two"), *not_found("two"))
    await reload(other, two(subject))
    assert await y_of(other, "two") == ([2.5], 123)


async def check_reload_sets_labels(subject):
    other, name = subject.other, new_name()
    async with two_versions(subject) as folder:
        for labels in ({}, {"stable": 1, "canary": 2}, {"stable": 2, "canary": 2}, {"stable": 2}):
            await reload(other, model_config(name, folder, 1, 2, labels=labels))
            for label, version in labels.items():
                assert (await y_of(other, (name, label)))[1] == version
        await refused(
            y_of(other, (name, "canary")), Code.INVALID_ARGUMENT, "Unrecognized servable version label: canary"
        )


async def check_a_label_needs_its_version(subject):
    """Of a model that is new, too: its versions are loaded after its labels are looked at."""
    other, name = subject.other, new_name()
    async with two_versions(subject) as folder:
        text = "Request to assign label to version {} of model {}, which is not currently available for inference"
        config = model_config(name, folder, 1, labels={"stable": 1})
        await refused(reload(other, config), Code.FAILED_PRECONDITION, text.format(1, name))
        await refused(y_of(other, name), *not_found(name))
        assert await y_of(other, "two") == ([2.5], 123)
        await reload(other, model_config(name, folder, 1))
        await reload(other, config)
        config.version_labels["stable"] = 2
        await refused(reload(other, config), Code.FAILED_PRECONDITION, text.format(2, name))
        assert await y_of(other, (name, "stable")) == ([2.5], 1)


async def check_versions_change_without_a_gap(subject):
    other, name = subject.other, new_name()
    async with two_versions(subject) as folder:
        await reload(other, model_config(name, folder, 1))
        await reload(other, model_config(name, folder, 2))
        answers = await until(lambda: y_of(other, name), ([3.5], 2))
        assert all(answer == ([2.5], 1) for answer in answers), answers
        await until(lambda: other.status(name), [(2, *AVAILABLE), (1, *END_STATUS)])


async def check_a_model_moves_to_another_folder(subject):
    """The number of the version stays the same."""
    other, name = subject.other, new_name()
    await reload(other, model_config(name, subject.folder / "half_plus_two"))
    await until(lambda: y_of(other, name), ([2.5], 123))
    await reload(other, model_config(name, subject.folder / "half_plus_three"))
    answers = await until(lambda: y_of(other, name), ([3.5], 123))
    assert all(answer == ([2.5], 123) for answer in answers), answers


async def check_a_call_outlives_its_model(subject):
    """A version is unloaded when its calls have ended."""
    other, name = subject.other, new_name()
    await reload(other, model_config(name, subject.folder / "slow"))
    running = start(other.predictions.Predict, predict_request(name, steps=STEPS))
    await until(lambda: calls_begun(other, name), 1)
    await reload(other, two(subject))
    await refused(other.predict(name, steps=1), *not_found(name))
    assert list((await answer_of(running)).outputs["done"].int_val) == [STEPS]
    await until(lambda: other.status(name), [(1, *END_STATUS)])


async def calls_begun(stubs, model):
    return (await stubs.predict(model, "started")).outputs["started"].float_val[0]


async def check_a_failing_reload_changes_nothing(subject):
    other, name = subject.other, new_name()
    good = subject.folder / "half_plus_three"
    await reload(other, two(subject))
    platforms = "ModelServerConfig::model_type (deprecated) {} ModelServerConfig::model_platform, model name is {}"
    both, neither = (platforms.format(word, name) for word in ("and", "nor"))
    for configs, text in (
        ([model_config(name, good)] * 2, f"Illegal to list model {name} multiple times in config list"),
        (
            [model_config(name, "relative/path")],
            f"Expected model {name} to have an absolute path or URI; got base_path()=relative/path",
        ),
        ([model_config(name, good, model_platform="")], f"Illegal setting neither {neither}"),
        ([model_config(name, good, model_type=1)], f"Illegal setting both {both}"),
        ([model_config(name, good, model_platform="caffe")], f"Model {name} requests unsupported platform caffe"),
        (
            [model_config(name, good, logging_config=logging_config_pb2.LoggingConfig())],
            f"model {name}: logging_config: expected a filename_prefix like /records/{name}, got ''",
        ),
    ):
        await refused(reload(other, *configs), Code.INVALID_ARGUMENT, text)
        assert await y_of(other, "two") == ([2.5], 123)
        await refused(y_of(other, name), *not_found(name))
    request = model_management_pb2.ReloadConfigRequest()
    text = (
        "ServerModelConfig type not supported by HandleReloadConfigRequest. Only ModelConfigList is currently "
        "supported"
    )
    for _ in range(2):
        await refused(call(other.models.HandleReloadConfigRequest, request), Code.INVALID_ARGUMENT, text)
        request.config.custom_model_config.SetInParent()
    assert await y_of(other, "two") == ([2.5], 123)
    await reload(other, two(subject), model_config(name, good))
    assert await y_of(other, name) == ([3.5], 123)


async def check_a_model_that_cannot_be_loaded(subject):
    other, name = subject.other, new_name()
    async with two_versions(subject) as folder:
        (folder / "1" / "saved_model.pb").write_bytes(b"\xff\xff\xff")
        configs = two(subject), model_config(name, folder, 1)
        code, text = await failure(reload(other, *configs))
        problem = "1 model(s) did not become available: {{{name: " + name + " version: 1} due to error: "
        assert (code, text[: len(problem)]) == (Code.UNKNOWN, problem), text
        ((version, state, code, text),) = await other.status(name)
        assert (version, state) == (1, "END")
        assert code != 0
        assert str(folder) in text, text
        code, not_found_text = not_found(name)
        await refused(y_of(other, name), code, f"{not_found_text}: {text}")
        # The others are as they were, and the next reload is one like any other.
        assert await y_of(other, "two") == ([2.5], 123)
        await reload(other, two(subject), model_config(name, folder, 2))
        assert await y_of(other, name) == ([3.5], 2)


async def check_a_model_with_a_missing_folder(subject):
    other, name = subject.other, new_name()
    await reload(other, two(subject))
    code, text = await failure(reload(other, two(subject), model_config(name, subject.folder / "nowhere")))
    problem = "1 model(s) did not become available: {{{name: " + name + "} due to error: NOT_FOUND: "
    assert (code, text[: len(problem)]) == (Code.UNKNOWN, problem), text
    assert await y_of(other, "two") == ([2.5], 123)


async def check_metrics_of_a_reload(subject):
    response = await reload(subject.other, two(subject), metric_names=["/tensorflow/serving/nothing"])
    assert [(metric.name, metric.int64_value_increase) for metric in response.metric] == [
        ("/tensorflow/serving/nothing", 0)
    ]
