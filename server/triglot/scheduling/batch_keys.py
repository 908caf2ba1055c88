"""Decides which requests can be executed together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument
from triglot.core.request_scheduling import own_parameters
from triglot.core.types import ParameterValue
from triglot.executors.declarations import looks_at_call
from triglot.executors.joining import NoBatchDim, layout_of, rows_of
from triglot.executors.work import Inputs
from triglot.model.model import Model, kind_in_lists, signatures_of
from triglot.model.scheduling import DynamicBatching

MAX_PADDED_BYTES = 256 * 1024 * 1024
"""Limit on an input of a padded batch; requests that might exceed it are batched only with equal shapes."""


class BatchKeys:
    """Computes rows and batch keys of a model's requests: requests with equal keys can share a batch."""

    def __init__(self, model: Model, batching: DynamicBatching) -> None:
        self._model = model
        self._batching = batching
        self._by_outputs = looks_at_call(model)
        self._by_parameters = model.takes_parameters or self._by_outputs
        # As in TensorFlow Serving, where the limit is not the model's own.
        self._strict = not model.max_batch_size and batching.max_batch_size > 0 and batching.limits_requests
        signatures = [] if model.any_tensors else signatures_of(model).values()
        self._optional = any(spec.optional for signature in signatures for spec in signature.inputs)
        self.max_request = model.max_batch_size or batching.max_batch_size
        self.max_rows = min(self.max_request, batching.max_execution_size or self.max_request)

    def of(self, inputs: Inputs, call: Call) -> tuple[int, Hashable]:
        """Return a request's rows and its key; the key is None for a request that is executed alone.

        Raise `InvalidArgument` as TensorFlow Serving does, where the limit is not the model's own (tfs 6.5).
        """
        batching = self._batching
        if not self.max_rows or (batching.signatures and call.signature_name not in batching.signatures):
            return 1, None
        if self._model.infer_batch is not None:
            # A call with a protocol's message names no signature.
            return self._rows_in_list(inputs), self._key_in_list(inputs, call)
        try:
            rows = rows_of(inputs)
        except NoBatchDim as error:
            if self._strict:
                raise InvalidArgument(f"Batching Run() {error}") from None
            return 1, None
        if self._strict and rows > self.max_request:
            raise InvalidArgument(f"Task size {rows} is larger than maximum input batch size {self.max_request}")
        if not 0 < rows <= self.max_request or call.exchange is not None:
            return rows, None
        # Parts of one request are not padded to the lengths of other requests: their outputs must fit together.
        any_lengths = batching.pad_variable_lengths and rows <= self.max_rows and self._stays_small(inputs)
        layout = layout_of(inputs, any_lengths=any_lengths)
        outputs = frozenset(call.requested_outputs) if self._by_outputs else ()
        if self._by_parameters and has_parameters(call) and (own := parameters_key(call)):
            return rows, (call.signature_name, layout, outputs, own)
        return rows, (call.signature_name, layout, outputs)

    def _stays_small(self, inputs: Inputs) -> bool:
        """Return whether a full batch of such requests stays small, even if padded to their largest dims."""
        return all(
            self.max_rows * max(array.shape[1:], default=1) ** (array.ndim - 1) * array.itemsize
            <= MAX_PADDED_BYTES
            for array in inputs.values()
        )

    def _key_in_list(self, inputs: Inputs, call: Call) -> Hashable:
        if self._optional or self._model.equal_shapes:
            # The model may check only once per list which inputs are present.
            return call.signature_name, kind_in_lists(self._model.equal_shapes, inputs)
        return (None if self._model.any_tensors else call.signature_name,)

    def _rows_in_list(self, inputs: Inputs) -> int:
        if self._model.any_tensors:
            return 1
        try:
            return min(max(1, rows_of(inputs)), self.max_rows)
        except NoBatchDim:
            return 1


def has_parameters(call: Call) -> bool:
    """Whether a request, or one of its tensors, has parameters."""
    return bool(call.parameters or call.input_parameters or call.output_parameters)


def parameters_key(call: Call) -> tuple[Hashable, ...]:
    """Return the parameters of a request and of its tensors, with types: in Python True == 1 == 1.0."""
    of_request: list[tuple[str, Mapping[str, ParameterValue]]] = [("", own_parameters(call.parameters))]
    groups = (of_request, sorted(call.input_parameters.items()), sorted(call.output_parameters.items()))
    return tuple(
        (group, place, name, type(value), value)
        for group, by_place in enumerate(groups)
        for place, parameters in by_place
        for name, value in sorted(parameters.items())
    )
