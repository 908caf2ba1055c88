"""The monitor page in a browser, under load from every protocol: it shows what /metrics says."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import triglot
from tests.e2e.browser import IN_ONE_BROWSER, OVERFLOW, BrowserPage, expect, visiting
from tests.e2e.monitor_load import (
    BROKEN_MODEL,
    BROKEN_TEXT,
    MODEL,
    OTHER_MODEL,
    Count,
    Load,
    Numbers,
    load_of,
    numbers_of,
    ready_models,
    served,
)
from tests.process import SECONDS
from tests.waiting import until_found

pytestmark = IN_ONE_BROWSER

PATH = "/grps/v1/monitor/metrics"
METRIC = "<img src=x onerror=alert(1)> & co"
READ_TABLES = """() => {
    const number = cell => Number(cell.textContent.replaceAll(",", ""));
    const cells = row => Object.fromEntries(
        [...row.querySelectorAll("[data-field]")].map(cell => [cell.dataset.field, number(cell)]));
    const table = (rows, key) => Object.fromEntries(
        [...document.querySelectorAll(rows)].map(row => [row.dataset[key], cells(row)]));
    const tile = name => document.querySelector(`[data-tile=${name}]`).innerText;
    return {
        requests: tile("requests"), failures: tile("failures"),
        protocols: table("#protocols tbody tr", "protocol"), models: table("#models tbody tr", "model"),
    };
}"""


@pytest_asyncio.fixture(loop_scope="module")
async def server(tmp_path: Path) -> AsyncIterator[triglot.Server]:
    """The server that the page is of."""
    async with served(tmp_path) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def load(server: triglot.Server) -> AsyncIterator[Load]:
    """Its clients."""
    async with load_of(server) as load:
        yield load


async def numbers_shown(visitor: BrowserPage) -> Numbers:
    """What the page shows."""
    shown = await visitor.page.evaluate(READ_TABLES)
    models = shown["models"]
    protocols = list(shown["protocols"])
    return Numbers(
        Count(*(first_number(shown[tile], "since the start") for tile in ("requests", "failures"))),
        {name: count_of(row) for name, row in shown["protocols"].items() if row["requests"]},
        {name: count_of(row) for name, row in models.items() if row["requests"]},
        {
            (name, protocol): row[protocol]
            for name, row in models.items()
            for protocol in protocols
            if row[protocol]
        },
    )


def count_of(row: dict[str, int]) -> Count:
    return Count(row["requests"], row["failures"])


def first_number(text: str, before: str) -> int:
    """The number that stands in a tile before a text."""
    match = re.search(rf"([\d,]+)\s*{before}", text.partition("\n")[2])
    assert match is not None, text
    return int(match[1].replace(",", ""))


async def test_the_page_shows_under_load_what_metrics_says(server: triglot.Server, load: Load) -> None:
    async with visiting() as visitor:
        await visitor.open(load.url + "/")
        rates = visitor.page.get_by_role("img", name="Requests per second")
        async with load.going_on():
            # Each protocol has a line, and each line a number that is not 0.
            rate = r" [1-9][^,;]*"
            await expect(rates).to_have_attribute(
                "aria-label",
                re.compile(f"now: (?=.*KServe V2{rate})(?=.*TF Serving{rate})(?=.*grps{rate})"),
                timeout=SECONDS * 1000,
            )
            latency = visitor.page.get_by_role("img", name="Latency")
            await expect(latency).to_have_attribute("aria-label", re.compile(r"p50 \d.* p90 \d.* p99 \d"))
            await expect(visitor.page.locator("[data-tile=latency] dd").first).to_have_text(
                re.compile(r"\d.(µs|ms)")
            )
            await expect(visitor.field(MODEL, "rate")).to_have_text(re.compile(r"\d/s"))
            await expect(visitor.field(MODEL, "batch")).to_have_text("1")
        await load.failures()
        numbers = numbers_of(await load.get("/metrics"))
        assert numbers.total.failures == 7
        assert set(numbers.protocols) == {"kserve", "tfserving", "grps"}
        assert numbers.models[OTHER_MODEL] == Count(numbers.models_and_protocols[OTHER_MODEL, "kserve"], 0)
        await until_found(lambda: numbers_shown(visitor), lambda shown: shown == numbers)
        await expect(visitor.page.locator("[data-tile=in-flight] dd").first).to_have_text("0")
        assert visitor.complaints == []
        assert all(url.startswith((load.url + "/", "data:")) for url in visitor.asked)


async def test_states_and_their_reasons_are_shown_as_text(server: triglot.Server, load: Load) -> None:
    async with visiting() as visitor:
        await visitor.open(load.url + PATH)
        await expect(visitor.page.locator("#server")).to_have_text("the <i>server</i>")
        for model, ready in ready_models(await load.get("/metrics")).items():
            await expect(visitor.field(model, "state")).to_have_text(re.compile("^ready$" if ready else "^failed"))
        state = visitor.field(BROKEN_MODEL, "state")
        await expect(state).to_contain_text(BROKEN_TEXT)
        await expect(visitor.page.locator("[data-tile=models]")).to_contain_text("2\nof 3", use_inner_text=True)
        await expect(visitor.page.get_by_role("img", name="Requests per second: no requests yet")).to_be_visible()
        assert visitor.complaints == []


async def test_each_metric_unfolds(server: triglot.Server, load: Load) -> None:
    server.telemetry.monitor.add(METRIC, "inc", 7)
    async with visiting() as visitor:
        await visitor.open(load.url + "/")
        for name, text in (("*qps", "now: "), ("*latency_cdf(ms)", "99.99 % within: "), (METRIC, "now: ")):
            button = visitor.page.locator("#metrics button").filter(has_text=name)
            await button.click()
            await expect(button).to_have_attribute("aria-expanded", "true")
            chart = visitor.page.get_by_role("img", name=f"{name}, {text}")
            await expect(chart).to_be_visible()
        # Its one value came in a second that is over: it is the highest of those shown.
        await expect(chart).to_have_attribute("aria-label", re.compile("highest shown 7$"))
        assert await visitor.page.locator("img").count() == 0
        assert visitor.complaints == []


async def test_a_chart_is_read_with_the_keyboard(server: triglot.Server, load: Load) -> None:
    async with visiting() as visitor:
        await visitor.open(load.url + "/")
        chart = visitor.page.locator("#charts svg[role=img]").first
        await chart.focus()
        await visitor.page.keyboard.press("ArrowLeft")
        await visitor.page.keyboard.press("ArrowLeft")
        await expect(visitor.page.locator("#charts figcaption span").first).to_have_text("2 s ago")
        await visitor.page.keyboard.press("Escape")
        await expect(visitor.page.locator("#charts figcaption span").first).to_have_text("now")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_on_a_phone_nothing_is_wider_than_the_screen(
    server: triglot.Server, load: Load, scheme: str
) -> None:
    phone = {"width": 360, "height": 740}
    async with visiting(viewport=phone, color_scheme=scheme, has_touch=True, is_mobile=True) as visitor:
        await visitor.open(load.url + "/")
        await load.round()
        await expect(visitor.field(MODEL, "requests")).to_have_text("4")
        assert await visitor.page.evaluate(OVERFLOW) == 0
        background = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
        colour = await visitor.page.evaluate(background)
        assert (max(colour) < 60) if scheme == "dark" else (min(colour) > 200)
        assert visitor.complaints == []


async def test_lost_server_is_shown_as_lost(server: triglot.Server, load: Load) -> None:
    async with visiting() as visitor:
        await visitor.open(load.url + "/")
        banner = visitor.page.get_by_role("alert")
        await expect(banner).to_be_hidden()
        await server.stop()
        await expect(banner).to_have_text("Connection lost, retrying", timeout=SECONDS * 1000)


async def test_without_javascript_the_metrics_are_named(server: triglot.Server, load: Load) -> None:
    async with visiting(java_script_enabled=False) as visitor:
        await visitor.page.goto(load.url + "/")
        await expect(visitor.page.locator("#metrics li").first).to_have_text("*qps")


async def test_only_the_pages_own_script_may_run(server: triglot.Server, load: Load) -> None:
    async with visiting() as visitor:
        answer = await visitor.page.goto(load.url + "/")
        page, policy = await answer.text(), answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        expected = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert re.findall(rf"{tag}-src ([^;]*)", policy) == [f"'sha256-{expected}'"]
    assert len(page.encode()) < 128 * 1024
