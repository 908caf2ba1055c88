"""Pages of other origins, in a browser, try everything that changes a server on the reader's machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.e2e.browser import IN_ONE_BROWSER, visiting
from tests.state_changes import ChangingServer, changing_server

pytestmark = IN_ONE_BROWSER

# What a page can send without a preflight, and with one.
ATTACK = """async ([url, changes]) => {
    const all = [];
    const send = (request) => all.push(request.then(() => "sent", error => String(error)));
    for (const [verb, path, body] of changes) {
        for (const type of ["text/plain", "application/x-www-form-urlencoded"])
            if (verb === "POST")
                send(fetch(url + path, {method: "POST", mode: "no-cors", body, headers: {"content-type": type}}));
        if (verb === "POST") {
            send(fetch(url + path, {method: "POST", body, headers: {"content-type": "application/json"}}));
            navigator.sendBeacon(url + path, body);
        } else
            send(fetch(url + path, {method: verb, mode: "no-cors"}));
        if (verb === "GET")
            send(new Promise(resolve => {
                const image = new Image();
                image.onload = image.onerror = () => resolve();
                image.src = url + path;
                document.body.append(image);
            }));
        // A form sends its one field as NAME=VALUE: the sign between them is made part of a text.
        send(new Promise(resolve => {
            const frame = document.createElement("iframe");
            frame.name = `frame${all.length}`;
            document.body.append(frame);
            const form = document.createElement("form");
            Object.assign(form, {action: url + path, target: frame.name, enctype: "text/plain"});
            form.method = verb === "POST" ? "post" : "get";
            if (verb === "POST") {
                const field = document.createElement("input");
                field.name = body.slice(0, -1) + (body === "{}" ? "" : ",") + '"parameters":{"a":"';
                field.value = '"}}';
                form.append(field);
            }
            document.body.append(form);
            frame.onload = () => resolve();
            form.submit();
        }));
    }
    return await Promise.all(all);
}"""


async def page_at(port_of: str) -> tuple[web.AppRunner, str]:
    """An empty page of another origin, and its address."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><body>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    return runner, f"http://{port_of}:{port}/"


async def attack(here: ChangingServer, host: str) -> tuple[list[str], dict[str, Any]]:
    """What became of each request of a page on `host`, and what the page says of its origin."""
    runner, address = await page_at(host)
    try:
        async with visiting() as visitor:
            await visitor.page.goto(address)
            changes = [
                [change.verb, change.path, change.body.decode()]
                for change in here.changes
                if change.verb != "HEAD"
            ]
            outcomes = await visitor.page.evaluate(ATTACK, [here.url, changes])
            return outcomes, await visitor.page.evaluate("({origin: location.origin})")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"], ids=["another port", "another site"])
async def test_a_page_of_another_origin_changes_nothing(tmp_path: Path, host: str) -> None:
    async with changing_server(tmp_path) as here:
        before = await here.state()
        calls = refusals(await metrics(here))
        outcomes, page = await attack(here, host)
        assert page["origin"].startswith(f"http://{host}:")
        assert len(outcomes) > 100
        assert await here.state() == before
        # The requests have come, and each was refused.
        assert refusals(await metrics(here)) - calls > 100


async def test_the_same_page_changes_what_it_may(tmp_path: Path) -> None:
    """So the attack is one: from an origin that is allowed it does what it is meant to."""
    runner, address = await page_at("127.0.0.1")
    try:
        async with changing_server(tmp_path, allowed_origins=address.rstrip("/")) as here, visiting() as visitor:
            await visitor.page.goto(address)
            changes = [["POST", "/v2/logging", json.dumps({"log_info": False})]]
            assert "sent" in await visitor.page.evaluate(ATTACK, [here.url, changes])
            assert '"log_info":false' in (await here.state())["/v2/logging"][1]
    finally:
        await runner.cleanup()


async def metrics(here: ChangingServer) -> str:
    async with here.session.get(here.url + "/metrics") as answer:
        return await answer.text()


def refusals(text: str) -> int:
    """Calls that were refused, as the metrics count them."""
    lines = [line for line in text.splitlines() if "PERMISSION_DENIED" in line and "_total" in line]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)
