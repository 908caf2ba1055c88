"""Tests of JSON with each library that reads it."""

from collections.abc import Iterator

import pytest

from triglot.core import fast_json
from triglot.protocols.json import arrays


@pytest.fixture(scope="module", params=["simdjson", "orjson", "json"])
def json_library(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests with each library: all, orjson without simdjson, and neither."""
    library: str = request.param
    pytest.importorskip(library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "HAS_SIMDJSON", library == "simdjson")
        patch.setattr(fast_json, "HAS_ORJSON", library != "json")
        yield library
