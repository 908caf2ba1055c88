"""`triglot infer`: calls a model of a running server once, over gRPC (KServe V2)."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from triglot.cli.grpc_client import CallError, Client, add_connection, connected
from triglot.cli.infer_values import array_of, json_text, plain_text
from triglot.config.option_fields import unknown
from triglot.config.options import ConfigError
from triglot.core.tensor import Array, datatype_of
from triglot.core.types import ParameterValue, TensorSpec
from triglot.model.samples import samples_of
from triglot.model.signature import shape_text
from triglot.pb.kserve import inference_pb2 as pb
from triglot.run import FAILED, print_error

if TYPE_CHECKING:
    from triglot.client.calls import CallOptions
    from triglot.client.wire import Outputs, Parameters

SERVICE = "inference.GRPCInferenceService"
LARGEST_SAMPLE = 2**20
"""Limit on the elements of a generated input."""
SHOWN_SAMPLE = 16
"""Limit on the elements of a generated input that is printed."""
WITHOUT_CONFIG = ("UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED")
"""Errors of ModelConfig that do not prevent a call: some servers lack it, and some clients lack permission."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "infer",
        help="call a model of a running server",
        usage="triglot infer [OPTION ...] MODEL [INPUT=VALUE ...]",
        description="Calls a model over gRPC with KServe V2, and prints its outputs. A decoupled model's answers "
        "are printed as they come.",
        epilog="A VALUE is JSON (x=[1,2], x=[[1],[2]]), @FILE (a .npy or .json file; for BYTES, the bytes of any "
        "other file), or, for BYTES, text. Without inputs, the model is called with an example.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="name of the model")
    add("inputs", nargs="*", metavar="INPUT=VALUE", help="an input by its name; see below")
    add(
        "--model-version", default="", metavar="VERSION", help="version of the model (default: the server chooses)"
    )
    add(
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the request, its value as JSON or text; may be repeated",
    )
    add(
        "--json",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print a line of JSON for each answer (default: unless standard output is a terminal)",
    )
    add_connection(parser, "--url", "the call")


def run(flags: Mapping[str, Any], others: Iterable[str]) -> int:
    """Call the model and return the exit status. Raise `ConfigError`."""
    as_json = not sys.stdout.isatty() if flags["json"] is None else flags["json"]
    parameters = {name: _value(text) for name, text in (_pair(text, "--parameter") for text in flags["parameter"])}
    try:
        with connected(flags, SERVICE, "KServe V2") as client:
            call = _Call(client, flags["model"], flags["model_version"])
            values = dict(_pair(text, "an input") for text in [*flags["inputs"], *others])
            for outputs in call.outputs(call.inputs(values), parameters):
                print(call.json_line(outputs) if as_json else _plain_lines(outputs), flush=True)
    except CallError as error:
        print_error(str(error))
        return FAILED
    except (KeyboardInterrupt, BrokenPipeError):  # The output is no longer read.
        return FAILED
    return 0


def _pair(text: str, what: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"{what}: expected NAME=VALUE, got {text!r}")
    return name, value


def _value(text: str) -> ParameterValue:
    """Return a parameter: JSON's booleans, numbers and strings, or else the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


class _Call:
    """A call of one model. Raise `CallError` if the model does not exist."""

    def __init__(self, client: Client, model: str, version: str) -> None:
        self._client = client
        self._model = model
        self._version = version
        request = pb.ModelMetadataRequest(name=model, version=version)
        try:
            self._metadata = client.call("ModelMetadata", request, pb.ModelMetadataResponse)
        except CallError as error:
            if error.code != "NOT_FOUND":
                raise
            raise CallError(self._not_found_text(str(error))) from None

    def _not_found_text(self, text: str) -> str:
        try:
            index = self._client.call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        except CallError:
            return text
        versions: dict[str, list[str]] = {}
        for model in index.models:
            versions.setdefault(model.name, []).append(model.version)
        if found := versions.get(self._model):
            return f"{text}; versions of '{self._model}': {', '.join(filter(None, found)) or 'none'}"
        names = ", ".join(sorted(versions)) or "none"
        return f"{unknown(self._model, versions, 'model')}; models of the server: {names}"

    def inputs(self, values: Mapping[str, str]) -> Mapping[str, Array]:
        """Return the inputs of the call. Raise `ConfigError` for inputs that are not the model's."""
        inputs = {tensor.name: tensor for tensor in self._metadata.inputs}
        for name in values:
            if name not in inputs:
                raise ConfigError(f"{unknown(name, inputs, 'input')}; {self._expected_inputs()}")
        if inputs and not values:
            return self._example()
        return {
            name: array_of(text, name, inputs[name].datatype, inputs[name].shape) for name, text in values.items()
        }

    def _expected_inputs(self) -> str:
        inputs = (
            f"{tensor.name} {tensor.datatype} {shape_text(tensor.shape)}" for tensor in self._metadata.inputs
        )
        return f"model '{self._model}' takes {', '.join(inputs) or 'no inputs'}"

    def _example(self) -> dict[str, Array]:
        """Return a generated input for each of the model's. Raise `ConfigError` if that is impossible."""
        try:
            specs = [
                TensorSpec(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in self._metadata.inputs
            ]
            samples = samples_of(specs, LARGEST_SAMPLE)
        except ValueError:
            samples = None
        if samples is None:
            raise ConfigError(f"expected inputs as INPUT=VALUE: {self._expected_inputs()}")
        texts = {sample.name: json.dumps(sample.nested()) for sample in samples}
        given = (
            shlex.quote(f"{sample.name}={texts[sample.name]}")
            if sample.count <= SHOWN_SAMPLE
            else f"{sample.name}=…"
            for sample in samples
        )
        print(f"without inputs, an example: {' '.join(given)}", file=sys.stderr)
        return {
            sample.name: array_of(texts[sample.name], sample.name, sample.datatype, sample.shape)
            for sample in samples
        }

    def outputs(self, inputs: Mapping[str, Array], parameters: Parameters) -> Iterator[Outputs]:
        """Yield the outputs of each response."""
        options: CallOptions = {"version": self._version, "parameters": parameters}
        decoupled = self._is_decoupled()
        with self._client.errors():
            if decoupled:
                yield from self._client.arrays.stream(self._model, inputs, **options)
            else:
                yield self._client.arrays.infer(self._model, inputs, **options)

    def _is_decoupled(self) -> bool:
        request = pb.ModelConfigRequest(name=self._model, version=self._version)
        try:
            response = self._client.call("ModelConfig", request, pb.ModelConfigResponse)
        except CallError as error:
            if error.code not in WITHOUT_CONFIG:
                raise
            return False
        return bool(response.config.model_transaction_policy.decoupled)

    def json_line(self, outputs: Outputs) -> str:
        """Return a response as in KServe V2's REST."""
        objects = (
            f"{_open_object({'name': name, 'datatype': datatype_of(array), 'shape': array.shape})}"
            f'"data":{json_text(datatype_of(array), array)}}}'
            for name, array in outputs.items()
        )
        head = _open_object({"model_name": self._model, "model_version": outputs.model_version})
        return f'{head}"outputs":[{",".join(objects)}]}}'


def _open_object(values: dict[str, Any]) -> str:
    """Return a JSON object without its closing brace, to append more."""
    return json.dumps(values, separators=(",", ":"))[:-1] + ","


def _plain_lines(outputs: Outputs) -> str:
    return "\n".join(
        f"{name} {datatype_of(array)} {shape_text(array.shape)}: {plain_text(datatype_of(array), array)}"
        for name, array in outputs.items()
    )
