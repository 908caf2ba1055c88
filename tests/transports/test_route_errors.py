"""The error of a failure inside a route: the route's name, and nothing of how it is matched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triglot.core.call import Call
from triglot.core.http import HttpResponse
from triglot.core.operation import Operation
from triglot.protocols.rows import Route
from triglot.transports.rest.exchange import error_response


async def _call(_: Any, __: Call) -> None:
    pass


@pytest.mark.parametrize(("name", "shown"), [("", "POST /v1/models/{model}:{verb}"), ("Predict", "POST Predict")])
def test_a_failure_names_the_route_without_its_pattern(name: str, shown: str) -> None:
    path = "/v1/models/{model:[^/:]+}:{verb:(?i:predict)}"
    route = Route("POST", path, Operation.INFER, lambda _: None, _call, lambda *_: HttpResponse(b""), name=name)
    answer = error_response(route, KeyError("ours"), {}, Call())
    assert answer.status == 500
    assert isinstance(answer.body, bytes)
    assert json.loads(answer.body)["error"].startswith(f"{shown} failed, error ")
