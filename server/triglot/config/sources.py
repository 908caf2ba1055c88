"""Reads options from their sources.

A later source wins: defaults, the TOML file, variables of Vertex AI and KServe, `TRIGLOT_*` variables, flags.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triglot.config.option_fields import flag_of, option_type, unknown
from triglot.config.options import (
    ANY_HOST,
    ENVIRONMENT_PREFIX,
    OPTIONS,
    Config,
    ConfigError,
    check_option,
)
from triglot.config.variables import CLIENT_PREFIX, TOKEN_VARIABLE

# Set by Vertex AI for a custom container (tfs 7.7), besides AIP_STORAGE_URI.
VERTEX = {"AIP_HTTP_PORT": "rest_port", "AIP_PREDICT_ROUTE": "predict_route", "AIP_HEALTH_ROUTE": "health_route"}
# Set by KServe for a serving runtime with TLS.
KSERVE = {"KSERVE_TLS_CERT_FILE": "tls_certificate", "KSERVE_TLS_KEY_FILE": "tls_key"}
SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?")


def load_config(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    kind: type[Config] = Config,
) -> Config:
    """Return the options from all sources, as a `kind`; `defaults` override the built-in ones.

    Raise `ConfigError`, which names the source.
    """
    values: dict[str, Any] = dict(defaults or {})
    if file is not None:
        values |= _from_toml(file)
    vertex = _set_by(VERTEX, environment)
    values |= {"host": ANY_HOST} | vertex if vertex else {}
    values |= _set_by(KSERVE, environment) | _from_environment(environment)
    for name, value in flags.items():
        if name not in OPTIONS:
            raise ConfigError(unknown(name, OPTIONS))
        check_option(name, value, flag_of(name))
    return kind(**values | dict(flags))


def _from_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            table = tomllib.load(opened)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    for name, value in table.items():
        if name not in OPTIONS:
            raise ConfigError(f"{file}: {unknown(name, OPTIONS)}")
        check_option(name, value, f"{file}: {name}")
    return table


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = {ENVIRONMENT_PREFIX + name.upper(): name for name in OPTIONS}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        is_ours = variable.startswith(ENVIRONMENT_PREFIX) and not variable.startswith(CLIENT_PREFIX)
        if is_ours and variable != TOKEN_VARIABLE and not _is_service_link(variable, text):
            if variable not in names:
                raise ConfigError(unknown(variable, names))
            name = names[variable]
            values[name] = _parse(variable, text, option_type(OPTIONS[name]))
            check_option(name, values[name], variable)
    return values


def _set_by(variables: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that a platform's own variables set."""
    values: dict[str, Any] = {}
    for variable, name in variables.items():
        if text := environment.get(variable):
            values[name] = _parse(variable, text, option_type(OPTIONS[name]))
            check_option(name, values[name], variable)
    return values


def vertex_model(environment: Mapping[str, str]) -> Path | None:
    """Return the folder in Vertex AI's AIP_STORAGE_URI, if Vertex AI set one.

    Raise `ConfigError` unless it is a local folder.
    """
    uri = environment.get("AIP_STORAGE_URI")
    if not uri or not any(environment.get(variable) for variable in VERTEX):
        return None
    if not Path(uri).is_dir():
        raise ConfigError(
            f"AIP_STORAGE_URI: expected a local folder, got {uri!r}: copy the model to a local folder, "
            "and pass that as PATH"
        )
    return Path(uri)


def _is_service_link(variable: str, text: str) -> bool:
    """Whether Kubernetes set the variable, for a Service whose name begins with TRIGLOT."""
    return text.startswith(("tcp://", "udp://", "sctp://")) or SERVICE_LINK.fullmatch(variable) is not None


def _parse(source: str, text: str, expected: type) -> Any:
    if expected is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{source}: expected true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return expected(text)
    except ValueError:
        raise ConfigError(f"{source}: expected {expected.__name__}, got {text!r}") from None
