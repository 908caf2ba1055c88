"""A request and the version that runs it: what the model gets of it, and what its answer becomes."""

from __future__ import annotations

import asyncio
import logging

from triglot.core.call import Call
from triglot.core.errors import Internal
from triglot.core.request_scheduling import scheduling_of
from triglot.core.tensor import LONG_BYTES, Array
from triglot.core.types import Answer, InferenceRequest, InferenceResponse
from triglot.model.signature import Signature
from triglot.model.validation import (
    InvalidRequest,
    bind_inputs,
    bind_outputs,
    check_parameters,
    check_requested_outputs,
)
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)


def admit(servable: Servable, request: InferenceRequest, call: Call) -> Signature:
    """The signature that is called; the call learns what the model may ask about it.

    Raises `InvalidRequest` for a signature or outputs that do not exist.
    """
    name = request.signature_name or servable.default_signature
    signature = servable.signatures.get(name)
    if signature is None:
        raise InvalidRequest(
            f"model '{servable.name}' has no signature '{name}', only {', '.join(sorted(servable.signatures))}"
        )
    if request.outputs:
        check_requested_outputs(signature, request)
        call.requested_outputs = request.outputs
    call.request_id = request.id
    call.parameters = request.parameters
    if request.input_parameters is not None:
        call.input_parameters = request.input_parameters
    if request.parameters:
        call.scheduling = scheduling_of(request.parameters, call.scheduling)
        timeout = call.scheduling.timeout
        if timeout and servable.sequences is None and not _has_queue_policies(servable):
            call.limit(timeout, f"the request's timeout of {timeout:g} seconds")
    call.signature_name = name
    return signature


def _has_queue_policies(servable: Servable) -> bool:
    """Whether these say what a request's `timeout` means: how long it may wait, if it may say so (spec 5.1).

    Those that only bound how many wait do not.
    """
    batching = servable.model.dynamic_batching
    if batching is None:
        return False
    policies = (batching.policy, *batching.policies.values())
    return any(policy.timeout or policy.allow_timeout_override for policy in policies)


def takes_long(request: InferenceRequest) -> bool:
    """Whether BYTES inputs of so many bytes are too much for the loop, which looks at each element."""
    return sum([len(one.data) for one in request.inputs]) > LONG_BYTES


async def bind(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """As `bind_inputs`, which it raises as; on a thread where that takes long."""
    if signature.takes_bytes and takes_long(request):
        return await asyncio.to_thread(bind_inputs, signature, request)
    return bind_inputs(signature, request)


def response_of(
    servable: Servable, signature: Signature, request: InferenceRequest, answer: object
) -> InferenceResponse:
    """The model's answer, checked.

    Raises `Internal` as `bind_outputs` and `check_parameters`; the log has it, too.
    """
    try:
        outputs = bind_outputs(
            signature, answer, request.outputs, servable.name, lenient_shapes=request.lenient_shapes
        )
        response = InferenceResponse(servable.name, str(servable.version), request.id, outputs)
        if not servable.on_loop:
            response.answer = answer
        if type(answer) is not dict and isinstance(answer, Answer):
            response.parameters = check_parameters(answer.parameters, servable.name)
            response.final = answer.final
    except Internal as error:
        log.error("%s", error.message)
        raise
    return response
