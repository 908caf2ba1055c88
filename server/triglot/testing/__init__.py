"""Tests of models: servers on free ports, clients with numpy arrays, models that wait, checks without a port."""

from __future__ import annotations

from triglot.testing.checking import assert_serves
from triglot.testing.clients import (
    CLIENTS,
    Client,
    GrpsGrpc,
    GrpsHttp,
    KServeGrpc,
    KServeRest,
    TensorFlowGrpc,
    TensorFlowRest,
)
from triglot.testing.gated import GatedModel
from triglot.testing.serving import ServerProcess, serve

__all__ = [
    "CLIENTS",
    "Client",
    "GatedModel",
    "GrpsGrpc",
    "GrpsHttp",
    "KServeGrpc",
    "KServeRest",
    "ServerProcess",
    "TensorFlowGrpc",
    "TensorFlowRest",
    "assert_serves",
    "serve",
]
