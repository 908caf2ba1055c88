"""The parts of the server, by kind and name: import strings, each imported when a configuration asks for it.

A part is a folder or a file that can be taken out. It imports the core and no other part, and the core imports no
part. What asks for a part that is not there gets a `MissingPart`, which names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "protocol": {
        "kserve": "triglot.protocols.kserve.protocol:kserve",
        "tfserving": "triglot.protocols.tfserving.protocol:tfserving",
        "grps": "triglot.protocols.grps.protocol:grps",
        "mlflow": "triglot.protocols.mlflow.protocol:mlflow",
        "monitor": "triglot.protocols.monitor.protocol:monitor",
        "traffic": "triglot.protocols.traffic.protocol:traffic",
        "openapi": "triglot.protocols.openapi.protocol:openapi",
    },
    "backend": {
        "catboost": "triglot.backends.catboost:load",
        "ensemble": "triglot.backends.ensemble:load",
        "lightgbm": "triglot.backends.lightgbm:load",
        "mlflow": "triglot.backends.mlflow:load",
        "mlserver": "triglot.backends.mlserver:load",
        "onnx": "triglot.backends.onnx:load",
        "predictor": "triglot.backends.predictor:load",
        "python": "triglot.backends.python:load",
        "sklearn": "triglot.backends.sklearn:load",
        "tensorflow": "triglot.backends.tensorflow:load",
        "torch": "triglot.backends.torch:load",
        "xgboost": "triglot.backends.xgboost:load",
        "kserve_model": "triglot.backends.kserve_model:model_of",
        "triton_python": "triglot.backends.triton_python.loading:model_of",
    },
    "executor": {
        "process": "triglot.executors.process.environment:Environment",
        "ray": "triglot.executors.ray.place:RayPlace",
    },
    "store": {
        "s3": "triglot.repository.storage.buckets:Bucket",
        "gs": "triglot.repository.storage.buckets:Bucket",
        "az": "triglot.repository.storage.buckets:Bucket",
        "hf": "triglot.repository.storage.hub:Hub",
        "https": "triglot.repository.storage.web:WebArchive",
    },
    "observer": {
        "access log": "triglot.telemetry.access_log:AccessLog",
        "audit log": "triglot.telemetry.audit_log:AuditLog",
        "payload log": "triglot.protocols.kserve.payload_log:PayloadLog",
        "request records": "triglot.protocols.tfserving.recorder:Recorder",
        "spans": "triglot.telemetry.spans.recorder:span_recorder",
        "warm-up records": "triglot.protocols.tfserving.warmup:run_warm_up_file",
    },
    "part": {
        "access control": "triglot.access.control:AccessControl",
        "workers": "triglot.workers.supervisor:supervise",
        "worker": "triglot.workers.link:Link",
    },
}
"""Kind → name → "module:attribute"."""
PAGES: Final = ("monitor", "traffic", "openapi")
"""Protocols that are served beside those that a configuration names."""
PROTOCOLS: Final = tuple(name for name in PARTS["protocol"] if name not in PAGES)
"""Protocols that a configuration names; the default order."""
PYTHON_CLASSES: Final = ("kserve_model", "triton_python")
"""Backends of classes in files of the python backend."""
BACKENDS: Final = tuple(name for name in PARTS["backend"] if name not in PYTHON_CLASSES)
"""Backends that a model's file or configuration names."""
SKLEARN: Final = "joblib scikit-learn"
SIGNING: Final = "model-signing pyOpenSSL"
MLFLOW: Final = "mlflow-skinny pandas skops"
DISTRIBUTIONS: Final = {
    "OpenSSL": SIGNING,
    "jwt": "'PyJWT[crypto]'",
    "joblib": SKLEARN,
    "mlflow": MLFLOW,
    "model_signing": SIGNING,
    "pynvml": "nvidia-ml-py",
    "skops": MLFLOW,
    "sklearn": SKLEARN,
}
"""What to install for a module, where that has another name or needs others beside it."""
NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia")


class MissingPart(ImportError):
    """A part, or a library that it needs, is not there; the text says which, and what to do."""


def load(kind: str, name: str) -> Any:
    """Return what stands for a part, imported. Raise `MissingPart`."""
    return load_string(PARTS[kind][name], f"the {name} {kind}")


def load_module(kind: str, name: str) -> Any:
    """Return the module of a part, imported: for other parts that use it. Raise `MissingPart`."""
    return load_string(PARTS[kind][name].partition(":")[0], f"the {name} {kind}")


def load_string(target: str, what: str) -> Any:
    """Return the attribute at "module:attribute", or the module without one, imported. Raise `MissingPart`.

    `what` names it in errors. Only strings of the operator come here, never those of clients.
    """
    name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}.") and not _is_own(name):
            raise MissingPart(f"{what}: there is no module {error.name} on Python's path") from error
        raise MissingPart(missing_text(what, error)) from error
    if attribute and not hasattr(module, attribute):
        raise MissingPart(f"{what}: {name} has no attribute {attribute!r}")
    return getattr(module, attribute) if attribute else module


def missing_text(what: str, error: ModuleNotFoundError) -> str:
    """Return the text for what needs a missing module: a part of this package, or a library to install."""
    name = error.name or str(error)
    if _is_own(name):
        return f"{what} is not in this build of Triglot, which has no {name}"
    module = name.partition(".")[0]
    return f"{what} needs {module}, which is not installed; run: {install(module)}"


def install(module: str) -> str:
    """Return the command that installs a module, by names that the package index has."""
    if module == "xgboost" and not NVIDIA_DRIVER.exists():
        return "pip install xgboost-cpu"  # A tenth of the size.
    return f"pip install {DISTRIBUTIONS.get(module, module)}"


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "triglot"
