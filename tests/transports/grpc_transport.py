"""Pytest plugin: which transports and event loops the tests run over.

gRPC has two transports, and so has REST. All tests run over the default ones; those marked `both_transports` run
over grpc.aio and aiohttp, too, as tests of their own: `test[...over_aio...]`. With `--grpc-transport` all run over
one only. Tests marked `both_event_loops` run on asyncio's loop and on uvloop.

Transports are chosen as users choose them, by environment variables: a server process that a test starts reads
them itself, and one in this process gets them by `transport_options`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest

from triglot.config.options import GRPC_TRANSPORTS

VARIABLE = "TRIGLOT_GRPC_TRANSPORT"
HTTP_VARIABLE = "TRIGLOT_HTTP_TRANSPORT"
HTTP_TRANSPORT = {"aio": "aiohttp", "h2": "h1"}
"""What carries REST beside each."""
_OVER_AIO = "over_aio"
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def transport_options(**options: Any) -> dict[str, Any]:
    """Options for a `triglot.Config`: these, and those of the chosen transport where they say nothing of it."""
    chosen = {"grpc_transport": os.environ.get(VARIABLE), "http_transport": os.environ.get(HTTP_VARIABLE)}
    return {name: value for name, value in chosen.items() if value} | options


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flag."""
    parser.addoption(
        "--grpc-transport", choices=GRPC_TRANSPORTS, help="what carries gRPC in tests that do not say"
    )


def pytest_configure(config: pytest.Config) -> None:
    """For the servers of this process, and of those that tests start."""
    chosen = config.getoption("--grpc-transport")
    if chosen is not None:
        os.environ[VARIABLE], os.environ[HTTP_VARIABLE] = chosen, HTTP_TRANSPORT[chosen]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test twice that runs over both transports, unless one was chosen."""
    mark = metafunc.definition.get_closest_marker("both_transports")
    if VARIABLE not in os.environ and mark is not None and mark.args != (False,):
        metafunc.fixturenames.append(_OVER_AIO)
        metafunc.parametrize(_OVER_AIO, [False, True], ids=[pytest.HIDDEN_PARAM, _OVER_AIO])


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """By name, the loops that a test runs on."""
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if item.get_closest_marker("both_event_loops"):
        import uvloop  # noqa: PLC0415 - other environments do without its tests.

        loops["uvloop"] = uvloop.new_event_loop
    return loops


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests over grpc.aio last: between those and the others a process starts its servers anew."""
    items.sort(key=_is_over_aio)


def _is_over_aio(item: pytest.Item) -> bool:
    spec = getattr(item, "callspec", None)
    return spec is not None and bool(spec.params.get(_OVER_AIO))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Choose the transport for a test, with the setup and teardown of its fixtures."""
    with pytest.MonkeyPatch.context() as environment:
        if _is_over_aio(item):
            environment.setenv(VARIABLE, "aio")
            environment.setenv(HTTP_VARIABLE, HTTP_TRANSPORT["aio"])
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End all servers before the first test that runs over other transports."""
    if nextitem is not None and _is_over_aio(nextitem) != _is_over_aio(item):
        item.session._setupstate.teardown_exact(None)
