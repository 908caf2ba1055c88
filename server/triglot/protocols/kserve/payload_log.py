"""Requests and responses as CloudEvents for tools that look for drift, in the form of KServe's logger.

Strategy: a sampled request has a `Payload` until it ends. The event loop keeps references, and copies of what may
change; the thread that sends the events encodes them as KServe V2's JSON. What does not fit into its queue is
dropped, and counted. Both events of a request have one id.
"""

from __future__ import annotations

import base64
import http.client
import os
import random
import ssl
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.fast_json import dumps
from triglot.core.running import Watcher
from triglot.core.tensor import bytes_elements, datatype_of
from triglot.core.types import InferenceRequest, InferenceResponse, OutputTensor, owned
from triglot.dataplane.request_path import RequestRecorder
from triglot.model.validation import bind_inputs
from triglot.protocols.kserve.codec import packing_size
from triglot.protocols.kserve.json_elements import json_of_elements
from triglot.scheduling.servable import Servable
from triglot.telemetry.calls import Counter as Metric
from triglot.telemetry.file_writer import FileWriter
from triglot.telemetry.json_lines import utc_time

REQUEST = "org.kubeflow.serving.inference.request"
RESPONSE = "org.kubeflow.serving.inference.response"
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Limit on the bytes of events that wait to be sent."""
EVENT_BYTES = 2048
"""What an event takes beside its payload, as measured."""
SEND_SECONDS = 10.0
JSON, BATCH = "application/json", "application/cloudevents-batch+json"
_SAFE = "".join(character for character in map(chr, range(0x21, 0x7F)) if character not in '"%')
"""Characters of a header's value that are not escaped (HTTP protocol binding 3.1.3.2)."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event: the model that it is about, and what returns its own attributes and its data."""

    model: str
    attributes: Callable[[], Mapping[str, str]]
    encode: Callable[[], bytes]

    def structured(self) -> bytes:
        """Return the event in JSON (JSON event format 3)."""
        head = dumps({**self.attributes(), "datacontenttype": JSON})
        return head[:-1] + b',"data":' + self.encode() + b"}"

    def headers(self) -> dict[str, str]:
        """Return the header fields of binary mode."""
        fields = {f"ce-{name}": quote(value, safe=_SAFE) for name, value in self.attributes().items()}
        return {**fields, "content-type": JSON}


