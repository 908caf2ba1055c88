"""KServe's `Model`: a class in a `model.py`, constructed with the model's name as in `Model("name")`.

Supported are `load`, `preprocess`, `predict`, `postprocess` and `stop`, but not explainers and generators. A class
whose `preprocess` or `predict` is annotated with a dict instead of an `InferRequest` receives and returns the JSON
of the V1 protocol; any other receives an `InferRequest` and returns an `InferResponse`, or an equivalent dict.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triglot.backends.foreign_classes import CodeLoop, ForeignModel, Inputs, array_of, plain
from triglot.core.call import Call
from triglot.core.errors import Internal, InvalidArgument, ModelLoadError
from triglot.core.tensor import datatype_of, object_array
from triglot.core.types import Answer, TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.model import Model, signature_of
from triglot.model.signature import DEFAULT_SIGNATURE, Signature
from triglot.model.validation import repeated_output


def model_of(model_class: type[Any], file: Path, config: ModelConfig) -> Model:
    """Return the class's model, loaded.

    Raise `ModelLoadError` for a class whose constructor does not accept just a name, a `load` that does not
    return True, and for unsupported features.
    """
    kserve = importlib.import_module("kserve")
    name = model_class.__name__
    if inspect.isgeneratorfunction(model_class.predict) or inspect.isasyncgenfunction(model_class.predict):
        raise ModelLoadError(f"{file}: {name}.predict: expected a function, generators are not supported")
    if not hasattr(model_class, "predict") or model_class.predict is kserve.Model.predict:
        raise ModelLoadError(f"{file}: {name} has no predict(self, payload, headers)")
    own_name = config.name_for(file)
    try:
        signature_of(model_class).bind(own_name)
    except TypeError as error:
        raise ModelLoadError(
            f"{file}: {name}: expected an __init__ that takes the model's name only: {error}"
        ) from None
    loop = CodeLoop(own_name)
    try:
        served = loop.run(_start(model_class, own_name))
        if not served.ready:
            raise ModelLoadError(f"{file}: {name} is not ready after load(); expected load() to set self.ready")
        kind = KServeDictModel if _takes_dicts(model_class) else KServeModel
        # A class per model: when its `close` has run, the modules of its file are removed.
        named: type[KServeModel] = type(name, (kind,), {})
        model = named(served, kserve, loop)
        model.model_config = config
        return model
    except BaseException:
        loop.close()
        raise


async def _start(model_class: type[Any], name: str) -> Any:
    served = model_class(name)
    if not served.ready:
        ready = served.load()
        served.ready = bool(await ready if inspect.isawaitable(ready) else ready) or served.ready
    return served


def _takes_dicts(model_class: type[Any]) -> bool:
    """Whether the annotations of the class's own code name a dict and no `InferRequest`."""
    annotations = [text for name in ("preprocess", "predict") if (text := _payload(getattr(model_class, name)))]
    # The annotations of KServe's own methods name both.
    unambiguous = [text for text in annotations if ("InferRequest" in text) != ("dict" in text.lower())]
    return bool(unambiguous) and "InferRequest" not in unambiguous[0]


def _payload(method: Callable[..., Any]) -> str:
    parameters = list(signature_of(method).parameters.values())
    annotation = parameters[1].annotation if len(parameters) > 1 else inspect.Parameter.empty
    return "" if annotation is inspect.Parameter.empty else str(annotation)


class KServeModel(ForeignModel):
    """A model of the V2 protocol.

    It accepts and returns any tensors, unless `get_input_types` and `get_output_types` declare them.
    """

    platform = "kserve"

    def __init__(self, served: Any, kserve: Any, loop: CodeLoop) -> None:
        super().__init__(loop)
        self._served = served
        self._kserve = kserve
        inputs, outputs = served.get_input_types(), served.get_output_types()
        if inputs and outputs:
            self.any_tensors = False
            self.inputs, self.outputs = (
                [TensorSpec(spec["name"], spec["datatype"], spec["shape"]) for spec in specs]
                for specs in (inputs, outputs)
            )

    async def answer(self, inputs: Inputs, call: Call) -> Any:
        """See `ForeignModel`. Raise `Internal` for anything but a response."""
        kserve = self._kserve
        tensors = [
            kserve.InferInput(
                name,
                list(array.shape),
                datatype_of(array),
                array.tolist() if array.dtype.hasobject else array,
                parameters=dict(call.input_parameters.get(name, {})),
            )
            for name, array in inputs.items()
        ]
        request = kserve.InferRequest(
            self._served.name, tensors, request_id=call.request_id or None, parameters=dict(call.parameters)
        )
        response = await self._predict(request, call)
        if isinstance(response, dict) and "outputs" in response:
            response = kserve.InferResponse.from_rest(response)
        if not isinstance(response, kserve.InferResponse):
            raise Internal(f"predict() returned {type(response).__name__}, expected an InferResponse")
        outputs = {}
        for output in response.outputs:
            data = output.data if output._raw_data is None else output.as_numpy()
            outputs[output.name] = array_of(output.name, output.datatype, output.shape, data)
        if len(outputs) < len(response.outputs):
            raise repeated_output([output.name for output in response.outputs])
        return Answer(outputs, plain(response.parameters or {}))

    async def _predict(self, body: Any, call: Call) -> Any:
        headers = {name: value for name, value in call.metadata.items() if isinstance(value, str)}
        result = await self._served(body, headers)
        # A tuple contains the response and its headers.
        return result[0] if isinstance(result, tuple) else result

    def close(self) -> None:
        """Call `stop`."""
        try:
            self._served.stop()
        finally:
            self._loop.close()


class KServeDictModel(KServeModel):
    """A model of the V1 protocol: its requests and responses are JSON, with an element per instance."""

    speaks_json = True

    def __init__(self, served: Any, kserve: Any, loop: CodeLoop) -> None:
        super().__init__(served, kserve, loop)
        self.any_tensors = False
        self.inputs, self.outputs = (), ()
        self.signatures = {
            DEFAULT_SIGNATURE: Signature(
                [TensorSpec("instances", "BYTES", [-1]), TensorSpec("parameters", "BYTES", [1])],
                [TensorSpec("predictions", "BYTES", [1])],
                defaults={"parameters": object_array([b"{}"], [1])},
            )
        }

    async def answer(self, inputs: Inputs, call: Call) -> Answer:
        """See `ForeignModel`. Raise `InvalidArgument` for invalid JSON, `Internal` without predictions."""
        try:
            instances = [json.loads(text) for text in inputs["instances"].ravel().tolist()]
            more = json.loads(inputs["parameters"].item())
        except ValueError as error:
            raise InvalidArgument(f"instances: expected JSON: {error}") from None
        if not isinstance(more, dict):
            raise InvalidArgument("parameters: expected a JSON object")
        response = await self._predict({**more, "instances": instances}, call)
        if not isinstance(response, dict) or "predictions" not in response:
            raise Internal(f"predict() returned {type(response).__name__}, expected a dict with 'predictions'")
        try:
            text = json.dumps(response["predictions"], default=_plain).encode()
        except (TypeError, ValueError) as error:
            raise Internal(f"predict() returned a value with no JSON form: {error}") from None
        return Answer({"predictions": object_array([text], [1])})


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
