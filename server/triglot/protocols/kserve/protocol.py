"""KServe V2 with Triton's extensions, as a protocol of the server."""

from __future__ import annotations

from dataclasses import replace

from triglot.protocols.kserve import openapi
from triglot.protocols.kserve.generate import Generate
from triglot.protocols.kserve.log_settings import LogSetting
from triglot.protocols.kserve.model_config import ModelConfigs
from triglot.protocols.kserve.predict import Predict
from triglot.protocols.kserve.routes import kserve_routes
from triglot.protocols.kserve.service import KServe
from triglot.protocols.kserve.shared_memory import CudaSharedMemory, SystemSharedMemory
from triglot.protocols.kserve.statistics import ModelStatistics
from triglot.protocols.kserve.stream import StreamLimits
from triglot.protocols.kserve.trace_settings import TraceSetting
from triglot.protocols.protocol import Context, Protocol
from triglot.telemetry.log_settings import LogSettings


def kserve(context: Context) -> Protocol:
    """Return KServe's rows."""
    config, dataplane, limits = context.config, context.dataplane, context.json_limits
    logs = context.logs or LogSettings(context.telemetry.observers)
    service = KServe(
        dataplane,
        config.server_name,
        context.telemetry,
        [
            ModelConfigs(dataplane),
            ModelStatistics(dataplane),
            Predict(dataplane, limits),
            Generate(dataplane, limits),
            TraceSetting(dataplane),
            LogSetting(logs, dataplane.control),
            SystemSharedMemory(context.regions, dataplane.control),
            CudaSharedMemory(),
        ],
        context.regions,
        max_upload=config.max_message_size if config.allow_model_upload else 0,
        oip_platforms=config.platform_names == "oip",
        typed_contents=config.typed_contents,
        stream_limits=StreamLimits.within(config.max_queue_size, context.admission, config.max_unread_bytes),
    )
    routes = [replace(route, protocol="kserve") for route in kserve_routes(service, limits)]
    return Protocol([service.grpc_service()], routes, openapi.SCHEMAS)