class EventFile:
    """A file with an event in each line, for its user and group; opened for each write, so it may be renamed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.send([])

    def send(self, events: Iterable[Event]) -> None:
        """Append events. Raise `OSError`."""
        with open(self.path, "ab", buffering=0, opener=partial(os.open, mode=0o640)) as file:
            file.write(b"".join([event.structured() + b"\n" for event in events]))

    def close(self) -> None:
        """Do nothing: nothing is open."""


class EventReceiver:
    """A receiver over HTTP: of single events in binary mode, or of batches. Keeps its connection."""

    def __init__(self, url: str, *, batches: bool) -> None:
        self._batches = batches
        parts = urlsplit(url)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        context = ssl.create_default_context()
        self._connect: Callable[[], http.client.HTTPConnection] = (
            partial(http.client.HTTPSConnection, parts.netloc, timeout=SEND_SECONDS, context=context)
            if parts.scheme == "https"
            else partial(http.client.HTTPConnection, parts.netloc, timeout=SEND_SECONDS)
        )
        self._connection: http.client.HTTPConnection | None = None

    def send(self, events: Sequence[Event]) -> None:
        """Post events. Raise `OSError`, and `HTTPException`."""
        if self._batches:
            self._post(b"[" + b",".join([event.structured() for event in events]) + b"]", {"content-type": BATCH})
            return
        for event in events:
            self._post(event.encode(), event.headers())

    def _post(self, body: bytes, headers: Mapping[str, str]) -> None:
        kept = self._connection is not None
        connection = self._connection = self._connection or self._connect()
        try:
            connection.request("POST", self._target, body, headers)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._connection = None
            if not (kept and isinstance(error, ConnectionError)):
                raise
            self._post(body, headers)  # The receiver may have closed a connection that was not used for a while.
            return
        if not 200 <= response.status < 300:
            raise OSError(f"HTTP {response.status} {response.reason}")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


class PayloadLog(RequestRecorder):
    """Chooses the requests whose events are sent, and queues these. On the event loop.

    `target`: an http:// or https:// URL, or a file. `rate`: the share of requests. `batch`: most events in one
    request to the URL. `attributes`: those of all events. `metadata`: names of the requests' metadata to send.
    Raise `OSError` for a file that cannot be written.
    """

    def __init__(
        self, target: str, rate: float, batch: int, attributes: Mapping[str, str], metadata: Sequence[str]
    ) -> None:
        is_url = target.startswith(("http://", "https://"))
        self._receiver = EventReceiver(target, batches=batch > 1) if is_url else EventFile(target)
        self._rate = rate
        self._batch = batch
        self._attributes = attributes
        self._metadata = metadata
        slow = "its receiver is too slow" if is_url else "the disk is too slow"
        self._writer = FileWriter("payload events", target, MAX_WAITING_BYTES, slow)
        self._events: list[Event] = []
        """Those of the next batch. On the thread."""
        self._queued = self._taken = 0
        """How many events were queued, and how many of them the thread has taken."""
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._closed = False

    def record(self, servable: Servable, request: InferenceRequest, call: Call) -> Watcher | None:
        """See `RequestRecorder`. Calls that models make, and warm-ups, have no events."""
        if self._closed or not call.size or random.random() >= self._rate:
            return None
        if call.borrows:
            try:
                request.inputs = list(map(owned, request.inputs))
            except MemoryError:
                self._count(servable.name, "dropped")
                return None
        sent = call.metadata if self._metadata else {}
        metadata = {name: value for name in self._metadata if isinstance(value := sent.get(name), str)}
        return Payload(self, servable, request, call, metadata)

    def attributes(self, kind: str, event_id: str, model: str, metadata: str, seconds: float) -> dict[str, str]:
        """Return the attributes of an event; `seconds`: its time since the epoch. On the thread."""
        own = {"specversion": "1.0", "id": event_id, "type": kind, "time": utc_time(seconds)}
        return {"inferenceservicename": model, **self._attributes, "metadata": metadata, **own}

    def put(self, event: Event, size: int) -> None:
        """Queue an event with a payload of about `size` bytes; it is dropped if too many bytes are queued."""
        if self._writer.put(partial(self._send, event), size + EVENT_BYTES):
            self._queued += 1
        else:
            self._count(event.model, "dropped")

    def _send(self, event: Event) -> None:
        """Send an event with those before it, unless more are queued and fit into the batch. On the thread."""
        self._taken += 1
        self._events.append(event)
        if self._taken < self._queued and len(self._events) < self._batch:
            return
        events, self._events = self._events, []
        outcome = "dropped"
        try:
            self._receiver.send(events)
            outcome = "sent"
        finally:
            for done in events:
                self._count(done.model, outcome)

    def _count(self, model: str, outcome: str) -> None:
        with self._lock:
            self._counts[model, outcome] += 1

    def counters(self) -> Iterator[Metric]:
        """See `Observer`."""
        with self._lock:
            counts = list(self._counts.items())
        yield Metric("triglot_payload_events", "CloudEvents with payloads.", ("model", "outcome"), counts)

    def close(self) -> None:
        """Stop, and wait until the queued events are sent, see `FileWriter.close`."""
        self._closed = True
        self._writer.close()
        self._receiver.close()


class Payload(Watcher):
    """A request and its responses, until it has ended: one event for each."""

    __slots__ = ("_id", "_log", "_metadata", "_request", "_sent", "_servable", "_signature", "_size")

    def __init__(
        self,
        log: PayloadLog,
        servable: Servable,
        request: InferenceRequest,
        call: Call,
        metadata: Mapping[str, str],
    ) -> None:
        self._log = log
        self._servable = servable.name, str(servable.version)
        self._request = request
        self._signature = servable.signatures.get(request.signature_name or servable.default_signature)
        self._size = call.size
        self._id = uuid.uuid4().hex
        # Headers may hold any bytes, which Python's texts have as lone surrogates.
        texts = {name: value.encode(errors="replace").decode() for name, value in metadata.items()}
        self._metadata = dumps({name: [value] for name, value in texts.items()}).decode()
        self._sent = False

    def on_response(self, response: InferenceResponse) -> None:
        """See `Watcher`."""
        self._send_request()
        try:
            # After the response has been sent, the model may reuse its arrays.
            outputs = [OutputTensor(o.name, o.datatype, o.array.copy(), o.parameters) for o in response.outputs]
        except MemoryError:
            return
        model, version = self._servable
        head = {"model_name": model, "model_version": version, "id": response.id}
        size = packing_size(response) + sum(output.array.nbytes for output in outputs)
        self._put(RESPONSE, partial(_encode, head, response.parameters, "outputs", outputs), size)

    def on_end(self, response: InferenceResponse | None) -> None:
        """See `Watcher`. A request that failed has no response."""
        self._send_request()
        if response is not None:
            self.on_response(response)

    def _send_request(self) -> None:
        if not self._sent:
            self._sent = True
            self._put(REQUEST, self._encode_request, self._size)

    def _encode_request(self) -> bytes:
        request = self._request
        tensors: list[OutputTensor] = []
        if self._signature is not None:
            try:
                inputs = bind_inputs(self._signature, request)
                tensors = [OutputTensor(name, datatype_of(array), array) for name, array in inputs.items()]
            except ServingError:  # An invalid request has no tensors.
                pass
        return _encode({"id": request.id}, request.parameters, "inputs", tensors)

    def _put(self, kind: str, encode: Callable[[], bytes], size: int) -> None:
        model = self._servable[0]
        attributes = partial(self._log.attributes, kind, self._id, model, self._metadata, time.time())
        self._log.put(Event(model, attributes, encode), size)


def _encode(
    head: Mapping[str, str], parameters: Mapping[str, Any], key: str, tensors: Sequence[OutputTensor]
) -> bytes:
    """Return a request or a response in V2's JSON."""
    members = {**head, "parameters": dict(parameters)}
    fields = {name: value for name, value in members.items() if value}
    start = dumps(fields)[:-1] + (b"," if fields else b"")
    return start + dumps(key) + b":[" + b",".join(map(_encode_tensor, tensors)) + b"]}"


def _encode_tensor(tensor: OutputTensor) -> bytes:
    """Return a tensor with its elements; bytes that are not UTF-8 as MLServer's content type `base64`."""
    head: dict[str, Any] = {"name": tensor.name, "shape": tensor.array.shape, "datatype": tensor.datatype}
    parameters = dict(tensor.parameters)
    try:
        data = b"".join(json_of_elements(tensor))
    except InvalidArgument:
        if tensor.datatype == "BYTES":
            parameters["content_type"] = "base64"
            data = dumps([base64.b64encode(element).decode() for element in bytes_elements(tensor.array)])
        else:  # FP16 and BF16 have no JSON in V2: numbers say as much.
            data = dumps(tensor.array.astype(np.float32).reshape(-1).tolist())
    if parameters:
        head["parameters"] = parameters
    return dumps(head)[:-1] + b',"data":' + data + b"}"
