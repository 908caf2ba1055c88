"""One model of a grps project, or its whole DAG, as the server calls it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from triglot.backends.grps.context import GrpsContext
from triglot.backends.grps.messages import NOT_A_MESSAGE, as_ours, is_message, parsed
from triglot.backends.grps.runner import Failures, ModelRunner, Pool, run_in_sequence
from triglot.backends.grps.tensors import arrays_of, message_of
from triglot.core.errors import Code, Internal
from triglot.core.model import Model
from triglot.core.tensor import Array
from triglot.core.types import Call

log = logging.getLogger(__name__)


class GrpsModel(Model):
    """Takes grps' messages as they were sent; of callers who speak of tensors it makes messages with `gtensors`.

    `model_id` is the "name-version" that such messages carry, "" for the DAG.
    """

    platform = "grps"
    takes_messages = True
    any_tensors = True
    max_queue_size = sys.maxsize  # What comes beyond max_concurrency waits without limit (grps 5.1).

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        model_id: str,
        description: Mapping[str, Any],
        pool: Pool,
        failures: Failures,
        release: Callable[[], None],
    ) -> None:
        self.description = description
        self.instances = pool.size
        self._runners = runners
        self._model_id = model_id
        self._pool = pool
        self._failures = failures
        self._release = release

    def infer(self, inputs: Mapping[str, Array], call: Call) -> Any:
        """A grps call gets the bytes of a GrpsMessage, any other one arrays by name.

        None where everything is said: answers that were streamed, and an answer of customised HTTP, which is
        `call.exchange.http_response`. Raises a `ServingError` of code INTERNAL for what the project's code raises
        or reports, and `InvalidArgument` for a request that is no message.
        """
        exchange = call.exchange
        with self._pool.slot(call):
            message = message_of(inputs, self._model_id) if exchange is None else parsed(exchange.message)
            context = GrpsContext.of(call)
            with closing(context):
                answer = self._run(message, context)
            if context.has_err():
                log.error("%s: the project's code says: %s", self._model_id or "the DAG", context.get_err_msg())
            if exchange is not None and exchange.http is not None:
                exchange.http_response = context.response
                call.outcome = _outcome(context)
                return None
            if context.finished:
                return None
            if context.has_err():
                raise Internal(str(context.get_err_msg()))
            if exchange is not None and exchange.streaming:
                return None
            if not is_message(answer):
                raise Internal(NOT_A_MESSAGE)
            return answer.SerializeToString() if exchange is not None else arrays_of(as_ours(answer))

    def _run(self, message: Any, context: GrpsContext) -> Any:
        try:
            return run_in_sequence(self._runners, message, context)
        except BaseException as error:  # SystemExit too: it fails this request, not the server.
            failure = self._failures.explain(error)
            if context.finished:  # The stream has ended well; there is nobody to tell.
                return None
            raise failure from None

    def close(self) -> None:
        """Gives up its part of the project."""
        self._runners = ()
        self._release()


def _outcome(context: GrpsContext) -> Code:
    """What came of customised HTTP: its status says so, or an error of the context (grps 10.11)."""
    status = 200 if context.response is None else context.response.status
    if 400 <= status < 500:
        return Code.INVALID_ARGUMENT
    return Code.INTERNAL if status >= 500 or context.has_err() else Code.OK
