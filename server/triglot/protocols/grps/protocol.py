"""grps, as a protocol of the server."""

from __future__ import annotations

from triglot.core.operation import Permission
from triglot.protocols.grps import openapi
from triglot.protocols.grps.routes import HttpRules, grps_routes
from triglot.protocols.grps.service import Grps, server_text
from triglot.protocols.protocol import Context, Protocol


def grps(context: Context) -> Protocol:
    """Return grps' rows. A grps project's path may equal one of another protocol's, and then takes precedence."""
    config, dataplane = context.config, context.dataplane

    def described(permission: Permission) -> str:
        # The configured text describes all models.
        all_of_it = context.about if permission.covers_all else ""
        return all_of_it or server_text(config.server_name, dataplane, permission)

    service = Grps(dataplane, default_model=config.default_model, online=config.grps_online, server_text=described)
    rules = HttpRules(
        path=config.grps_path,
        customized_body=config.grps_customized_body,
        streaming_mode=config.grps_streaming_mode,
        streaming_key=config.grps_streaming_key,
        streaming_content_type=config.grps_streaming_content_type,
        always_200=config.grps_http_errors == "always_200",
    )
    routes = grps_routes(service, rules, context.json_limits)
    return Protocol([service.grpc_service()], routes, openapi.SCHEMAS, precedes=True)
