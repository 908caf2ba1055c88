"""The table of modules and names that a grps project can import from `grps_framework` (grps 6.1)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from triglot.backends.grps.components import CONVERTERS, INFERERS, built_in
from triglot.backends.grps.context import GrpsContext
from triglot.backends.grps.converter import Converter, ConverterRegister
from triglot.backends.grps.inferer import ModelInferer, ModelInfererRegister
from triglot.backends.grps.logs import SERVER_LOGGER, USER_LOGGER
from triglot.backends.grps.names import ImportNames, Lazy
from triglot.backends.grps.settings import read_project
from triglot.core.errors import ModelLoadError
from triglot.pb import service
from triglot.pb.grps import grps_pb2
from triglot.pb.grps.grps_pb2 import GrpsMessage
from triglot.telemetry.monitor import Aggregation, Monitor

_BUILT_IN = {
    "model_infer.torch_inferer": INFERERS["torch"],
    "model_infer.tf_inferer": INFERERS["tensorflow"],
    "converter.torch_tensor_converter": CONVERTERS["torch"],
    "converter.tf_tensor_converter": CONVERTERS["tensorflow"],
    "converter.trt_tensor_converter": CONVERTERS["tensorrt"],
}


log = logging.getLogger(__name__)


class AppMonitor:
    """Named numbers, aggregated per second; no method blocks or raises.

    Values that are neither int nor float are dropped and logged.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def avg(self, name: str, value: float) -> None:
        """Add a value; the metric is the mean of the second's values."""
        self._add(name, "avg", value)

    def max(self, name: str, value: float) -> None:
        """Add a value; the metric is the largest of the second."""
        self._add(name, "max", value)

    def min(self, name: str, value: float) -> None:
        """Add a value; the metric is the smallest of the second."""
        self._add(name, "min", value)

    def inc(self, name: str, value: float) -> None:
        """Add a value; the metric is the sum of the second."""
        self._add(name, "inc", value)

    def cdf(self, name: str, value: float) -> None:
        """Add a value; the metric is the distribution of the second."""
        self._add(name, "cdf", value)

    def _add(self, name: object, aggregation: Aggregation, value: object) -> None:
        if not isinstance(name, str) or not isinstance(value, int | float):
            log.error("app_monitor.%s(%r, %r): expected a name and an int or a float", aggregation, name, value)
            return
        # Subclasses, such as numpy's float64, count as numbers.
        self._monitor.add(name, aggregation, float(value) if isinstance(value, float) else int(value))


@dataclass(frozen=True, slots=True)
class GlobalConf:
    """`global_conf`: the values of both files."""

    server_conf: dict[str, Any]
    inference_conf: dict[str, Any]
    loaded: bool = True


@dataclass(frozen=True, slots=True)
class Registers:
    """The registers in which a project's modules register inferers and converters on import."""

    inferers: ModelInfererRegister = field(default_factory=ModelInfererRegister)
    converters: ConverterRegister = field(default_factory=ConverterRegister)


class GrpsServiceStub:
    """A client of `GrpsService` on any channel with grpc's `unary_unary` and `unary_stream`."""

    def __init__(self, channel: Any) -> None:
        descriptor = service("grps.protos.v1.GrpsService")
        for method in descriptor.methods:
            callable_of = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = callable_of(
                f"/{descriptor.full_name}/{method.name}",
                request_serializer=GrpsMessage.SerializeToString,
                response_deserializer=GrpsMessage.FromString,
            )
            setattr(self, method.name, call)


def provide_in_child() -> None:
    """Provide the names in a process that a project spawned; its current folder is the project's.

    Components registered and metrics added there stay in that process.
    """
    try:
        settings = read_project(Path())
        conf = GlobalConf(settings.server_conf, settings.inference_conf)
    except ModelLoadError:
        conf = GlobalConf({}, {}, loaded=False)
    import_names(Path.cwd(), conf, Registers(), Monitor(), {}).provide_missing()


def import_names(
    folder: Path,
    conf: GlobalConf,
    registers: Registers,
    monitor: Monitor,
    of_project: Mapping[str, Mapping[str, Lazy]],
) -> ImportNames:
    """Return everything that a project imports; `of_project` are names that depend on the loaded project."""
    inferers = {"ModelInferer": ModelInferer, "inferer_register": registers.inferers}
    converters = {"Converter": Converter, "converter_register": registers.converters}
    messages = {name: value for name, value in vars(grps_pb2).items() if not name.startswith("_")}
    table: dict[str, dict[str, Any]] = {
        "apis.grps_pb2": messages,
        "apis.grps_pb2_grpc": {"GrpsServiceStub": GrpsServiceStub},
        "conf.conf": {"global_conf": conf},
        "context.context": {"GrpsContext": GrpsContext},
        "converter.converter": {**converters, "ConverterRegister": ConverterRegister},
        "logger.logger": {"logger": _logger(SERVER_LOGGER), "clogger": _logger(USER_LOGGER)},
        "model_infer.inferer": {**inferers, "ModelInfererRegister": ModelInfererRegister},
        "monitor.monitor": {"app_monitor": AppMonitor(monitor)},
    }
    # grps' documentation uses this name.
    table["model_inferer.inferer"] = table["model_infer.inferer"]
    lazy = {name: {path.partition(":")[2]: partial(built_in, path)} for name, path in _BUILT_IN.items()}
    return ImportNames(folder, table, {**lazy, **of_project})


def _logger(name: str) -> logging.Logger:
    """Return the logger, with the documentation's short names for its methods added."""
    logger = logging.getLogger(name)
    vars(logger).update(err=logger.error, crit=logger.critical)
    return logger
