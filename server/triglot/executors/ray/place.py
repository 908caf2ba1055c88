"""`RayPlace`, which starts the instances of a model as actors of a Ray cluster."""

from __future__ import annotations

from triglot.core.errors import Code, ModelLoadError
from triglot.executors.ray.cluster import ActorBody, Cluster
from triglot.executors.remote.place import Place, Program
from triglot.model.config import ModelConfig
from triglot.model.ray_options import RayOptions
from triglot.version import __version__


class RayPlace(Place):
    """The cluster at the program's address. Raise `ModelLoadError` for instance groups that it cannot have."""

    def __init__(self, program: Program) -> None:
        _check_groups(program.config, program.ray)
        file = program.file.absolute()
        self._address = program.ray_address
        # The folder of the model's files on the server, and the name of the one file that is sent, "" for all.
        self._root, self._only = (
            (file.parent, file.name) if program.folder is None else (program.folder.absolute(), "")
        )
        self._cluster: Cluster | None = None

    def open(self) -> None:
        """See `Place`. Raise `MissingDependency` when Ray is not installed."""
        self._cluster = Cluster.open(self._address, self._root / self._only)

    def cancel_load(self) -> None:
        """See `Place`. Does nothing: the pool ends the actors."""

    def start(self, program: Program, number: int) -> ActorBody:
        """See `Place`. Raise `OSError` when the driver cannot be reached, or loading was cancelled."""
        if self._cluster is None:
            raise OSError("loading was cancelled")
        options = program.ray
        order = {
            "version": __version__,
            "options": options.of_actor(_gpus(program.config)),
            "files": {"root": str(self._root), "only": self._only} if options.send_files else None,
        }
        return ActorBody(self._cluster, program, number, self._root, order)

    def close(self) -> None:
        """See `Place`."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


def _gpus(config: ModelConfig) -> float:
    """Return the default number of GPUs of an instance: 1 if the model has an instance group of kind GPU."""
    return float(any(group.kind == "GPU" for group in config.instance_groups))


def _check_groups(config: ModelConfig, options: RayOptions) -> None:
    """Check the instance groups of a model.

    Raise `ModelLoadError` for groups with GPU numbers, since the nodes are not known yet, and for several groups
    with `max_instances`.
    """
    if options.max_instances and len(config.instance_groups) > 1:
        raise ModelLoadError(
            f"{config.source}: instance_group: expected at most one with ray_max_instances, "
            f"got {len(config.instance_groups)}",
            Code.INVALID_ARGUMENT,
        )
    for at, group in enumerate(config.instance_groups):
        if group.gpus:
            raise ModelLoadError(
                f"{config.source}: instance_group[{at}].gpus: expected none with execution 'ray', which chooses "
                f"them (see ray_num_gpus), got {list(group.gpus)}",
                Code.INVALID_ARGUMENT,
            )
