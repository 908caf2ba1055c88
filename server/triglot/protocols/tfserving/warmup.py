"""TensorFlow Serving's warm-up file: recorded requests that run before a version takes calls (tfs 6.6)."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from triglot.core.errors import InvalidArgument, ModelLoadError, ServingError
from triglot.core.types import Call
from triglot.engine.servable import Servable
from triglot.pb.tfserving import inference_pb2, prediction_log_pb2
from triglot.protocols.tfserving.codec import decode_predict
from triglot.protocols.tfserving.inference import decode_examples, decode_multi
from triglot.protocols.tfserving.service import Predictions
from triglot.protocols.wire import parse, serialize

WARM_UP_FILE = Path("assets.extra") / "tf_serving_warmup_requests"
MAX_RECORDS = 1000
_HEADER, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


class DamagedRecords(ValueError):
    """The bytes are not in TFRecord format."""


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecord: CRC32C, rotated and shifted so that checksums of checksums are none."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 0xFF]
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + _MASK_DELTA) & 0xFFFFFFFF


def read_records(data: bytes) -> Iterator[bytes]:
    """The records of a TFRecord file. Raises `DamagedRecords`."""
    at = 0
    while at < len(data):
        if len(data) - at < _HEADER.size:
            raise DamagedRecords(f"truncated record at {at}")
        length, checksum = _HEADER.unpack_from(data, at)
        if masked_crc32c(data[at : at + 8]) != checksum:
            raise DamagedRecords(f"corrupted record at {at}")
        start = at + _HEADER.size
        at = start + length + _CHECKSUM.size
        if at > len(data):
            raise DamagedRecords(f"truncated record at {start}")
        record = data[start : start + length]
        if masked_crc32c(record) != _CHECKSUM.unpack_from(data, start + length)[0]:
            raise DamagedRecords(f"corrupted record at {start}")
        yield record


def read_warm_up(folder: Path) -> list[prediction_log_pb2.PredictionLog]:
    """The recorded requests of a version's folder; none without a file. Raises `ModelLoadError`."""
    file = folder / WARM_UP_FILE
    if not file.is_file():
        return []
    logs: list[prediction_log_pb2.PredictionLog] = []
    try:
        for record in read_records(file.read_bytes()):
            if len(logs) == MAX_RECORDS:
                raise ModelLoadError(f"Number of warmup records exceeds the maximum ({MAX_RECORDS}) at {file}")
            logs.append(parse(prediction_log_pb2.PredictionLog, record))
    except DamagedRecords as error:
        raise ModelLoadError(f"{file}: {error}. Please verify your warmup data is in TFRecord format.") from None
    except InvalidArgument as error:
        raise ModelLoadError(f"{file}: Failed to parse warmup record: {error}") from None
    return logs


async def warm_up(
    predictions: Predictions, servable: Servable, logs: list[prediction_log_pb2.PredictionLog]
) -> None:
    """Run the recorded requests on a version, whichever model and version they name.

    Raises `ModelLoadError` for the first that fails.
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
            raise ModelLoadError(f"{servable}: warm-up record {number}: Unsupported log_type for warmup: {kind}")
        try:
            with servable:
                await runs[kind](getattr(log, kind))
        except ServingError as error:
            raise ModelLoadError(f"{servable}: warm-up record {number} failed: {error.message}") from error
