"""What a configuration says of a model, whatever file or request it came in (spec 1.4, 5.6, 5.7)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from triglot.model.scheduling import DynamicBatching, SequenceBatching, Step

MAX_INSTANCES = 1000
"""Of a group, and of a model; each is a thread."""


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which of the versions on disk are wanted: all, the `latest` highest, or the `specific` ones (tfs 6.1).

    Raises `ValueError` for a number below 1, and for both.
    """

    latest: int | None = None
    specific: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if self.latest is not None and self.latest < 1:
            raise ValueError(f"latest: expected at least 1 version, got {self.latest}")
        if self.latest is not None and self.specific is not None:
            raise ValueError("expected the latest versions or specific ones, got both")

    def wanted(self, found: Collection[int]) -> list[int]:
        """The wanted ones of the versions that were found, ascending."""
        versions = sorted(found)
        if self.specific is not None:
            return [version for version in versions if version in self.specific]
        return versions if self.latest is None else versions[-self.latest :]

    def missing(self, found: Collection[int]) -> list[int]:
        """The specific ones that were not found, ascending."""
        return sorted((self.specific or frozenset()).difference(found))


EXECUTIONS = ("thread", "process")
"""What an instance may be."""
INLINE_REMOVED = "expected thread or process; 'inline' was removed: an async def infer runs on the event loop"
ALL = VersionPolicy()
LATEST = VersionPolicy(latest=1)


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """An input or output: `dims` are its shape, without the batch dim when `ModelConfig.max_batch_size` > 0.

    `datatype` "" and `dims` None are the model's own.
    `label_file`: the file with a name for each class, one a line. `optional`: a request may leave this input out.
    `reshape`: the shape that the model has where clients have `dims`; None: the same one.
    """

    name: str
    datatype: str
    dims: Sequence[int] | None
    label_file: Path | None = None
    optional: bool = False
    reshape: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` instances: for each of the `gpus`, or of all of them, with `kind` GPU; in all with CPU and MODEL.

    AUTO is GPU where there is one, and CPU where there is none. MODEL: the model places itself.
    """

    kind: str = "AUTO"
    count: int = 1
    gpus: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class WarmUpInput:
    """An input of a warm-up request, without the batch dim: zeros, `random` values, or what `file` holds."""

    datatype: str
    dims: Sequence[int]
    random: bool = False
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class WarmUpRequest:
    """A request that runs `count` times before a version takes calls; `batch_size` 0: it has no batch dim."""

    name: str
    inputs: Mapping[str, WarmUpInput]
    batch_size: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """Where an instance runs: kind "CPU", "GPU" or "MODEL" (the model places itself); `id` is the GPU's."""

    kind: str
    id: int = 0

    def __str__(self) -> str:
        return f"GPU {self.id}" if self.kind == "GPU" else self.kind


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is configured; what is empty is for the model itself to say.

    `backend` and `file_name` say what to load, `parameters` are for the model's own code. `max_instances`: of all
    groups, on all GPUs that there are. `decoupled`: None where nothing is said. `dynamic_batching` and
    `sequence_batching` exclude each other. `ensemble` are the steps of a model that is made of others, and
    `max_inflight_requests` how many calls of each of these run at the same time, 0: as many as come.
    `response_cache`: keep its answers, where the server has a cache. `first_response_buckets`: upper limits of the
    buckets of its times to the first response, in milliseconds; none where nothing is said. `execution`: one of
    `EXECUTIONS`, "" where nothing is said. `cpus` are for the instances, in turn; none: any. `hang_seconds`,
    `longest_run` and `inputs_in_place` are the model's, None where nothing is said. `environment`: the Python that
    its processes run in, a folder or an archive; None: the server's. `source` is what messages call the
    configuration: its file. `text` is the whole of it in Triton's JSON (spec 3.7), with what is zero, and "" where
    there is none; `sign` changes with all of it but the name, which is the folder's, the version policy, which is
    of the model and no part of a version's own, and the instance groups, which have a sign of their own,
    `groups_sign`.
    """

    backend: str = ""
    file_name: str = ""
    version_policy: VersionPolicy = ALL
    max_batch_size: int = 0
    inputs: Sequence[TensorConfig] = ()
    outputs: Sequence[TensorConfig] = ()
    instance_groups: Sequence[InstanceGroup] = ()
    max_instances: int = field(default=MAX_INSTANCES, compare=False)
    decoupled: bool | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    warm_up: Sequence[WarmUpRequest] = ()
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble: Sequence[Step] = ()
    max_inflight_requests: int = 0
    response_cache: bool = False
    first_response_buckets: Sequence[float] = ()
    execution: str = ""
    cpus: Sequence[int] = ()
    hang_seconds: float | None = None
    longest_run: float | None = None
    inputs_in_place: bool | None = None
    environment: Path | None = None
    source: str = field(default="", compare=False)
    text: str = field(default="", compare=False, repr=False)
    sign: str = field(default="", repr=False)
    groups_sign: str = field(default="", repr=False)

    def says_other_instances(self, before: ModelConfig) -> bool:
        """Whether nothing but its instances differs from what was configured before."""
        of_before = replace(self, instance_groups=before.instance_groups, groups_sign=before.groups_sign)
        return self != before and of_before == before

    def devices(self, gpu_count: Callable[[], int]) -> list[Device]:
        """The device of each instance; empty when no instance group says so. `gpu_count`: how many GPUs there are.

        Raises `ValueError`, which names the key, for a GPU that is not there.
        """
        devices: list[Device] = []
        for number, group in enumerate(self.instance_groups):
            key = f"instance_group[{number}]"
            kind = group.kind
            gpus = gpu_count() if kind in ("AUTO", "GPU") else 0
            if kind == "AUTO":
                kind = "GPU" if gpus else "CPU"
            if kind != "GPU":
                devices += [Device(kind)] * group.count
                continue
            if not gpus:
                raise ValueError(f"{key}.kind: KIND_GPU, but the backend finds no usable GPU")
            for gpu in group.gpus or range(gpus):
                if not 0 <= gpu < gpus:
                    raise ValueError(f"{key}.gpus: expected numbers from 0 to {gpus - 1}, got {gpu}")
                devices += [Device("GPU", gpu)] * group.count
                if len(devices) > self.max_instances:
                    more = "; raise the server's --max-requested-instances for more"
                    raise ValueError(
                        f"{key}: expected at most {self.max_instances} instances, all groups together"
                        f"{more if self.max_instances < MAX_INSTANCES else ''}"
                    )
        return devices


NO_CONFIG = ModelConfig()
"""Of a model that has no configuration."""
