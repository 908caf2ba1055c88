"""What is offered: the rows of every protocol that the configuration names."""

from __future__ import annotations

from triglot.config import Config
from triglot.dataplane import DataPlane
from triglot.protocols import Route, Service
from triglot.protocols.grpc.health import Health
from triglot.protocols.grpc.reflection import reflection_services
from triglot.protocols.kserve.routes import kserve_routes
from triglot.protocols.kserve.service import KServe
from triglot.protocols.tfserving.ai_platform import AIPlatform, ai_platform_routes, vertex_routes
from triglot.protocols.tfserving.metrics import metrics_route
from triglot.protocols.tfserving.models import Models
from triglot.protocols.tfserving.routes import RestApi, liveness_route, not_found_route, tfserving_routes
from triglot.protocols.tfserving.rows import tfserving_services
from triglot.protocols.tfserving.service import Predictions
from triglot.telemetry import Telemetry


def rows(
    dataplane: DataPlane, predictions: Predictions, telemetry: Telemetry, config: Config
) -> tuple[list[Service], list[Route]]:
    """The gRPC services and the REST routes, health and reflection among them."""
    services: list[Service] = []
    routes: list[Route] = []
    health_names: list[str] = []
    with_kserve = "kserve" in config.protocol_names
    if with_kserve:
        kserve = KServe(dataplane, config.server_name)
        services.append(kserve.grpc_service())
        routes += kserve_routes(kserve)
    if "tfserving" in config.protocol_names:
        models = Models(dataplane)
        tensorflow = tfserving_services(predictions, models, telemetry, tensor_content=config.tensor_content)
        services += tensorflow
        # TensorFlow Serving's health service knows its services without their package (tfs 1).
        health_names += [service.name.rpartition(".")[2] for service in tensorflow]
        ai_platform = AIPlatform(dataplane)
        if config.monitoring_path:
            routes.append(metrics_route(telemetry, config.monitoring_path))
        routes += vertex_routes(ai_platform, config.predict_route, config.health_route)
        routes += ai_platform_routes(ai_platform)
        api = RestApi(dataplane, predictions, models, kserve_v1=with_kserve)
        routes += tfserving_routes(api, telemetry, cors=config.cors)
        routes.append(liveness_route() if with_kserve else not_found_route())
    health_names += [service.name for service in services]
    services.append(Health(dataplane, health_names).grpc_service())
    services += reflection_services([service.name for service in services])
    return services, routes
