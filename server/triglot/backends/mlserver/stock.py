"""MLServer's own runtimes, by Triglot's backends: with its names, shapes and content types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from triglot import backends
from triglot.backends.columns import INPUT, exact
from triglot.backends.mlserver.content_types import PANDAS, Inputs, content_type_of, decoded, encoded
from triglot.backends.mlserver.settings import DEFAULTS, Settings
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import Array
from triglot.core.types import Answer, TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.model.signature import DEFAULT_SIGNATURE, INSTANCES

PREDICT_FN = "predict_fn"
CONTENT_TYPE = "content_type"
MLFLOW = "mlflow"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The backend of a runtime, and the names of files that it looks for in a folder."""

    backend: str
    files: Sequence[str]


SKLEARN = Runtime("sklearn", ("model.joblib", "model.pickle", "model.pkl"))
CATBOOST = Runtime("catboost", ("model.cbm", "model.bin"))
RUNTIMES: Mapping[str, Runtime] = {
    "mlserver_sklearn.SKLearnModel": SKLEARN,
    "mlserver_xgboost.XGBoostModel": Runtime("xgboost", ("model.bst", "model.json", "model.ubj")),
    "mlserver_lightgbm.LightGBMModel": Runtime("lightgbm", ("model.bst", "model.txt")),
    "mlserver_catboost.CatboostModel": CATBOOST,
    "mlserver_mlflow.MLflowRuntime": Runtime(MLFLOW, ("MLmodel",)),
}


def runtime_of(implementation: str) -> Runtime | None:
    """Return the runtime of a class's path, None if it is not one of `RUNTIMES`."""
    package, *_, name = implementation.split(".")
    return RUNTIMES.get(f"{package}.{name}")


def load(runtime: Runtime, settings: Settings, config: ModelConfig) -> Model:
    """Return the model of a runtime. Raise `ModelLoadError`."""
    file = settings.file
    if file.is_dir():
        # KServe names the class of scikit-learn for formats that it does not know, which CatBoost is.
        candidates = [SKLEARN, CATBOOST] if runtime is SKLEARN else [runtime]
        found = [(kind, file / name) for kind in candidates for name in kind.files if (file / name).is_file()]
        if not found:
            raise ModelLoadError(
                f"{file}: expected one of {', '.join(runtime.files)}, or parameters.uri of a file"
            )
        runtime, file = found[0]
    others = {name: value for name, value in config.parameters.items() if name != DEFAULTS}
    model = backends.load(runtime.backend, file, replace(config, parameters=others))
    if runtime.backend == MLFLOW:  # It has inputs, outputs and parameters of its own.
        return model
    # The class has the platform of the model's own.
    kind: type[StockModel] = type("StockModel", (StockModel,), {"platform": model.platform})
    return kind(model, settings)


class StockModel(Model):
    """A model whose methods are outputs: those that a request names, or else `predict`, or the settings' own.

    An output of one dim has a second one of 1, except for the JSON of instances.
    """

    any_inputs = True
    any_output_shapes = True
    takes_parameters = True

    def __init__(self, model: Model, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        first = model.outputs[0].name
        methods = {first: model.outputs} | {name: own.outputs for name, own in model.signatures.items()}
        self._signature_of = {
            spec.name: DEFAULT_SIGNATURE if name == first else name
            for name, specs in methods.items()
            for spec in specs
        }
        default = settings.extra.get(PREDICT_FN, first)
        if default not in methods:
            raise ModelLoadError(
                f"{settings.file}: parameters.extra.{PREDICT_FN}: expected one of {', '.join(methods)}, "
                f"got {default!r}"
            )
        self._defaults = [spec.name for spec in methods[default]]
        self.inputs = settings.inputs or model.inputs
        self.columns, self.example = model.columns, model.example
        self.outputs = [_with_column(spec) for specs in methods.values() for spec in specs]
        self.labels = model.labels
        self.warnings = model.warnings
        self.response_cache = settings.response_cache
        self.model_config = model.model_config

    def infer(self, inputs: Inputs, call: Call) -> Answer:
        """Predict. Raise `InvalidArgument` for what the model does not take."""
        names = call.requested_outputs or self._defaults
        taken = self._decoded(inputs, call)
        found: dict[str, Array] = {}
        for signature in dict.fromkeys([self._signature_of[name] for name in names]):
            found |= self._model.infer(taken, _with_signature(call, signature))
        flat = INSTANCES in inputs
        outputs, parameters = {}, {}
        for name in names:
            declared = self._settings.content_types.get(name, "")
            wanted = content_type_of(call.output_parameters.get(name, {}), declared)
            array, content_type = encoded(name, np.asarray(found[name]), wanted)
            outputs[name] = array if flat or array.ndim != 1 else array[:, np.newaxis]
            parameters[name] = {CONTENT_TYPE: content_type}
        return Answer(outputs, partial=True, output_parameters=parameters)

    def _decoded(self, inputs: Inputs, call: Call) -> Inputs:
        content_type = content_type_of(call.parameters, self._settings.content_type)
        own = self._settings.content_types
        if call.input_parameters or own:
            inputs = {
                name: decoded(name, array, content_type_of(call.input_parameters.get(name, {}), own.get(name, "")))
                for name, array in inputs.items()
            }
        if content_type == PANDAS and len(inputs) > 1 and not self._model.columns:
            return _joined(inputs)
        return inputs

    def close(self) -> None:
        """Close the model."""
        self._model.close()


def _joined(inputs: Inputs) -> Inputs:
    """Return the columns of a frame as one matrix, in the order of the request; unless there are texts."""
    columns = [array.reshape(-1) for array in inputs.values()]
    if any(column.dtype.hasobject for column in columns) or len({len(column) for column in columns}) > 1:
        return inputs
    try:
        return {INPUT: np.column_stack([exact(column, np.dtype(np.float64)) for column in columns])}
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def _with_signature(call: Call, name: str) -> Call:
    if call.signature_name in ("", name):
        return call
    other = Call(call.deadline)
    other.parameters, other.signature_name = call.parameters, name
    return other


def _with_column(spec: TensorSpec) -> TensorSpec:
    one_dim = spec.shape is not None and len(spec.shape) == 1
    return TensorSpec(spec.name, spec.datatype, [-1, 1]) if one_dim else spec
