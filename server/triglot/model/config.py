"""The configuration of a model, independent of the file or request that it came in (spec 1.4, 5.6, 5.7)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from triglot.core.response_buffer import MAX_UNREAD_BYTES
from triglot.model.scheduling import DynamicBatching, SequenceBatching, Step

MAX_INSTANCES = 1000
"""Limit on the instances of one group and of one model; each instance is a thread or a process."""


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Selects the versions on disk to serve: all, the `latest` highest, or the `specific` ones (tfs 6.1).

    Raise `ValueError` when `latest` is below 1, or when both are given.
    """

    latest: int | None = None
    specific: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if self.latest is not None and self.latest < 1:
            raise ValueError(f"latest: expected at least 1 version, got {self.latest}")
        if self.latest is not None and self.specific is not None:
            raise ValueError("expected the latest versions or specific ones, got both")

    def wanted(self, found: Collection[int]) -> list[int]:
        """Return the selected ones of the `found` versions, in ascending order."""
        versions = sorted(found)
        if self.specific is not None:
            return [version for version in versions if version in self.specific]
        return versions if self.latest is None else versions[-self.latest :]

    def missing(self, found: Collection[int]) -> list[int]:
        """Return the `specific` versions that are not in `found`, in ascending order."""
        return sorted((self.specific or frozenset()).difference(found))


EXECUTIONS = ("thread", "process", "ray")
"""Valid values of `execution`."""
REMOTE_EXECUTIONS = ("process", "ray")
"""Those whose instances load the model themselves."""
INLINE_REMOVED = "expected thread, process or ray; 'inline' was removed: an async def infer runs on the event loop"
ALL = VersionPolicy()
LATEST = VersionPolicy(latest=1)


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """An input or output of a configuration.

    Attributes:
        datatype: KServe datatype; "" takes the model's own.
        dims: Shape, without the batch dim when `ModelConfig.max_batch_size` > 0; None takes the model's own.
        label_file: File with one class label per line.
        optional: Whether a request may omit this input.
        reshape: Shape that the model sees where clients see `dims`; None means the same shape.
    """

    name: str
    datatype: str
    dims: Sequence[int] | None
    label_file: Path | None = None
    optional: bool = False
    reshape: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """A group of instances.

    With `kind` GPU there are `count` instances on each of the `gpus` (on every GPU if `gpus` is empty); with CPU
    and MODEL there are `count` in total. AUTO means GPU where one is available, else CPU. MODEL means that the
    model places itself.
    """

    kind: str = "AUTO"
    count: int = 1
    gpus: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class WarmUpInput:
    """An input of a warm-up request, without the batch dim: zeros, `random` values, or the contents of `file`."""

    datatype: str
    dims: Sequence[int]
    random: bool = False
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class WarmUpRequest:
    """A request that runs `count` times before a version takes calls; `batch_size` 0 means no batch dim."""

    name: str
    inputs: Mapping[str, WarmUpInput]
    batch_size: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """The device of an instance: "CPU", GPU number `id`, or "MODEL" if the model places itself."""

    kind: str
    id: int = 0

    def __str__(self) -> str:
        return f"GPU {self.id}" if self.kind == "GPU" else self.kind


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a model. An empty or None field leaves the choice to the model.

    Attributes:
        backend: Backend that loads the model.
        file_name: Name of the model file.
        max_batch_size: Largest batch; 0 means that requests have no batch dim.
        max_instances: Limit on the instances of all groups on all available GPUs.
        parameters: Free settings for the model's own code.
        dynamic_batching: Excludes `sequence_batching`.
        ensemble: Steps of an ensemble.
        max_inflight_requests: Limit on concurrent calls of each ensemble step; 0 means no limit.
        response_cache: Whether responses are cached, if the server has a response cache.
        first_response_buckets: Upper bounds of the histogram of the time to the first response, in milliseconds.
        execution: One of `EXECUTIONS`.
        cpus: CPUs that the instances are pinned to, in round-robin order; empty means any CPU.
        hang_seconds, longest_run, idempotent, inputs_in_place: As in `Model`.
        environment: Folder or archive with the Python that the model's processes run in; None: the server's
            Python. Or a list of packages, for a Python that has them.
        builds_environment: Whether an environment of a list of packages may be built now; the server's option.
        max_unread_bytes: The server's option: bytes of a request's responses that are kept for its client.
        op_libraries: Shared libraries with operations of TensorFlow; the server's, not part of the model's own.
        traffic: Weights by version; they belong to the model and not to a version.
        ray: Fields of `RayOptions` that override those of the model's class.
        name: Name under which the model is served; "" before it is loaded.
        source: Name of the configuration (its file) in messages.
        text: The whole configuration in Triton's JSON (spec 3.7), zero values included; "" without a
            configuration.
        sign: Fingerprint of the configuration without the name (the folder decides it), the version policy (it
            belongs to the model and not to a version), the traffic (so does it) and the instance groups (see
            `groups_sign`).
        groups_sign: Fingerprint of the instance groups.
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
    idempotent: bool | None = None
    inputs_in_place: bool | None = None
    environment: Path | None = None
    builds_environment: bool = field(default=False, compare=False)
    max_unread_bytes: int = field(default=MAX_UNREAD_BYTES, compare=False)
    op_libraries: Sequence[Path] = field(default=(), compare=False)
    traffic: Mapping[str, float] = field(default_factory=dict, compare=False)
    ray: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    text: str = field(default="", compare=False, repr=False)
    sign: str = field(default="", repr=False)
    groups_sign: str = field(default="", repr=False)

    owns_process: ClassVar[bool] = False
    """Whether the model is loaded in a process that is its instance's alone."""

    def name_for(self, file: Path) -> str:
        """Return the name that the model's code sees: the served one, or else that of its file's folder."""
        folder = file.parent
        return self.name or (folder.parent if folder.name.isdecimal() else folder).absolute().name

    def differs_only_in_instances(self, before: ModelConfig) -> bool:
        """Whether only the instance groups differ from those of the configuration `before`."""
        of_before = replace(self, instance_groups=before.instance_groups, groups_sign=before.groups_sign)
        return self != before and of_before == before

    def devices(self, gpu_count: Callable[[], int]) -> list[Device]:
        """Return the device of each instance; empty without instance groups. `gpu_count` counts usable GPUs.

        Raise `ValueError`, which names the key, for a GPU that does not exist.
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
"""Configuration of a model that has none."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Where, and how many of, a model's requests are recorded.

    `prefix` is the common path prefix of the files. `rate`, from 0 to 1, is the share of the requests that are
    recorded, chosen at random.
    """

    prefix: str
    rate: float
