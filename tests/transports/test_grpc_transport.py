"""The options of transports and of the event loop, and what is said where a library is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.process import Triglot
from triglot.config.options import Config, ConfigError
from triglot.config.sources import load_config

WITHOUT = (
    "import sys; sys.modules['uvloop'] = None; from triglot.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_missing_library_is_reported_before_models_are_loaded() -> None:
    completed = run("--grpc-port", "0", "--rest-port", "0", "--event-loop", "uvloop")
    assert completed.returncode == 2
    assert "event_loop uvloop: it is not installed; run: pip install uvloop" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert "loaded" not in completed.stderr


@pytest.mark.parametrize(
    ("transport", "host", "warns"),
    [("aio", "0.0.0.0", True), ("aio", "127.0.0.1", False), ("h2", "0.0.0.0", False)],
)
def test_aio_that_strangers_can_reach_is_warned_of(transport: str, host: str, warns: bool) -> None:
    options = ("--grpc-port", "0", "--rest-port", "0", "--drain-delay", "0", "--host", host)
    with Triglot(*options, "--grpc-transport", transport) as server:
        server.stdout.wait_for("curl")
        server.stop()
        assert ("grpc_transport aio is not for untrusted clients" in server.stderr.text()) == warns


def test_where_it_comes_from() -> None:
    assert load_config(None, {"TRIGLOT_GRPC_TRANSPORT": "h2"}, {}).grpc_transport == "h2"
    assert load_config(None, {"TRIGLOT_GRPC_TRANSPORT": "h2"}, {"grpc_transport": "aio"}).grpc_transport == "aio"
    with pytest.raises(ConfigError, match="--grpc-transport: expected aio or h2, got 'h3'"):
        load_config(None, {}, {"grpc_transport": "h3"})
    assert Config(grpc_transport="h2").grpc_transport == "h2"


def test_what_carries_rest() -> None:
    assert load_config(None, {"TRIGLOT_HTTP_TRANSPORT": "h1"}, {}).http_transport == "h1"
    assert (
        load_config(None, {"TRIGLOT_HTTP_TRANSPORT": "h1"}, {"http_transport": "aiohttp"}).http_transport
        == "aiohttp"
    )
    with pytest.raises(ConfigError, match="--http-transport: expected aiohttp or h1, got 'h2'"):
        load_config(None, {}, {"http_transport": "h2"})
