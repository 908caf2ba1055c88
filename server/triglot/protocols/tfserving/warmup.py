"""TensorFlow Serving's warm-up file: recorded requests to run before a version serves (tfs 6.6)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Code, InvalidArgument, ModelLoadError, ServingError
from triglot.dataplane.dataplane import DataPlane
from triglot.pb.tfserving import inference_pb2, prediction_log_pb2
from triglot.protocols.tfserving.codec import decode_predict
from triglot.protocols.tfserving.inference import decode_examples, decode_multi
from triglot.protocols.tfserving.service import Predictions
from triglot.protocols.tfserving.tfrecord import DamagedRecords, read_records
from triglot.protocols.wire import parse, serialize
from triglot.scheduling.servable import Servable

MAX_RECORDS = 1000


async def run_warm_up_file(dataplane: DataPlane, servable: Servable, file: Path) -> None:
    """Run the recorded requests in a file on a version. Raise `ModelLoadError`."""
    await warm_up(Predictions(dataplane), servable, await asyncio.to_thread(read_warm_up, file))


def read_warm_up(file: Path) -> list[prediction_log_pb2.PredictionLog]:
    """Return the recorded requests in a file. Raise `ModelLoadError`."""
    logs: list[prediction_log_pb2.PredictionLog] = []
    try:
        for record in read_records(file.read_bytes()):
            if len(logs) == MAX_RECORDS:
                text = f"Number of warmup records exceeds the maximum ({MAX_RECORDS}) at {file}"
                raise ModelLoadError(text, Code.INVALID_ARGUMENT)
            logs.append(parse(prediction_log_pb2.PredictionLog, record))
    except DamagedRecords as error:
        text = f"{file}: {error}. Please verify your warmup data is in TFRecord format."
        raise ModelLoadError(text, Code.DATA_LOSS) from None
    except InvalidArgument as error:
        raise ModelLoadError(f"{file}: Failed to parse warmup record: {error}", error.code) from None
    return logs


async def warm_up(
    predictions: Predictions, servable: Servable, logs: list[prediction_log_pb2.PredictionLog]
) -> None:
    """Run the recorded requests on a version, whichever model and version they name.

    Raise `ModelLoadError` for the first that fails.
    """
    runs: dict[str, Callable[[Any], Awaitable[Any]]] = {
        "predict_log": lambda log: predictions.predict_on(
            servable, decode_predict(serialize(log.request)), Call()
        ),
        "classify_log": lambda log: predictions.classify_on(
            servable, decode_examples(inference_pb2.ClassificationRequest, serialize(log.request)), Call()
        ),
        "regress_log": lambda log: predictions.regress_on(
            servable, decode_examples(inference_pb2.RegressionRequest, serialize(log.request)), Call()
        ),
        "multi_inference_log": lambda log: predictions.multi_inference_on(
            servable, decode_multi(serialize(log.request)), Call()
        ),
    }
    for number, log in enumerate(logs):
        kind = log.WhichOneof("log_type")
        if kind is None:
            continue
        if kind not in runs:
            text = f"{servable}: warm-up record {number}: Unsupported log_type for warmup: {kind}"
            raise ModelLoadError(text, Code.UNIMPLEMENTED)
        try:
            with servable:
                await runs[kind](getattr(log, kind))
        except ServingError as error:
            text = f"{servable}: warm-up record {number} failed: {error.message}"
            raise ModelLoadError(text, error.code) from error
