"""MLServer's `MLModel`: a class in a `model.py`, or the implementation named in a `model-settings.json`.

Supported are `load`, `predict`, `predict_stream` if there is no `predict`, and `unload`. Requests have the content
types for codecs that the settings declare, and those of the inputs, the requested outputs and the request.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from triglot.backends import missing_dependency
from triglot.backends.foreign_classes import CodeLoop, ForeignModel, ForeignStream, Inputs, array_of, plain
from triglot.backends.mlserver import stand_in
from triglot.backends.mlserver.settings import SETTINGS, values_of, warn_of_ignored
from triglot.backends.mlserver.stand_in.metrics import CURRENT
from triglot.backends.model_modules import ModelModules, remove_with
from triglot.core.call import Call
from triglot.core.errors import Internal, InvalidArgument, MissingDependency, ModelLoadError
from triglot.core.tensor import Array, datatype_of
from triglot.core.types import Answer, TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.metrics import ModelMetrics
from triglot.model.model import Model
from triglot.model.validation import repeated_output

log = logging.getLogger(__name__)

BINARY = "inference-header-content-length"
"""Header of a request over REST with tensors as bytes."""


def load(file: Path, config: ModelConfig) -> Model:
    """Return the model of the class that the settings name.

    Raise `MissingDependency` for a runtime that is not installed, and as `model_of` does.
    """
    mlserver = stand_in.provide()
    settings = _settings(mlserver, file, config, "")
    # Else two folders with a file of one name would share the first one's class.
    modules = ModelModules([file if file.is_dir() else file.parent])
    try:
        with modules.by_plain_names():
            model = _load(mlserver, _class_of(mlserver, settings, file), settings, file, config)
    except BaseException:
        modules.close()
        raise
    remove_with(model, type(model), modules)
    return model


def _class_of(mlserver: Any, settings: Any, file: Path) -> Any:
    """Return the class that the settings name. Raise as `load` does."""
    try:
        model_class = settings.implementation
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module.startswith("mlserver_"):
            package = module.replace("_", "-")
            raise MissingDependency(
                f"{file}: implementation needs {module}, which is not installed; run: pip install {package}; or "
                "write what it does as a class of your own in a model.py"
            ) from error
        raise missing_dependency(file, "the implementation", error) from error
    if not (isinstance(model_class, type) and issubclass(model_class, mlserver.MLModel)):
        raise ModelLoadError(f"{file}: implementation: expected a subclass of MLServer's MLModel")
    return model_class


def model_of(model_class: type[Any], file: Path, config: ModelConfig) -> Model:
    """Return the class's model, loaded, with the settings in the `model-settings.json` next to `file`, if any.

    Raise `ModelLoadError` for a `load` that does not return True, and for unsupported features.
    """
    mlserver = stand_in.provide()
    settings = _settings(
        mlserver, file.with_name(SETTINGS), config, f"{model_class.__module__}.{model_class.__qualname__}"
    )
    return _load(mlserver, model_class, settings, file, config)


def _settings(mlserver: Any, file: Path, config: ModelConfig, implementation: str) -> Any:
    """Return the settings in the file, over the defaults. Raise `ModelLoadError`."""
    try:
        values = values_of(file, config)
        folder = file if file.is_dir() else file.parent
        values["name"] = values.get("name") or config.name_for(file)
        values["implementation"] = implementation or values.get("implementation", "")
        parameters = values["parameters"]
        parameters.setdefault("uri", str(folder.absolute()))
        parameters.setdefault("version", folder.name if folder.name.isdecimal() else "1")
        warn_of_ignored(file, values)
        return mlserver.ModelSettings.model_validate({**values, "_source": str(file.absolute())})
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error


def _load(mlserver: Any, model_class: type[Any], settings: Any, file: Path, config: ModelConfig) -> Model:
    streams = model_class.predict_stream is not mlserver.MLModel.predict_stream
    predicts = model_class.predict is not mlserver.MLModel.predict
    if not streams and not predicts:
        raise ModelLoadError(f"{file}: {model_class.__name__} has no async def predict(self, payload)")
    if streams and predicts:
        log.warning("%s: %s.predict_stream is ignored, as the class has predict", file, model_class.__name__)
    for name in dir(model_class):
        if hasattr(getattr(model_class, name), "__custom_handler__"):
            log.warning("%s: %s.%s: its custom_handler has no route here", file, model_class.__name__, name)
    served = model_class(settings)
    loop = CodeLoop(settings.name)
    try:
        served.ready = loop.run(served.load())
        if not served.ready:
            raise ModelLoadError(f"{file}: {model_class.__name__}.load() returned {served.ready!r}, expected True")
        kind = MLServerModel if predicts else MLServerStream
        # A class per model: when its `close` has run, the modules of its file are removed.
        named: type[MLServerModel] = type(model_class.__name__, (kind,), {})
        model = named(served, mlserver.types, loop)
        model.model_config = config
        return model
    except BaseException:
        loop.close()
        raise


class MLServerModel(ForeignModel):
    """An `MLModel`. It accepts and returns any tensors; those that it declares are for clients to read."""

    platform = "mlserver"

    def __init__(self, served: Any, types: Any, loop: CodeLoop) -> None:
        super().__init__(loop)
        self._served = served
        self._types = types
        self.own_metrics = ModelMetrics()
        self.inputs, self.outputs = (
            [TensorSpec(spec.name, _text(spec.datatype), spec.shape) for spec in specs or ()]
            for specs in (served.inputs, served.outputs)
        )

    async def answer(self, inputs: Inputs, call: Call) -> Answer:
        """See `ForeignModel`. Raise `Internal` for anything but a response."""
        self._set_metrics()
        return self._answer(await self._served.predict(self._request(inputs, call)))

    def _set_metrics(self) -> None:
        """Have `mlserver.log` count in this model's metrics, in the current task."""
        assert self.own_metrics is not None
        served = self._served
        CURRENT.set((self.own_metrics, {"model_name": served.name, "model_version": served.version or ""}))

    def _request(self, inputs: Inputs, call: Call) -> Any:
        """Return the request. Raise `InvalidArgument` for parameters that MLServer's types reject."""
        types = self._types
        headers = call.metadata
        # As in MLServer, texts of JSON are `str`; those of gRPC, whose metadata has no content type, are bytes.
        is_json = "content-type" in headers and BINARY not in headers
        try:
            values = types.Parameters(**{**call.parameters, "headers": headers})
            own = {name: types.Parameters(**values) for name, values in call.input_parameters.items()}
            wanted = {name: types.Parameters(**values) for name, values in call.output_parameters.items()}
        except ValueError as error:  # From pydantic.
            raise InvalidArgument(f"parameters: {error}") from None
        return types.InferenceRequest(
            id=call.request_id or None,
            parameters=values,
            inputs=[
                types.RequestInput(
                    name=name,
                    datatype=datatype_of(array),
                    shape=array.shape,
                    data=_elements(array, is_json),
                    parameters=own.get(name),
                )
                for name, array in inputs.items()
            ],
            outputs=[
                types.RequestOutput(name=name, parameters=wanted.get(name)) for name in call.requested_outputs
            ]
            or None,
        )

    def _answer(self, response: Any) -> Answer:
        if not isinstance(response, self._types.InferenceResponse):
            raise Internal(f"predict() returned {type(response).__name__}, expected an InferenceResponse")
        outputs = {
            output.name: array_of(
                output.name, _text(output.datatype), output.shape, getattr(output.data, "root", output.data)
            )
            for output in response.outputs
        }
        if len(outputs) < len(response.outputs):
            raise repeated_output([output.name for output in response.outputs])
        of_outputs = {
            output.name: plain(output.parameters.model_dump())
            for output in response.outputs
            if output.parameters is not None
        }
        return Answer(
            outputs,
            plain(response.parameters.model_dump() if response.parameters else {}),
            output_parameters={name: own for name, own in of_outputs.items() if own},
        )

    def close(self) -> None:
        """Call `unload`."""
        try:
            self._loop.run(self._served.unload())
        finally:
            self._loop.close()


class MLServerStream(MLServerModel, ForeignStream):
    """An `MLModel` with `predict_stream`."""

    async def answers(self, inputs: Inputs, call: Call) -> AsyncIterator[Answer]:
        """See `ForeignStream`."""
        self._set_metrics()
        async for response in self._served.predict_stream(_single(self._request(inputs, call))):
            yield self._answer(response)
            self._set_metrics()  # Each step is a task of its own.


def _elements(array: Array, is_json: bool) -> list[Any]:
    elements: list[Any] = array.reshape(-1).tolist()
    return [element.decode() for element in elements] if is_json and array.dtype.hasobject else elements


async def _single(request: Any) -> AsyncIterator[Any]:
    yield request


def _text(datatype: Any) -> str:
    """Return the datatype's name: MLServer has texts, and members of an enumeration."""
    return str(getattr(datatype, "value", datatype))
