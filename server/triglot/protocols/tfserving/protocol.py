"""TensorFlow Serving, AI Platform and Vertex AI, as a protocol of the server."""

from __future__ import annotations

from dataclasses import replace

from triglot.protocols.protocol import Context, Protocol
from triglot.protocols.tfserving import openapi
from triglot.protocols.tfserving.ai_platform import AIPlatform, ai_platform_routes
from triglot.protocols.tfserving.metrics import metrics_route
from triglot.protocols.tfserving.models import Models
from triglot.protocols.tfserving.routes import RestApi, not_found_route, tfserving_routes
from triglot.protocols.tfserving.rows import tfserving_services
from triglot.protocols.tfserving.service import Predictions
from triglot.protocols.tfserving.vertex import Vertex, container_routes, vertex_routes
from triglot.protocols.tfserving.vertex_rows import vertex_service


def tfserving(context: Context) -> Protocol:
    """Return TensorFlow Serving's rows."""
    config, dataplane, limits = context.config, context.dataplane, context.json_limits
    predictions = Predictions(dataplane)
    models = Models(dataplane, config.max_requested_entries)
    services = tfserving_services(predictions, models, tensor_content=config.tensor_content)
    ai_platform = AIPlatform(dataplane, limits, named=config.named_prediction_models)
    vertex = Vertex(dataplane, ai_platform, config.endpoint_models)
    api = RestApi(dataplane, predictions, models, kserve_v1="kserve" in config.protocol_names, limits=limits)
    path = config.monitoring_path
    routes = [
        *([metrics_route(context.telemetry, dataplane.control, path)] if path else []),
        *container_routes(vertex, config.predict_route, config.health_route),
        *ai_platform_routes(ai_platform),
        *vertex_routes(vertex),
        *tfserving_routes(api, cors=config.cors),
    ]
    return Protocol(
        [*services, vertex_service(vertex, dataplane)],
        [replace(route, protocol="tfserving") for route in routes]
        # With other protocols, their own answer is the one to unknown paths.
        + ([not_found_route()] if config.protocol_names == {"tfserving"} else []),
        openapi.SCHEMAS,
        # TensorFlow Serving's health service knows its services without their package (tfs 1).
        [service.name.rpartition(".")[2] for service in services],
    )
