"""`triglot replay`: sends recorded requests to a running server, and compares the responses."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from triglot.cli.grpc_client import CallError, Client, NoServer, add_connection, connected
from triglot.config.options import ConfigError
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, Array, array_over, object_array
from triglot.model.signature import shape_text
from triglot.pb.tfserving import inference_pb2, predict_pb2, prediction_log_pb2
from triglot.protocols.tfserving.tensor import MAX_FILLED_BYTES, BadTensor, read_tensor
from triglot.protocols.tfserving.tfrecord import DamagedRecords, read_records
from triglot.protocols.wire import parse
from triglot.run import FAILED, print_error

SERVICE = "tensorflow.serving.PredictionService"
MAX_SHOWN = 10
"""Limit on the differing records that are listed."""
MAX_TEXT = 200
"""Limit on the characters of a value that are printed."""
Values = Mapping[str, tuple[str, Array]]
"""Datatype and elements of each output, by name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference to the recorded response in an `output`; with output "" the call failed with the text `got`."""

    file: str
    record: int
    output: str
    expected: str
    got: str

    def __str__(self) -> str:
        where = f"{self.file} record {self.record}"
        if not self.output:
            return f"{where} failed: {self.got}"
        return f"{where}, output {self.output}: expected {self.expected}, got {self.got}"


@dataclass(slots=True)
class Results:
    """Counts of the compared records, and the first `differences`."""

    records: int = 0
    equal: int = 0
    different: int = 0
    failed: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, difference: Difference | None) -> None:
        """Count a record; None: its response is equal."""
        self.records += 1
        if difference is None:
            self.equal += 1
            return
        if difference.output:
            self.different += 1
        else:
            self.failed += 1
        if len(self.differences) < MAX_SHOWN:
            self.differences.append(difference)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "replay",
        help="send recorded requests to a running server, and compare the answers",
        usage="triglot replay [OPTION ...] FILE ...",
        description="Sends the requests of TFRecord files of TensorFlow Serving's PredictionLog, as --request-log "
        "writes them, to a server over gRPC (PredictionService), one after the other, and compares the answers "
        "with the recorded ones. The exit status is 0 only if all are equal.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="file of records")
    add("--model", default="", metavar="NAME", help="model to send them to (default: the recorded one)")
    add(
        "--model-version",
        type=int,
        metavar="VERSION",
        help="version to send them to (default: the recorded request's, or the one that the server chooses)",
    )
    add(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="how far floats may differ, absolutely and relative to the recorded ones (default: 0, exactly equal)",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    add_connection(parser, "--to", "each call")


def run(flags: Mapping[str, Any], _: Iterable[str]) -> int:
    """Send and compare the records; return the exit status. Raise `ConfigError`."""
    if not 0 <= flags["tolerance"] < math.inf:
        raise ConfigError(f"--tolerance: expected a number from 0, got {flags['tolerance']:g}")
    results = Results()
    try:
        with connected(flags, SERVICE, "TensorFlow Serving's API") as client:
            for file in flags["files"]:
                for number, log in enumerate(_logs(file)):
                    found = _difference(client, log, flags)
                    results.add(None if found is None else Difference(str(file), number, *found))
    except CallError as error:
        print_error(str(error))
        return FAILED
    except (KeyboardInterrupt, BrokenPipeError):  # The output is no longer read.
        return FAILED
    print(json.dumps(asdict(results), indent=2) if flags["json"] else _table(results))
    return 0 if results.equal == results.records else FAILED


def _logs(file: Path) -> Iterator[Any]:
    """Yield the messages of a file. Raise `ConfigError`."""
    try:
        for record in read_records(file.read_bytes()):
            yield parse(prediction_log_pb2.PredictionLog, record)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (DamagedRecords, InvalidArgument) as error:
        raise ConfigError(f"{file}: expected a TFRecord file of PredictionLog: {error}") from None


def _difference(client: Client, log: Any, flags: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return a differing output with its expected and actual value; "" if the call failed; None if all are equal.

    Raise `NoServer`, as the other records would fail, too.
    """
    kind = log.WhichOneof("log_type")
    if kind not in METHODS:
        return "", "", f"a {kind or 'record of nothing'} cannot be sent, only {', '.join(METHODS)}"
    method, response, values = METHODS[kind]
    recorded = getattr(log, kind)
    if not recorded.HasField("response"):
        return "", "", "no answer is recorded"
    request = recorded.request
    for named in request.tasks if kind == "multi_inference_log" else [request]:
        if flags["model"]:
            named.model_spec.name = flags["model"]
        if flags["model_version"] is not None:
            named.model_spec.version.value = flags["model_version"]
    try:
        answer = client.call(method, request, response)
        return _compare(values(recorded.response), values(answer), flags["tolerance"])
    except NoServer:
        raise
    except CallError as error:
        return "", "", str(error)
    except BadTensor as error:
        return "", "", f"an output cannot be read: {error.message}"


