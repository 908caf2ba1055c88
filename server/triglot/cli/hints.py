"""The example commands that a started server prints: each calls a model, and can be pasted into a shell."""

from __future__ import annotations

import json
import shlex

from triglot.config.options import NO_PORT, TOKEN_VARIABLE, Config
from triglot.model.metadata import ModelMetadata
from triglot.protocols.sample_calls import SampleCall, sample_calls

CONTENT_TYPE = "-H 'Content-Type: application/json' "
TOKEN = f'-H "authorization: Bearer ${TOKEN_VARIABLE}" '


def hint_lines(models: list[ModelMetadata], config: Config, grpc_port: int, rest_port: int) -> list[str]:
    """Return example commands for the first model whose inputs fit on a line; empty without such a model.

    curl for each protocol, and Python and grpcurl for the first one, if their ports are open. With TLS they accept
    any certificate, as the server's public name is unknown; if clients need certificates there are none. With an
    access file they use the token in the shell's TRIGLOT_TOKEN.
    """
    if config.tls_client_ca:
        return []
    for model in models:
        calls = sample_calls(model, config.protocol_names, grps_customized_body=config.grps_customized_body)
        if calls:
            return _lines(calls, config, grpc_port, rest_port)
    return []


def _lines(calls: list[SampleCall], config: Config, grpc_port: int, rest_port: int) -> list[str]:
    first, lines = calls[0], []
    tls = bool(config.tls_certificate)
    token = TOKEN if config.access else ""
    if config.rest_port != NO_PORT:
        flags = "-sk" if tls else "-s"
        server = f"{'https' if tls else 'http'}://{config.local_address(rest_port)}"
        for call in calls:
            header = (CONTENT_TYPE if call.json else "") + token
            lines.append(f"curl {flags} {server}{call.path} {header}-d {shlex.quote(json.dumps(call.body))}")
        asked = f"{server + first.path!r}, {json.dumps(first.body).encode()!r}"
        fields = ["'Content-Type': 'application/json'"] if first.json else []
        fields += [f"'authorization': 'Bearer ' + os.environ['{TOKEN_VARIABLE}']"] if token else []
        if fields:
            asked = f"urllib.request.Request({asked}, {{{', '.join(fields)}}})"
        any_certificate = ", context=ssl._create_unverified_context()" if tls else ""
        modules = [*(["os"] if token else []), *(["ssl"] if tls else []), "urllib.request"]
        lines.append(
            f"python3 <<'END'\nimport {', '.join(modules)}\n"
            f"print(urllib.request.urlopen({asked}{any_certificate}).read().decode())\nEND"
        )
    if config.grpc_port != NO_PORT:
        message = shlex.quote(json.dumps(first.message))
        flag, server = "-insecure" if tls else "-plaintext", config.local_address(grpc_port)
        lines.append(f"grpcurl {flag} {token}-d {message} {server} {first.method}")
    return lines
