"""The page of the OpenAPI document in a browser: what it shows and copies, and where it leads."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.browser import IN_ONE_BROWSER, OVERFLOW, BrowserPage, expect, visiting
from tests.process import PLAIN_MODELS, SECONDS
from triglot import testing

pytestmark = IN_ONE_BROWSER

MODELS = ("half_plus_two", "identity_fp16", "token_stream")
INFER = "post_v2_models_half_plus_two_infer"


@pytest_asyncio.fixture(loop_scope="module")
async def url() -> AsyncIterator[str]:
    """Of a server of a few small models."""
    async with testing.serve(*[PLAIN_MODELS / name for name in MODELS]) as server:
        yield server.url


async def opened(visitor: BrowserPage, url: str, operation: str = "") -> Any:
    """The page, at an operation."""
    await visitor.page.goto(f"{url}/docs#{operation}")
    await expect(visitor.page.locator("#state")).to_have_text(re.compile(r"^\d+ operations$"))
    return visitor.page.locator(f"#{operation}") if operation else visitor.page.locator("main")


def assert_well(visitor: BrowserPage, url: str) -> None:
    """Nothing came from elsewhere, and the browser had nothing to complain about."""
    assert visitor.complaints == []
    assert all(asked.startswith((url + "/", "data:")) for asked in visitor.asked)


async def test_it_lists_models_operations_and_schemas(url: str) -> None:
    async with visiting() as visitor:
        page = await opened(visitor, url)
        headings = await page.locator("h2").all_inner_texts()
        assert headings == [
            *(
                "Models",
                "KServe V2",
                "TensorFlow Serving",
                "AI Platform and Vertex AI",
                "grps",
                "MLflow",
                "Traffic",
                "Monitor",
            ),
            "Schemas",
        ]
        model = page.locator(".models li").filter(has_text="half_plus_two")
        await expect(model).to_contain_text("Inputs: x FP32 [-1]. Outputs: y FP32 [-1].")
        await model.get_by_role("link", name="/v1/models/half_plus_two:predict").click()
        operation = page.locator("#post_v1_models_half_plus_two_predict")
        await expect(operation.get_by_role("textbox", name="Request body")).to_have_value('{"inputs":{"x":[1.5]}}')
        await operation.get_by_role("link", name="PredictResponse").click()
        await expect(page.locator("#schema-PredictResponse pre")).to_contain_text("predictions?: anything")
        assert_well(visitor, url)


async def test_a_model_is_called_on_the_monitor_page(url: str) -> None:
    async with visiting() as visitor:
        page = await opened(visitor, url)
        model = page.locator(".models li").filter(has_text="token_stream")
        await model.get_by_role("link", name="Try it").click()
        await expect(visitor.page.locator("#model-name")).to_have_value("token_stream")
        await visitor.page.locator("#run").click()
        await expect(visitor.page.locator("#answer .output")).not_to_have_count(0)
        assert visitor.page.url == f"{url}/#model=token_stream"
        assert_well(visitor, url)


async def test_the_curl_line_works_as_copied(url: str) -> None:
    async with visiting(permissions=["clipboard-read", "clipboard-write"]) as visitor:
        operation = await opened(visitor, url, INFER)
        body = operation.get_by_role("textbox", name="Request body")
        await body.fill((await body.input_value()).replace("1.5", "5").replace("{", '{"id": "it\'s",', 1))
        await operation.get_by_role("button", name="Copy curl").click()
        await expect(operation.get_by_role("button", name="Copied")).to_be_visible()
        line = await visitor.page.evaluate("navigator.clipboard.readText()")
        output = json.loads(await _run(line))
        assert (output["id"], output["outputs"][0]["data"]) == ("it's", [4.5])
        binary = await opened(visitor, url, "post_v2_models_identity_fp16_infer")
        output = await _run(await binary.get_by_label("curl").inner_text())
        assert output.startswith(b'{"model_name":"identity_fp16"')
        assert output.endswith(b'{"binary_data_size":2}}]}\0\0')
        assert_well(visitor, url)


async def _run(line: str) -> bytes:
    shell = await asyncio.create_subprocess_shell(line, stdout=subprocess.PIPE)
    output, _ = await asyncio.wait_for(shell.communicate(), SECONDS)
    return output


async def test_the_call_has_what_the_fields_have(url: str) -> None:
    async with visiting() as visitor:
        operation = await opened(visitor, url, "get_v2_models_model")
        await operation.get_by_role("textbox", name="model").fill("token_stream")
        output = await _run(await operation.get_by_label("curl").inner_text())
        assert json.loads(output)["name"] == "token_stream"
        stream = await opened(visitor, url, "post_v2_models_token_stream_generate_stream")
        await stream.get_by_role("textbox", name="Request body").fill('{"text": "to be"}')
        output = await _run(await stream.get_by_label("curl").inner_text())
        assert re.search(rb'"to".*\n+.*"be"', output)


async def test_the_keyboard_is_enough(url: str) -> None:
    async with visiting() as visitor:
        await opened(visitor, url)
        keys = visitor.page.keyboard
        await visitor.page.get_by_role("searchbox").focus()
        await keys.type("get model ready V2 versions")
        await expect(visitor.page.locator("#state")).to_have_text(re.compile(r"^1 of \d+ operations$"))
        focused = "document.activeElement.textContent"
        while "/ready" not in await visitor.page.evaluate(focused):
            await keys.press("Tab")
        await keys.press("Enter")
        operation = visitor.page.locator("#get_v2_models_model_versions_version_ready")
        await expect(operation.get_by_role("textbox", name="version")).to_be_visible()
        await keys.press("Tab")
        await keys.press("Tab")
        await keys.type("1")
        while await visitor.page.evaluate(focused) != "Copy curl":
            await keys.press("Tab")
        await keys.press("Enter")
        await expect(operation.get_by_role("button", name=re.compile("Copied|Selected"))).to_be_focused()
        await expect(operation.get_by_label("curl")).to_contain_text("/versions/1/ready")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_on_a_phone_nothing_is_wider_than_the_screen(url: str, scheme: str) -> None:
    async with visiting(viewport={"width": 360, "height": 740}, color_scheme=scheme, is_mobile=True) as visitor:
        operation = await opened(visitor, url, INFER)
        await expect(operation.get_by_role("button", name="Copy curl")).to_be_visible()
        assert await visitor.page.evaluate(OVERFLOW) == 0
        assert_well(visitor, url)


async def test_only_the_pages_own_script_may_run(url: str) -> None:
    async with visiting() as visitor:
        answer = await visitor.page.goto(url + "/docs")
        page, policy = await answer.text(), answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        expected = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert re.findall(rf"{tag}-src ([^;]*)", policy) == [f"'sha256-{expected}'"]