# --- responses ---


def _predicted(response: predict_pb2.PredictResponse) -> Values:
    values = {}
    for name, message in response.outputs.items():
        tensor = read_tensor(name, message, MAX_FILLED_BYTES)
        if tensor.datatype not in DATATYPES:
            raise BadTensor(f"'{name}' is {tensor.datatype}")
        data = tensor.data
        if not isinstance(data, np.ndarray):
            data = array_over(data, DATATYPES[tensor.datatype].dtype, tensor.shape)
        values[name] = tensor.datatype, data.reshape(tensor.shape)
    return values


def _classified(result: inference_pb2.ClassificationResult) -> Values:
    examples = [classification.classes for classification in result.classifications]
    shape = len(examples), len(examples[0]) if examples else 0
    labels = [label.label.encode() for classes in examples for label in classes]
    scores = np.array([label.score for classes in examples for label in classes], np.float32)
    if len(labels) != shape[0] * shape[1]:  # Possible from other servers.
        shape = len(labels), 1
    return {"classes": ("BYTES", object_array(labels, shape)), "scores": ("FP32", scores.reshape(shape))}


def _regressed(result: inference_pb2.RegressionResult) -> Values:
    return {"outputs": ("FP32", np.array([regression.value for regression in result.regressions], np.float32))}


def _each_result(response: inference_pb2.MultiInferenceResponse) -> Values:
    values: dict[str, tuple[str, Array]] = {}
    for at, result in enumerate(response.results):
        is_regression = result.WhichOneof("result") == "regression_result"
        of_item = (
            _regressed(result.regression_result) if is_regression else _classified(result.classification_result)
        )
        values |= {f"{at}: {name}": value for name, value in of_item.items()}
    return values


METHODS: Mapping[str, tuple[str, Any, Callable[[Any], Values]]] = {
    "predict_log": ("Predict", predict_pb2.PredictResponse, _predicted),
    "classify_log": ("Classify", inference_pb2.ClassificationResponse, lambda answer: _classified(answer.result)),
    "regress_log": ("Regress", inference_pb2.RegressionResponse, lambda answer: _regressed(answer.result)),
    "multi_inference_log": ("MultiInference", inference_pb2.MultiInferenceResponse, _each_result),
}


def _compare(expected: Values, got: Values, tolerance: float) -> tuple[str, str, str] | None:
    """Return the first differing output with its expected and actual value; None if all are equal."""
    for name in [*expected, *(name for name in got if name not in expected)]:
        if name not in expected or name not in got:
            return name, _kind(expected.get(name)), _kind(got.get(name))
        (datatype, wanted), (other, found) = expected[name], got[name]
        if (datatype, wanted.shape) != (other, found.shape):
            return name, _kind(expected[name]), _kind(got[name])
        differ = np.argwhere(~_equal(wanted, found, tolerance))
        if len(differ):
            first = tuple(differ[0])
            count = "" if wanted.size == 1 else f" ({len(differ)} of {wanted.size} elements differ)"
            at = f" at {shape_text(differ[0].tolist())}" if first else ""
            return name, f"{_text(wanted[first])}{at}", f"{_text(found[first])}{count}"
    return None


def _equal(expected: Array, got: Array, tolerance: float) -> Array:
    """Return where elements are equal; NaN counts as equal to NaN."""
    if expected.dtype.kind in "biuO" or expected.dtype.names:
        return np.asarray(expected == got)
    if expected.dtype.kind == "V":  # BF16
        expected, got = expected.astype(np.float32), got.astype(np.float32)
    return np.isclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def _kind(value: tuple[str, Array] | None) -> str:
    return "none" if value is None else f"{value[0]} {shape_text(value[1].shape)}"


def _text(element: Any) -> str:
    text = json.dumps(element.decode(errors="replace")) if isinstance(element, bytes) else str(element)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _table(results: Results) -> str:
    names = ("records", "equal", "different", "failed")
    numbers = [str(getattr(results, name)) for name in names]
    widths = [max(len(name), len(number)) for name, number in zip(names, numbers, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (names, numbers)
    ]
    if results.differences:
        lines += ["", *map(str, results.differences)]
    if more := results.records - results.equal - len(results.differences):
        lines.append(f"and {more} more")
    return "\n".join(lines)
