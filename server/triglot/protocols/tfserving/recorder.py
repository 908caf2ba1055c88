"""Records of requests and their responses, for replay and for warming up later versions (tfs 6.7).

Strategy: a sampled request has a `Record` until it ends. The event loop keeps references, and copies of what may
change; the thread that writes the files encodes them as TensorFlow Serving's PredictionLog in TFRecord format.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from triglot.core.call import Call
from triglot.core.errors import ServingError
from triglot.core.running import Watcher
from triglot.core.tensor import bytes_elements, datatype_of
from triglot.core.types import InferenceRequest, InferenceResponse, OutputTensor, owned
from triglot.dataplane.request_path import RequestRecorder
from triglot.model.config import Recording
from triglot.model.validation import bind_inputs
from triglot.pb.tfserving import inference_pb2, model_pb2, prediction_log_pb2
from triglot.protocols.tfserving.codec import encode_predict, encode_predict_request, spec_message
from triglot.protocols.tfserving.inference import (
    INPUTS,
    classification_message,
    classifications,
    encode_examples,
    regression_message,
    regressions,
)
from triglot.protocols.tfserving.record_files import RecordCounts, RecordFiles
from triglot.protocols.tfserving.tfrecord import framed
from triglot.protocols.wire import length_prefix, serialize
from triglot.scheduling.servable import Servable
from triglot.telemetry.calls import Counter
from triglot.telemetry.file_writer import FileWriter

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Limit of records that are queued to be written; further ones, and larger single ones, are dropped."""
ELEMENT_BYTES = 64
"""Approximate size of a BYTES element besides its text."""


class Record(Watcher):
    """One request and, once it has ended, its response.

    `model`, `version` and `signature_name` say what was called. `seconds`: when the request arrived, in seconds
    since 1970. `rate`: the sampling rate of the recording. `size`: approximate size in bytes.
    """

    __slots__ = (
        "_log",
        "model",
        "outputs",
        "rate",
        "request",
        "seconds",
        "signature",
        "signature_name",
        "size",
        "version",
    )

    def __init__(
        self,
        log: _RecordLog,
        rate: float,
        servable: Servable,
        signature_name: str,
        request: InferenceRequest,
        size: int,
    ) -> None:
        self.model = servable.name
        self.version = servable.version
        self.signature_name = signature_name
        self.signature = servable.signatures[signature_name]
        self.request = request
        self.outputs: list[OutputTensor] = []
        self.rate = rate
        self.seconds = int(time.time())
        self.size = size
        self._log = log

    def on_end(self, response: InferenceResponse | None) -> None:
        """End the record. A request that failed has no response, and is not recorded."""
        if response is None:
            return
        self.size += sum(map(_size, response.outputs))
        if self.size > MAX_WAITING_BYTES:
            why = f"a request and its answer have {self.size} bytes, more than {MAX_WAITING_BYTES}"
            self._log.drop(self.model, why)
            return
        try:
            # After the response has been sent, the model may reuse its arrays.
            self.outputs = [
                OutputTensor(output.name, output.datatype, output.array.copy()) for output in response.outputs
            ]
        except MemoryError as error:
            self._log.drop(self.model, repr(error))
            return
        self._log.put(self)

    def on_response(self, response: InferenceResponse) -> None:
        """See `Watcher`: only models that are not decoupled are recorded, so it is the only response."""
        self.on_end(response)


Encode = Callable[[Record], bytes]
"""Return a record as it is stored in a file. Raise `ServingError` for a request that cannot be recorded."""

_REQUEST, _RESPONSE = 1, 2
_LOGS = {"predict": 6, "classify": 2, "regress": 3}
"""Field number in PredictionLog of each method."""


def encode_record(record: Record) -> bytes:
    """Return a record of a TFRecord file.

    Requests of Classify and Regress become such logs, all others a Predict log. The logged request names no
    version, so that it can be replayed on any; the response names it. Raise `InvalidArgument` for outputs that
    are no valid result of Classify or Regress.
    """
    request, name = record.request, record.signature_name
    request_spec = model_pb2.ModelSpec(name=record.model, signature_name=name)
    spec = spec_message(record.model, record.version, name)
    head = prediction_log_pb2.PredictionLog()
    head.log_metadata.model_spec.CopyFrom(spec)
    head.log_metadata.sampling_config.sampling_rate = record.rate
    head.log_metadata.timestamp_secs = record.seconds
    inputs = bind_inputs(record.signature, request)
    if request.method == "predict":
        tensors = [OutputTensor(key, datatype_of(array), array) for key, array in inputs.items()]
        encoded = encode_predict_request(request_spec, tensors, request.outputs)
        response = InferenceResponse(record.model, str(record.version), "", record.outputs)
        answer = encode_predict(response, name, as_content=True)
    else:
        examples = bytes_elements(inputs[INPUTS])
        encoded = encode_examples(request_spec, examples)
        if request.method == "classify":
            classes = classification_message(classifications(record.outputs, len(examples)))
            answer = serialize(inference_pb2.ClassificationResponse(result=classes, model_spec=spec))
        else:
            values = regression_message(regressions(record.outputs, len(examples)))
            answer = serialize(inference_pb2.RegressionResponse(result=values, model_spec=spec))
    log = _field(_REQUEST, encoded) + _field(_RESPONSE, answer)
    return framed(serialize(head) + _field(_LOGS[request.method], log))


