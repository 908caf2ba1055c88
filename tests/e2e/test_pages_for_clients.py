"""The pages of a server with an access file, in a browser: they ask for a token, and say what it is not for."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import triglot
from tests.access.access_files import anonymous, client, write
from tests.e2e.browser import IN_ONE_BROWSER, OVERFLOW, BrowserPage, expect, visiting
from tests.e2e.tried_models import Caller, pasted
from tests.process import PLAIN_MODELS
from triglot import testing

pytestmark = IN_ONE_BROWSER
MODELS = ("half_plus_two", "token_stream")
TOKEN = "secret-of-reader"
READER = client("reader", [TOKEN], ["infer", "inspect"])
PAGES = ("/", "/grps/v1/monitor/metrics", "/docs")
ALL_PLACES = (
    "document.documentElement.outerHTML + location.href"
    " + [...document.querySelectorAll('input, textarea')].map(field => field.value)"
)
"""Where a token could stand in a page."""
FOCUSED = "document.activeElement.id || document.activeElement.textContent"
Serve = Callable[..., AbstractAsyncContextManager[triglot.Server]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "access.toml"


@pytest.fixture
def serve(file: Path) -> Serve:
    """A server of two models, with these tables as its access file."""

    @asynccontextmanager
    async def serve(*tables: str, **options: Any) -> AsyncIterator[triglot.Server]:
        write(file, *tables)
        async with testing.serve(
            *[PLAIN_MODELS / name for name in MODELS], **{"access": str(file), **options}
        ) as running:
            yield running.server

    return serve


@asynccontextmanager
async def reading(server: triglot.Server, path: str = "", **options: Any) -> AsyncIterator[Caller]:
    """The page before there is a token; the browser may complain of refusals only, and so of no policy."""
    async with visiting(**options) as visitor:
        caller = Caller(visitor.page, server)
        await caller.page.goto(caller.url + path)
        yield caller
        assert caller.other_complaints() == []
        assert all(url.startswith((caller.url, "data:")) for url in caller.asked)


async def is_documented(caller: BrowserPage, text: str) -> None:
    """As an alert, by the form."""
    await expect(caller.page.locator("#token-problem")).to_have_text(re.compile(text))


async def test_pages_are_the_same_for_everybody(serve: Serve) -> None:
    bearer = {"authorization": f"Bearer {TOKEN}"}
    async with (
        serve(READER, server_name="name-of-the-server") as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.rest_port}") as session,
    ):
        for path in PAGES:
            texts = []
            for headers in ({}, bearer, {"authorization": "Bearer wrong"}):
                async with session.get(path, headers={"accept": "text/html", **headers}) as answer:
                    assert answer.status == 200
                    policy = answer.headers["content-security-policy"]
                    texts.append(await answer.text())
            assert texts[0] == texts[1] == texts[2]
            for fact in ("*qps", *MODELS, "name-of-the-server", triglot.__version__, str(server.grpc_port)):
                assert fact not in texts[0], (path, fact)
            assert re.sub("'sha256-[^']+'", "HASH", policy) == (
                "default-src 'none'; base-uri 'none'; connect-src 'self'; form-action 'none'; "
                "frame-ancestors 'none'; img-src data:; script-src HASH; style-src HASH"
            )
            (script,) = re.findall("<script>(.*?)</script>", texts[0], re.DOTALL)
            assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
        for path in ("/grps/v1/monitor/overview", "/grps/v1/monitor/model", "/openapi.json", "/metrics"):
            async with session.get(path) as answer:
                assert answer.status == 401
                assert answer.headers["www-authenticate"].startswith("Bearer ")


@pytest.mark.parametrize("phone", [False, True], ids=["screen", "phone"])
async def test_with_the_keyboard_only(serve: Serve, phone: bool) -> None:
    options: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "is_mobile": True} if phone else {}
    async with serve(READER) as server, reading(server, **options) as caller:
        page, keys = caller.page, caller.page.keyboard
        await is_documented(caller, "^metrics needs credentials: a token in ")
        await expect(page.locator("#connection")).to_have_text("needs a token")
        # No look at the server takes the field from whoever types.
        assert await page.evaluate(FOCUSED) == "token"
        await keys.type("two words")
        await keys.press("Enter")
        await is_documented(caller, "^expected a token, ASCII without spaces$")
        await keys.press("Control+A")
        await keys.type("wrong")
        await keys.press("Enter")
        await is_documented(caller, "^the token is unknown$")
        assert await page.evaluate(FOCUSED) == "token"
        assert await page.evaluate(OVERFLOW) == 0
        assert await page.evaluate("sessionStorage.length") == 0
        await keys.type(TOKEN)
        await keys.press("Tab")
        assert await page.evaluate(FOCUSED) == "Use token"
        await keys.press("Enter")
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.get_by_role("textbox", name="Token")).to_be_hidden()
        await expect(page.locator("#metrics")).to_contain_text("*qps")
        assert await page.evaluate(OVERFLOW) == 0
        assert await page.evaluate(FOCUSED) == "Forget token"
        await keys.press("Enter")
        # Nothing stays of what the token has shown.
        await is_documented(caller, "^metrics needs credentials")
        assert "half_plus_two" not in await page.evaluate(ALL_PLACES)
        assert await page.evaluate("sessionStorage.length") == 0


async def test_tab_keeps_the_token_and_the_page_never_shows_it(serve: Serve) -> None:
    async with serve(READER) as server, reading(server) as caller:
        page = caller.page
        await caller.give(TOKEN)
        await caller.choose("half_plus_two")
        await caller.run()
        assert await caller.answer() == {"y": ("FP32 [1]", "[2.75]")}
        assert TOKEN not in await page.evaluate(ALL_PLACES)
        assert "$TRIGLOT_TOKEN" in (await caller.snippets())["curl"]
        await page.get_by_role("link", name="API").click()
        await expect(page.locator("#state")).to_have_text(re.compile(r"^\d+ operations$"))
        assert TOKEN not in await page.evaluate(ALL_PLACES)
        await caller.open(caller.url)
        assert await page.evaluate("Object.values(localStorage).join()") == "auto"
        assert not any(TOKEN in url for url in caller.asked)
        # Another tab has none.
        other = await page.context.new_page()
        await other.goto(caller.url)
        await expect(other.locator("#token-problem")).to_have_text(re.compile("needs credentials"))


async def test_a_token_that_is_withdrawn_while_the_page_is_open(serve: Serve, file: Path) -> None:
    async with serve(READER) as server, reading(server) as caller:
        await caller.give(TOKEN)
        await caller.choose("half_plus_two")
        await caller.fill("x", "[7, 8]")
        write(file, client("reader", ["new"], ["infer", "inspect"]))
        await is_documented(caller, "^the token is unknown$")
        await expect(caller.page.locator("#connection")).to_have_text("needs a token")
        # Who works elsewhere stays there, and what was typed, too.
        assert await caller.page.evaluate("document.activeElement.tagName") == "TEXTAREA"
        await caller.give("new")
        await expect(caller.page.locator("#connection")).to_have_text("live")
        await caller.run()
        assert await caller.answer() == {"y": ("FP32 [2]", "[5.5, 6]")}


async def test_forbidden_operations_are_shown_and_others_work(serve: Serve) -> None:
    options = {"model_control_mode": "explicit", "load_model": "*"}
    async with serve(client("reader", [TOKEN], ["metrics"]), **options) as server, reading(server) as caller:
        page = caller.page
        await caller.give(TOKEN)
        # The list of what can be loaded.
        await expect(page.locator("#control-status")).to_have_text("client 'reader' may not use model-index")
        await caller.choose("half_plus_two")
        await caller.run()
        await expect(caller.status).to_have_text(re.compile("^403 Forbidden in "))
        await expect(page.get_by_label("Error")).to_have_text('{"error": "client \'reader\' may not use infer"}')
        await page.get_by_role("button", name="Unload").click()
        await expect(page.locator("#control-error")).to_contain_text("client 'reader' may not use model-control")
        await page.locator("#statistics summary").click()
        await expect(page.locator("#statistics td")).to_have_text("client 'reader' may not use statistics")
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#banner")).to_be_hidden()


async def test_a_client_that_may_see_no_numbers(serve: Serve) -> None:
    async with serve(client("caller", [TOKEN], ["infer"])) as server, reading(server, "docs") as caller:
        page = caller.page
        await expect(page.locator("#state")).to_have_text("The document needs a token")
        await caller.give(TOKEN)
        await expect(page.locator("#state")).to_have_text(
            "The document cannot be read: client 'caller' may not use metadata"
        )
        await page.clock.install()
        await page.goto(caller.url)
        banner = page.locator("#banner")
        await expect(banner).to_have_text("client 'caller' may not use metrics")
        await expect(page.locator("#connection")).to_have_text("limited")
        await expect(page.locator("#tiles")).to_be_hidden()
        # It does not ask each second for what it has not got, but does so again.

        def looks() -> int:
            return sum(url.endswith("/overview") for url in caller.asked)

        for _ in range(5):
            await page.clock.fast_forward(4_000)
        assert looks() == 1
        async with page.expect_response(re.compile("/overview$")):
            await page.clock.fast_forward(15_000)
        assert looks() == 2


async def test_pages_are_public_and_a_client_may_call(serve: Serve) -> None:
    caller_table = client("caller", [TOKEN], ["infer"])
    async with serve(caller_table, anonymous(["inspect"])) as server, reading(server) as caller:
        await caller.open(caller.url)
        await expect(caller.page.get_by_role("textbox", name="Token")).to_be_hidden()
        await caller.choose("half_plus_two")
        assert "TRIGLOT_TOKEN" not in (await caller.snippets())["curl"]
        await caller.run()
        await is_documented(caller, "^infer needs credentials")
        await expect(caller.page.locator("#connection")).to_have_text("live")
        await caller.give(TOKEN)
        await caller.run()
        assert await caller.answer() == {"y": ("FP32 [1]", "[2.75]")}


async def test_the_page_of_the_rest_api(serve: Serve, tmp_path: Path) -> None:
    infer = "#post_v2_models_half_plus_two_infer"
    async with serve(READER) as server, reading(server, "docs" + infer) as caller:
        page = caller.page
        await is_documented(caller, "^metadata needs credentials")
        await caller.give(TOKEN)
        operation = page.locator(infer)
        line = await operation.get_by_label("curl").inner_text()
        assert ' -H "authorization: Bearer $TRIGLOT_TOKEN" ' in line
        printed = await asyncio.to_thread(pasted, line, tmp_path, TRIGLOT_TOKEN=TOKEN)
        assert json.loads(printed)["outputs"][0]["data"] == [2.75]
        await expect(page.locator(".models li")).to_have_count(2)


async def test_a_client_of_some_models(serve: Serve) -> None:
    table = client("some", [TOKEN], ["infer", "inspect"], models=["half_*"])
    async with serve(table) as server, reading(server) as caller:
        page = caller.page
        await caller.give(TOKEN)
        await expect(page.locator("#banner")).to_have_text(
            "client 'some' may use some models only, and this is about all of them"
        )
        await expect(page.locator("#connection")).to_have_text("limited")
        await expect(page.locator("#tiles")).to_be_hidden()
        await caller.choose("half_plus_two")
        await caller.run()
        assert await caller.answer() == {"y": ("FP32 [1]", "[2.75]")}
        assert list(await caller.snippets()) == ["curl", "Python", "grpcurl"]
