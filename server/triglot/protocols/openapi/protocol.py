"""The OpenAPI document and its page, as a protocol of the server."""

from __future__ import annotations

from triglot.config.options import Config
from triglot.protocols import api_operation
from triglot.protocols.openapi.routes import openapi_routes
from triglot.protocols.protocol import Context, Protocol

DEFAULT_REST_PORT = Config().rest_port


def openapi(context: Context) -> Protocol:
    """Return the routes of the document, which covers the other protocols; TensorFlow Serving alone has none."""
    config = context.config
    if config.protocol_names == {"tfserving"}:
        return Protocol()
    routes = [route for protocol in context.others for route in protocol.routes]
    schemas = dict(api_operation.SCHEMAS)
    for protocol in context.others:
        schemas |= protocol.schemas
    # For examples, as seen from this machine. The default port if any free one is used.
    port = config.rest_port or DEFAULT_REST_PORT
    address = f"{'https' if config.tls_certificate else 'http'}://{config.local_address(port)}"
    return Protocol(routes=openapi_routes(routes, context.dataplane.serving, schemas, config.server_name, address))
