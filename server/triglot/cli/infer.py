"""`triglot infer`: calls a model of a running server once, over gRPC (KServe V2)."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from triglot.cli.grpc_client import CallError, Client, add_connection, connected
from triglot.cli.infer_values import array_of, array_of_output, json_text, plain_text
from triglot.config.option_fields import unknown
from triglot.config.options import ConfigError
from triglot.core.tensor import Array, raw_buffer
from triglot.core.types import TensorSpec
from triglot.model.samples import samples_of
from triglot.model.signature import shape_text
from triglot.pb.kserve import inference_pb2 as pb
from triglot.run import FAILED, print_error

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
    parameters = dict(_pair(text, "--parameter") for text in flags["parameter"])
    try:
        with connected(flags, SERVICE, "KServe V2") as client:
            call = _Call(client, flags["model"], flags["model_version"])
            values = dict(_pair(text, "an input") for text in [*flags["inputs"], *others])
            request = call.request(values, parameters)
            for answer in call.answers(request):
                print(_json_line(answer) if as_json else _plain_lines(answer), flush=True)
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

    def request(self, values: Mapping[str, str], parameters: Mapping[str, str]) -> Any:
        """Return a ModelInferRequest. Raise `ConfigError` for inputs that are not the model's."""
        inputs = {tensor.name: tensor for tensor in self._metadata.inputs}
        for name in values:
            if name not in inputs:
                raise ConfigError(f"{unknown(name, inputs, 'input')}; {self._expected_inputs()}")
        arrays = {
            name: array_of(text, name, inputs[name].datatype, inputs[name].shape) for name, text in values.items()
        }
        if inputs and not values:
            arrays = self._example()
        request = pb.ModelInferRequest(model_name=self._model, model_version=self._version)
        for name, array in arrays.items():
            request.inputs.add(name=name, datatype=inputs[name].datatype, shape=array.shape)
            request.raw_input_contents.append(bytes(raw_buffer(array)))
        for name, text in parameters.items():
            _set_parameter(request.parameters[name], text)
        return request

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

    def answers(self, request: Any) -> Iterator[Any]:
        """Yield ModelInferResponses."""
        if self._is_decoupled():
            for answer in self._client.stream("ModelStreamInfer", request, pb.ModelStreamInferResponse):
                if answer.error_message:
                    raise CallError(answer.error_message)
                yield answer.infer_response
        else:
            yield self._client.call("ModelInfer", request, pb.ModelInferResponse)

    def _is_decoupled(self) -> bool:
        request = pb.ModelConfigRequest(name=self._model, version=self._version)
        try:
            response = self._client.call("ModelConfig", request, pb.ModelConfigResponse)
        except CallError as error:
            if error.code not in WITHOUT_CONFIG:
                raise
            return False
        return bool(response.config.model_transaction_policy.decoupled)


def _set_parameter(parameter: Any, text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    fields = {bool: "bool_param", int: "int64_param", float: "double_param"}
    field = fields.get(type(value), "string_param")
    setattr(parameter, field, text if field == "string_param" and not isinstance(value, str) else value)


def _outputs(answer: Any) -> Sequence[tuple[Any, Array]]:
    raw = list(answer.raw_output_contents)
    return [
        (tensor, array_of_output(tensor, raw[at] if raw else None)) for at, tensor in enumerate(answer.outputs)
    ]


def _json_line(answer: Any) -> str:
    """Return the response as in KServe V2's REST."""
    outputs = (
        f"{_open_object({'name': output.name, 'datatype': output.datatype, 'shape': list(output.shape)})}"
        f'"data":{json_text(output.datatype, array)}}}'
        for output, array in _outputs(answer)
    )
    head = _open_object({"model_name": answer.model_name, "model_version": answer.model_version})
    return f'{head}"outputs":[{",".join(outputs)}]}}'


def _open_object(values: dict[str, Any]) -> str:
    """Return a JSON object without its closing brace, to append more."""
    return json.dumps(values, separators=(",", ":"))[:-1] + ","


def _plain_lines(answer: Any) -> str:
    return "\n".join(
        f"{output.name} {output.datatype} {shape_text(output.shape)}: {plain_text(output.datatype, array)}"
        for output, array in _outputs(answer)
    )
