"""A plugin for pytest, off unless a `conftest.py` or the flag `-p` names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from triglot.inline import ServedAt
from triglot.testing.serving import serve


@pytest.fixture
def serve_models() -> Iterator[Callable[..., ServedAt]]:
    """Start servers, with the arguments of `triglot.testing.serve`, that run until the test ends."""
    with ExitStack() as servers:

        def start(*models: Any, **options: Any) -> ServedAt:
            server: ServedAt = servers.enter_context(serve(*models, **options))
            return server

        yield start
