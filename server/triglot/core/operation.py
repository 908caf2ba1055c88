"""What calls are for: who may do what is said in these, never in paths."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Operation(enum.Enum):
    """What a row's calls are for. The value is the operation's name in files, logs and errors."""

    __hash__ = object.__hash__  # Of the one object that each is: Enum's own takes ten times as long.

    PUBLIC = "public"
    """What is the same for everybody, and says nothing of the server: files of web pages, the verbs of a path."""
    HEALTH = "health"
    METADATA = "metadata"
    """What the server and its models are: protocols, versions, signatures, states."""
    MODEL_CONFIG = "model-config"
    MODEL_INDEX = "model-index"
    STATISTICS = "statistics"
    METRICS = "metrics"
    """What all models do, together: the page for Prometheus and the monitor page."""
    SHARED_MEMORY_STATUS = "shared-memory-status"
    TRACE_STATUS = "trace-status"
    LOG_STATUS = "log-status"
    INFER = "infer"
    MODEL_CONTROL = "model-control"
    SHARED_MEMORY = "shared-memory-control"
    TRACE = "trace-settings"
    LOG = "log-settings"
    GRPS_STATE = "grps-state"
    """Online and Offline."""


ADMINISTRATION = frozenset(
    (Operation.MODEL_CONTROL, Operation.SHARED_MEMORY, Operation.TRACE, Operation.LOG, Operation.GRPS_STATE)
)
"""What changes the server."""
INSPECTION = frozenset(Operation) - ADMINISTRATION - {Operation.PUBLIC, Operation.HEALTH, Operation.INFER}
"""What is read of the server."""
TRITON_GROUPS: Mapping[str, frozenset[Operation]] = {
    "health": frozenset((Operation.HEALTH,)),
    "metadata": frozenset((Operation.METADATA,)),
    "inference": frozenset((Operation.INFER,)),
    "shared-memory": frozenset((Operation.SHARED_MEMORY_STATUS, Operation.SHARED_MEMORY)),
    "model-config": frozenset((Operation.MODEL_CONFIG,)),
    "model-repository": frozenset((Operation.MODEL_INDEX, Operation.MODEL_CONTROL)),
    "statistics": frozenset((Operation.STATISTICS,)),
    "trace": frozenset((Operation.TRACE_STATUS, Operation.TRACE)),
    "logging": frozenset((Operation.LOG_STATUS, Operation.LOG)),
}
"""The names of Triton's restricted groups (KServe V2 extensions; `--grpc-restricted-protocol`)."""
OPERATION_NAMES: Mapping[str, frozenset[Operation]] = {
    **{one.value: frozenset((one,)) for one in Operation if one is not Operation.PUBLIC},
    **TRITON_GROUPS,
    "inspect": INSPECTION,
    "administer": ADMINISTRATION,
}
"""What a file may call one or several operations."""
