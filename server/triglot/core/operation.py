"""Operations: the kinds of calls that permissions are granted for. A permission never depends on a path."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Operation(enum.Enum):
    """The kind of a row's calls. The value is its name in the access file, logs and errors."""

    __hash__ = object.__hash__  # Members are singletons; Enum's own hash takes ten times as long.

    PUBLIC = "public"
    """The same for every client, and discloses nothing about the server: files of web pages, OPTIONS requests."""
    HEALTH = "health"
    METADATA = "metadata"
    """About the server and its models: protocols, versions, signatures, states."""
    MODEL_CONFIG = "model-config"
    MODEL_INDEX = "model-index"
    STATISTICS = "statistics"
    METRICS = "metrics"
    """Metrics of all models together: the page for Prometheus and the monitor page."""
    SHARED_MEMORY_STATUS = "shared-memory-status"
    TRACE_STATUS = "trace-status"
    LOG_STATUS = "log-status"
    INFER = "infer"
    MODEL_CONTROL = "model-control"
    SHARED_MEMORY = "shared-memory-control"
    TRACE = "trace-settings"
    LOG = "log-settings"
    GRPS_STATE = "grps-state"
    """grps' Online and Offline."""


ADMINISTRATION = frozenset(
    (Operation.MODEL_CONTROL, Operation.SHARED_MEMORY, Operation.TRACE, Operation.LOG, Operation.GRPS_STATE)
)
"""Operations that change the server."""
INSPECTION = frozenset(Operation) - ADMINISTRATION - {Operation.PUBLIC, Operation.HEALTH, Operation.INFER}
"""Operations that only read the server's state."""
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
_RESTRICTED_TOO = {
    **dict.fromkeys(("metadata", "model-config", "statistics"), Operation.METRICS),
    "model-repository": Operation.GRPS_STATE,
}
"""What Triton's protocol does not have: metrics and the monitor page show what these three groups show."""
RESTRICTED_GROUPS: Mapping[str, frozenset[Operation]] = {
    name: group | ({_RESTRICTED_TOO[name]} if name in _RESTRICTED_TOO else frozenset())
    for name, group in TRITON_GROUPS.items()
}
"""What each of Triton's groups restricts, over all protocols. An operation may be in several."""
OPERATION_NAMES: Mapping[str, frozenset[Operation]] = {
    **{one.value: frozenset((one,)) for one in Operation if one is not Operation.PUBLIC},
    **TRITON_GROUPS,
    "inspect": INSPECTION,
    "administer": ADMINISTRATION,
}
"""Names that the access file may use, each for one operation or several."""
