"""Which row a path leads to: as aiohttp's router would have it, whose library decodes paths, too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from triglot.core.call import Call
from triglot.core.http import HttpResponse
from triglot.core.operation import Operation
from triglot.protocols.rows import Route
from triglot.telemetry.store import Telemetry
from triglot.transports.rest.routes import Refused, Router, decoded

ROWS = [
    ("GET", "/"),
    ("GET", "/v2"),
    ("GET", "/v2/models/{model}"),
    ("POST", "/v2/models/{model}"),
    ("GET", "/v2/models/stats"),
    ("GET", "/v2/models/{model}/versions/{version}"),
    ("POST", "/v1/models/{model:[^/:]+}:{verb:(?i:predict)}"),
    ("*", "/{v1:(?i:v1)}/{path:(?s:.*)}"),
]


async def _call(_: object, __: Call) -> None:
    pass


@pytest.fixture
def router() -> Router:
    router = Router()
    for verb, path in ROWS:
        route = Route(verb, path, Operation.METADATA, lambda _: None, _call, lambda *_: HttpResponse(b""))
        router.add(route, Telemetry().endpoint("test", "REST", path, inference=False))
    return router


@pytest.mark.parametrize(
    ("verb", "target", "path", "variables"),
    [
        ("GET", "/v2", "/v2", {}),
        ("GET", "/v2?a=b/c", "/v2", {}),
        ("GET", "/%76%32", "/v2", {}),
        ("GET", "http://h:1/v2#x", "/v2", {}),
        ("GET", "http://h", "/", {}),
        ("GET", "/v2/models/stats", "/v2/models/stats", {}),
        ("POST", "/v2/models/stats", "/v2/models/{model}", {"model": "stats"}),
        ("GET", "/v2/models/a%2Fb%25%C3%A9%ff", "/v2/models/{model}", {"model": "a/b%é%ff"}),
        (
            "GET",
            "/v2/models/m/versions/1",
            "/v2/models/{model}/versions/{version}",
            {"model": "m", "version": "1"},
        ),
        ("POST", "/v1/models/m:Predict", ROWS[6][1], {"model": "m", "verb": "Predict"}),
        ("GET", "/v1/models/m:predict", ROWS[7][1], {"v1": "v1", "path": "models/m:predict"}),
        ("PUT", "/V1/", ROWS[7][1], {"v1": "V1", "path": ""}),
    ],
)
def test_found(router: Router, verb: str, target: str, path: str, variables: dict[str, str]) -> None:
    for _ in range(2):  # Looked for, and remembered.
        found = router.find(verb, target)
        assert (found.route.path, found.variables) == (path, variables)


@pytest.mark.parametrize(
    ("verb", "target", "status", "allowed"),
    [
        ("PUT", "/v2/models/m", 405, "GET,POST"),
        ("HEAD", "/v2", 405, "GET"),
        ("GET", "/v2/", 404, None),
        ("GET", "/v2//models/m", 404, None),
        ("GET", "/v2/models/a/b", 404, None),
        ("GET", "*", 404, None),
        ("CONNECT", "h:1", 404, None),
    ],
)
def test_refused(router: Router, verb: str, target: str, status: int, allowed: str | None) -> None:
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            router.find(verb, target)
        assert caught.value.answer.status == status
        assert dict(caught.value.answer.headers).get("Allow") == allowed


@given(st.lists(st.sampled_from([*"/ab%2cF5", "%2F", "%25", "%C3%A9", "%c3", "%ff", "%e2%82%ac", "%ED%A0%80"])))
def test_paths_are_decoded_as_before(parts: list[str]) -> None:
    path = "/" + "".join(parts)
    assert decoded(path) == URL.build(path=path, encoded=True).path_safe
