"""Clients of other languages and libraries: each case of the table, with each client, over both transports."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from tests.e2e.foreign.cases import cases
from tests.e2e.foreign.clients import CLIENTS, Client, Connection, Outcomes, check, connections, run_cases

pytestmark = [pytest.mark.both_transports, pytest.mark.long]

Run = Callable[[Client], Outcomes]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Returns the results of all cases with a client; it runs when it is first asked for."""
    with connections(tmp_path_factory.mktemp("foreign")) as opened:
        yield cache(lambda client: run_over_each(client, opened))


def run_over_each(client: Client, opened: dict[str, Connection]) -> Outcomes:
    """Run the client's program once for each connection, all at a time: some cases wait for seconds."""
    client.command()
    table = list(cases(f"{client.name} {uuid.uuid4()}"))
    with ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(run_cases, client, connection, [case for case in table if name in case.over])
            for name, connection in opened.items()
        ]
        return {name: results for run in runs for name, results in run.result().items()}


@pytest.mark.parametrize("name", [case.name for case in cases("")])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_case(client: Client, name: str, run: Run) -> None:
    results = run(client)[name]
    (case,) = (case for case in cases("") if case.name == name)
    check(client, case, results)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client_of_an_old_connection_has_a_new_one(client: Client, run: Run) -> None:
    outcomes = run(client)
    assert all(result["ports"] for result in outcomes["unary"])
    first, last = outcomes["connection age"]
    # At either time there may be none: the old one is closed, and the next call opens another.
    assert not set(first["ports"]) & set(last["ports"])


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_limits_are_of_cases(client: Client) -> None:
    assert set(client.limits) <= {case.name for case in cases("")}
