"""Reads the requests that a server has recorded in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from triglot.core.tensor import DATATYPES, Array
from triglot.pb.tfserving import prediction_log_pb2 as pb
from triglot.protocols.tfserving.tensor import MAX_FILLED_BYTES, read_tensor
from triglot.protocols.tfserving.tfrecord import read_records


def logs_in(folder: Path, prefix: str = "r") -> list[pb.PredictionLog]:
    """Return the records of all files with this prefix, file by file."""
    files = sorted(folder.glob(f"{prefix}-[0-9]*.tfrecord"))
    return [pb.PredictionLog.FromString(record) for file in files for record in read_records(file.read_bytes())]


def arrays_of(tensors: Mapping[str, Any]) -> dict[str, Array]:
    """Return the tensors of a request or response as arrays, by name."""
    arrays = {}
    for name, message in tensors.items():
        tensor = read_tensor(name, message, MAX_FILLED_BYTES)
        data = tensor.data
        if not isinstance(data, np.ndarray):
            data = np.frombuffer(data, DATATYPES[tensor.datatype].dtype)
        arrays[name] = data.reshape(tensor.shape)
    return arrays


def pairs_in(folder: Path, prefix: str = "r") -> list[tuple[list[float], list[float]]]:
    """Return input `x` and output `y` of each recorded Predict call."""
    return [
        (
            arrays_of(log.predict_log.request.inputs)["x"].ravel().tolist(),
            arrays_of(log.predict_log.response.outputs)["y"].ravel().tolist(),
        )
        for log in logs_in(folder, prefix)
    ]
