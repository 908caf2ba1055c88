"""Converts scheduling options to messages of Triton's model configuration: the inverse of `scheduling`.

Options that Triton lacks are omitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from triglot.model.scheduling import (
    ControlInput,
    DirectStrategy,
    DynamicBatching,
    OldestStrategy,
    QueuePolicy,
    SequenceBatching,
    SequenceState,
    Step,
)
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.ensembles import LATEST_VERSION
from triglot.repository.config.values import data_type_of

_CONTROL = pb.ModelSequenceBatching.Control
_PAIRS = {"INT32": "int32_false_true", "FP32": "fp32_false_true", "BOOL": "bool_false_true"}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def dynamic_batching_message(batching: DynamicBatching) -> pb.ModelDynamicBatching:
    """Return the message of `dynamic_batching`."""
    message = pb.ModelDynamicBatching(
        preferred_batch_size=batching.preferred_sizes,
        max_queue_delay_microseconds=_microseconds(batching.max_queue_delay),
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
    )
    if batching.policy != QueuePolicy():
        message.default_queue_policy.CopyFrom(_policy(batching.policy))
    for level, policy in batching.policies.items():
        message.priority_queue_policy[level].CopyFrom(_policy(policy))
    return message


def _policy(policy: QueuePolicy) -> pb.ModelQueuePolicy:
    return pb.ModelQueuePolicy(
        timeout_action=pb.ModelQueuePolicy.DELAY if policy.delay_expired else pb.ModelQueuePolicy.REJECT,
        default_timeout_microseconds=_microseconds(policy.timeout),
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def sequence_batching_message(batching: SequenceBatching) -> pb.ModelSequenceBatching:
    """Return the message of `sequence_batching`."""
    message = pb.ModelSequenceBatching(
        max_sequence_idle_microseconds=_microseconds(batching.max_idle),
        control_input=map(_control, batching.controls),
        state=map(_state, batching.states),
        iterative_sequence=batching.iterative,
    )
    strategy = batching.strategy
    if isinstance(strategy, OldestStrategy):
        message.oldest.CopyFrom(
            pb.ModelSequenceBatching.StrategyOldest(
                max_candidate_sequences=strategy.max_candidate_sequences,
                preferred_batch_size=strategy.preferred_sizes,
                max_queue_delay_microseconds=_microseconds(strategy.max_queue_delay),
                preserve_ordering=strategy.preserve_ordering,
            )
        )
    else:
        message.direct.CopyFrom(_direct(strategy))
    return message


def _direct(strategy: DirectStrategy) -> pb.ModelSequenceBatching.StrategyDirect:
    return pb.ModelSequenceBatching.StrategyDirect(
        max_queue_delay_microseconds=_microseconds(strategy.max_queue_delay),
        minimum_slot_utilization=strategy.minimum_slot_utilization,
    )


def _control(tensor: ControlInput) -> pb.ModelSequenceBatching.ControlInput:
    control = _CONTROL(kind=f"CONTROL_SEQUENCE_{tensor.kind}")
    if tensor.kind == "CORRID":
        control.data_type = data_type_of(tensor.datatype)
    else:
        kind = {"INT32": int, "FP32": float, "BOOL": bool}[tensor.datatype]
        getattr(control, _PAIRS[tensor.datatype]).extend([kind(tensor.false), kind(tensor.true)])
    return pb.ModelSequenceBatching.ControlInput(name=tensor.name, control=[control])


def _state(state: SequenceState) -> pb.ModelSequenceBatching.State:
    message = pb.ModelSequenceBatching.State(
        input_name=state.input_name,
        output_name=state.output_name,
        data_type=data_type_of(state.datatype),
        dims=state.dims,
    )
    if (first := state.initial) is not None:
        initial = message.initial_state.add(
            name=first.name, data_type=data_type_of(first.datatype), dims=first.dims
        )
        if first.file is None:
            initial.zero_data = True
        else:
            initial.data_file = first.file.name
    return message


def ensemble_message(steps: Sequence[Step], max_inflight_requests: int) -> pb.ModelEnsembling:
    """Return the message of `ensemble_scheduling`."""
    return pb.ModelEnsembling(
        step=[
            pb.ModelEnsembling.Step(
                model_name=step.model,
                model_version=step.version or LATEST_VERSION,
                input_map=step.inputs,
                output_map=step.outputs,
            )
            for step in steps
        ],
        max_inflight_requests=max_inflight_requests,
    )
