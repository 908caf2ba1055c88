"""Triton's restricted groups: every row of every protocol, with each group restricted, and with all nine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from yarl import URL

import triglot
from tests.access.test_every_row import OPTIONS, Cell, cells
from tests.state_changes import changing_server
from triglot.access.control import AccessControl
from triglot.core.errors import ServingError
from triglot.core.operation import GRPC, REST, TRITON_GROUPS, Operation

ALL = ",".join(TRITON_GROUPS) + ":key=secret"
GROUPS_OF = {
    **{operation: {name} for name, operations in TRITON_GROUPS.items() for operation in operations},
    # Of protocols that Triton does not have: these show and do what the groups are about.
    Operation.METRICS: {"metadata", "model-config", "statistics"},
    Operation.GRPS_STATE: {"model-repository"},
    Operation.PUBLIC: set[str](),
}


def rows_and_groups() -> Iterator[tuple[str, str, Operation]]:
    """The kind of transport and the operation of each row, with each group."""
    for cell in cells(triglot.Config(**OPTIONS)):
        for group in TRITON_GROUPS:
            yield REST if cell.verb else GRPC, group, Operation(cell.operation)


async def test_each_group_restricts_its_rows() -> None:
    checked = 0
    for transport, group, operation in rows_and_groups():
        text = f"{group}:key=secret"
        control = AccessControl(triglot.Config(http_restricted_api=text, grpc_restricted_protocol=text))
        assert control is not None
        header = next(iter(control.fields[transport] - {"authorization", "x-api-key"}))
        refused = [not allowed(control, operation, transport, fields) for fields in ([], [(header, "secret")])]
        assert refused == [group in GROUPS_OF[operation], False], (transport, group, operation)
        checked += 1
    assert checked > 500


def allowed(control: Any, operation: Operation, transport: str, fields: list[tuple[str, str]]) -> bool:
    try:
        control.permission(operation, transport, fields, lambda: ())
    except ServingError:
        return False
    return True


@pytest.mark.parametrize(("grpc_transport", "http_transport"), [("h2", "h1"), ("aio", "aiohttp")])
async def test_with_all_groups_restricted_only_public_rows_answer(
    tmp_path: Path, grpc_transport: str, http_transport: str
) -> None:
    options = OPTIONS | {"grpc_transport": grpc_transport, "http_transport": http_transport}
    options |= {"http_restricted_api": ALL, "grpc_restricted_protocol": ALL}
    async with changing_server(tmp_path, **options) as here:
        address = f"127.0.0.1:{here.server.grpc_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            for cell in cells(here.server.config):
                if cell.operation == "public":
                    continue
                answered = await (
                    over_rest(here.session, here.url, cell) if cell.verb else over_grpc(channel, cell)
                )
                assert "restricted, expecting header" in answered or cell.verb == "HEAD", str(cell)


async def over_rest(session: aiohttp.ClientSession, url: str, cell: Cell) -> str:
    async with session.request(cell.verb, URL(url + cell.path, encoded=True), data=cell.body) as answer:
        assert answer.status == 403, str(cell)
        return await answer.text()


async def over_grpc(channel: grpc.aio.Channel, cell: Cell) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary(cell.path)(cell.body)
    return str(raised.value.details())


@pytest.mark.parametrize("transport", [GRPC, REST])
def test_an_operation_of_several_groups_needs_the_header_of_each(transport: str) -> None:
    text = "metadata:a=one,statistics:b=two"
    control = AccessControl(triglot.Config(http_restricted_api=text, grpc_restricted_protocol=text))
    prefix = "triton-grpc-protocol-" if transport is GRPC else ""
    first, two = (f"{prefix}a", "one"), (f"{prefix}b", "two")
    found = [
        allowed(control, Operation.METRICS, transport, fields) for fields in ([], [first], [two], [first, two])
    ]
    assert found == [False, False, False, True]