def _field(number: int, payload: bytes) -> bytes:
    return length_prefix(number, len(payload)) + payload


def _size(output: OutputTensor) -> int:
    if not output.array.dtype.hasobject:
        return output.array.nbytes
    return sum([len(item) if isinstance(item, bytes | str) else 0 for item in output.array.flat]) + (
        output.array.size * ELEMENT_BYTES
    )


class _RecordLog:
    """The record files with one prefix, and the thread that writes them."""

    def __init__(self, prefix: str, files: RecordFiles, encode: Encode, counts: RecordCounts) -> None:
        self._files = files
        self._encode = encode
        self._counts = counts
        self._writer = FileWriter("request records", Path(prefix), MAX_WAITING_BYTES)
        self.close = self._writer.close

    def put(self, record: Record) -> None:
        """Queue a record to be written; it is dropped when too many bytes are queued."""
        if not self._writer.put(partial(self._write, record), record.size):
            self._counts.add(record.model, "dropped")

    def drop(self, model: str, why: str) -> None:
        """Count a record of this model that could not be kept until it is written."""
        self._writer.lose(why)
        self._counts.add(model, "dropped")

    def _write(self, record: Record) -> None:
        outcome = "dropped"
        try:
            self._files.append(self._encode(record))
            outcome = "written"
        except ServingError:
            outcome = ""
        finally:
            if outcome:
                self._counts.add(record.model, outcome)


class Recorder(RequestRecorder):
    """Decides which requests are recorded, and has the records encoded by `encode` and written. On the event loop.

    `recording`: for models without a setting of their own. `suffix` is added to each prefix, since workers do not
    share files. `max_bytes`, `max_files`: see `RecordFiles`.
    """

    def __init__(
        self,
        recording: Recording | None = None,
        *,
        suffix: str = "",
        max_bytes: int = MAX_WAITING_BYTES,
        max_files: int = 0,
        encode: Encode = encode_record,
    ) -> None:
        self._encode = encode
        self._counts = RecordCounts()
        self._recording = recording
        self._suffix = suffix
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._logs: dict[str, _RecordLog] = {}
        self._own: Mapping[str, Recording] = {}
        self._closed = False
        self.configure({})

    def configure(self, own: Mapping[str, Recording]) -> None:
        """See `RequestRecorder`."""
        self._own = own
        wanted = {
            recording.prefix
            for recording in (self._recording, *own.values())
            if recording is not None and recording.rate > 0
        }
        for prefix in wanted - self._logs.keys():
            files = RecordFiles(prefix + self._suffix, self._max_bytes, self._max_files)
            self._logs[prefix] = _RecordLog(prefix + self._suffix, files, self._encode, self._counts)

    def record(self, servable: Servable, request: InferenceRequest, call: Call) -> Record | None:
        """Return the record of a request; None if it is not sampled, or cannot be replayed."""
        recording = self._own.get(servable.name, self._recording)
        if recording is None or random.random() >= recording.rate or self._closed:
            return None
        if not call.size:
            return None  # A model's own call, or a warm-up.
        name = request.signature_name or servable.default_signature
        if servable.decoupled or servable.sequences is not None or name not in servable.signatures:
            return None  # A TensorFlow Serving request cannot call such a model.
        log = self._logs[recording.prefix]
        if call.borrows and call.size <= MAX_WAITING_BYTES:
            try:
                request.inputs = list(map(owned, request.inputs))
            except MemoryError as error:
                log.drop(servable.name, repr(error))
                return None
        return Record(log, recording.rate, servable, name, request, call.size)

    def counters(self) -> Iterator[Counter]:
        """See `Observer`."""
        counts = self._counts.items()
        yield Counter("triglot_request_records", "Records of requests.", ("model", "outcome"), counts)

    def close(self) -> None:
        """Stop recording, and wait until all queued records are written."""
        self._closed = True
        for log in self._logs.values():
            log.close()
