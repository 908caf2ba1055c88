"""The monitor page calls models, in a browser: its form, its answers, and what it says of a model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import triglot
from tests.e2e.browser import IN_ONE_BROWSER, OVERFLOW
from tests.e2e.tried_models import HOSTILE, Caller, calling, expect, pasted, served
from tests.process import write_model
from tests.waiting import until
from triglot import testing

pytestmark = IN_ONE_BROWSER

PICTURE = b"\x89PNG\r\n\x1a\n\x00\xff" + bytes(range(256))
FOCUSED = "[document.activeElement.tagName, document.activeElement.ariaLabel ?? document.activeElement.id]"


@pytest_asyncio.fixture(loop_scope="module")
async def server(tmp_path: Path) -> AsyncIterator[triglot.Server]:
    async with served(tmp_path / "models") as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def caller(server: triglot.Server) -> AsyncIterator[Caller]:
    async with calling(server) as caller:
        yield caller


async def test_a_call_in_each_protocol(caller: Caller) -> None:
    expected = {
        "KServe V2": ("FP32 [3]", "[0.5, 1, 2.5]"),
        "TF Serving": ("FP32 [3]", "[0.5, 1, 2.5]"),
        "grps": ("FLOAT32 [3]", "[0.5, 1, 2.5]"),
    }
    assert await caller.page.get_by_role("tab").all_inner_texts() == list(expected)
    for protocol, answer in expected.items():
        await caller.choose("half", protocol)
        await caller.fill("x", "[1, 2, 5]")
        await caller.run()
        await expect(caller.status).to_have_text(re.compile(r"^200 in [\d.]+.(ms|s|µs)$"))
        assert await caller.answer() == {"y": answer}
    # What was typed was for the model.
    await caller.choose("fails")
    await expect(caller.control("x")).to_have_value("[1.5]")
    await caller.choose("half")
    await expect(caller.control("x")).to_have_value("[1, 2, 5]")


async def test_a_version_and_a_signature(caller: Caller) -> None:
    await caller.choose("half", version="1", signature="twice")
    for protocol in ("KServe V2", "TF Serving"):
        await caller.choose("half", protocol, version="1", signature="twice")
        await caller.run()
        assert await caller.answer() == {"y": ("FP32 [1]", "[3]")}
    await caller.page.get_by_role("tab", name="grps").click()
    await caller.run()
    await expect(caller.status).to_have_text("grps calls only the default signature")


async def test_with_the_keyboard_only(caller: Caller) -> None:
    page = caller.page
    keys = page.keyboard

    async def tab_to(name: str) -> None:
        for _ in range(120):
            await keys.press("Tab")
            if name in await page.evaluate(FOCUSED):
                return
        raise AssertionError(f"no way to {name} by Tab")

    await tab_to("model-name")
    await keys.type("half")
    await expect(page.locator("#try:not([inert])")).to_be_visible()
    await tab_to("tab-kserve")
    await keys.press("ArrowRight")
    assert await page.evaluate(FOCUSED) == ["BUTTON", "tab-tfserving"]
    await keys.press("Home")
    await tab_to("x: JSON")
    await keys.press("Control+A")
    await keys.type("[4]")
    uptime = await page.locator("#about").text_content()
    await expect(page.locator("#about")).not_to_have_text(uptime or "")
    # A look at the server has taken nothing away.
    await keys.press("End")
    await keys.press("ArrowLeft")
    await keys.type(", 8")
    await keys.press("Control+Enter")
    await expect(caller.outputs).to_have_count(1)
    assert await caller.answer() == {"y": ("FP32 [2]", "[2, 4]")}
    assert await page.evaluate(FOCUSED) == ["TEXTAREA", "x: JSON"]
    await tab_to("run")
    await keys.press("Enter")
    await expect(caller.status).to_have_text(re.compile("^200 in "))
    await tab_to("Copy the call for curl")
    await keys.press("Enter")
    await expect(page.locator("[data-snippet=curl] [role=status]")).to_have_text("copied")
    # In the table, a model's name is a button.
    await page.locator("#models button.name", has_text="waits").focus()
    await keys.press("Enter")
    assert await page.evaluate(FOCUSED) == ["SELECT", "model-name"]
    await expect(page.locator("#try:not([inert])")).to_be_visible()
    await tab_to("x: JSON")
    await keys.press("Control+Enter")
    await expect(caller.status).to_have_text("running …")
    await keys.press("Escape")
    await expect(caller.status).to_have_text(re.compile("^cancelled after "))


async def test_a_call_that_is_cancelled_leaves_the_model(server: triglot.Server, caller: Caller) -> None:
    await caller.choose("waits")
    await caller.page.get_by_role("button", name="Run").click()
    (waits,) = [version for version in server.manager.registry.versions() if version.files.name == "waits"]

    servable = waits.servable
    assert servable is not None

    await until(lambda: servable.leases == 1)
    await caller.page.get_by_role("button", name="Cancel").click()
    await expect(caller.status).to_have_text(re.compile("^cancelled after "))
    await until(lambda: servable.leases == 0)


@pytest.mark.parametrize("protocol", ["KServe V2", "grps"])
async def test_answers_of_a_stream_are_shown_as_they_come(caller: Caller, tmp_path: Path, protocol: str) -> None:
    gate = tmp_path / "gate"
    await caller.choose("steps", protocol)
    await caller.fill("gate", str(gate), "text")
    await caller.fill("count", "[3]")
    await caller.page.get_by_role("button", name="Run").click()
    await expect(caller.outputs).to_have_count(1)
    await expect(caller.status).to_have_text(re.compile("^1 so far, "))
    gate.touch()
    await expect(caller.outputs).to_have_count(3)
    await expect(caller.status).to_have_text(re.compile("^3 answers in "))
    values = [await element.inner_text() for element in await caller.outputs.locator("pre").all()]
    assert values == ["[0]", "[1]", "[2]"]


async def test_of_a_long_stream_the_last_answers_stay(caller: Caller, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    await caller.choose("steps")
    await caller.fill("gate", str(tmp_path / "gate"), "text")
    await caller.fill("count", "[250]")
    await caller.run()
    await expect(caller.status).to_have_text(re.compile("^250 answers in "))
    await expect(caller.outputs).to_have_count(200)
    assert await caller.outputs.last.locator("pre").inner_text() == "[249]"


@pytest.mark.parametrize("protocol", ["KServe V2", "TF Serving", "grps"])
async def test_a_file_of_bytes(caller: Caller, protocol: str) -> None:
    await caller.choose("digest", protocol)
    await caller.page.get_by_label("Form of data").select_option("files")
    await expect(caller.page.locator("#inputs .problem").first).to_have_text("choose a file")
    files = [{"name": "a.png", "mimeType": "image/png", "buffer": PICTURE}]
    if protocol != "grps":
        files.append({"name": "b.txt", "mimeType": "text/plain", "buffer": b"text"})
    await caller.fill("data", files)
    await caller.run()
    digests = [hashlib.sha256(file["buffer"]).hexdigest() for file in files]  # type: ignore[arg-type]
    await expect(caller.page.locator("#answer pre").first).to_contain_text(digests[-1])
    if protocol != "grps":
        ((_, values),) = (await caller.answer()).values()
        assert values == "[" + ", ".join(f'"{digest}"' for digest in digests) + "]"


@pytest.mark.parametrize("protocol", ["KServe V2", "TF Serving", "grps"])
async def test_a_file_of_numbers_and_zeros(caller: Caller, protocol: str) -> None:
    image = np.arange(2 * 3 * 64 * 64, dtype="<f4") % 7
    await caller.choose("large", protocol)
    await expect(caller.control("image")).to_have_value("[1, 3, 64, 64]")
    await caller.run()
    answer = await caller.answer()
    assert answer["sum"][1] == "[0]"
    # What is left out of many values is said.
    assert answer["all"][1].count("0") == 200
    await expect(caller.outputs.last.locator("small")).to_have_text("the first 200 of 12,288 values")
    await caller.fill("image", [{"name": "x", "mimeType": "", "buffer": image.tobytes()[:-4]}], "files")
    problem = caller.page.locator("#inputs .problem").first
    await expect(problem).to_have_text("98,300 bytes do not fit FP32 [-1, 3, 64, 64]")
    await caller.fill("image", [{"name": "x", "mimeType": "", "buffer": image.tobytes()}])
    await expect(problem).to_be_hidden()
    await caller.run()
    sums = image.reshape(2, -1).sum(1)
    assert (await caller.answer())["sum"] == (
        f"{'FLOAT64' if protocol == 'grps' else 'FP64'} [2]",
        f"[{sums[0]:.0f}, {sums[1]:.0f}]",
    )


def png(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    """A picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(colour) * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


async def test_an_image_becomes_numbers(caller: Caller, tmp_path: Path) -> None:
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": png(5, 3, (255, 102, 0))}
    await caller.choose("large")
    await caller.fill("image", [{**picture, "buffer": b"text"}], "image")
    problem = caller.page.locator("#inputs .problem").first
    await expect(problem).to_have_text("a.png is not an image that the browser can decode")
    await caller.fill("image", [picture])
    await expect(problem).to_be_hidden()
    await caller.run()
    # Colours come first, and from 0 to 1.
    answer = await caller.answer()
    assert answer["all"][0] == "FP32 [1, 3, 64, 64]"
    assert float(answer["sum"][1].strip("[]")) == pytest.approx(64 * 64 * 1.4)
    await caller.choose("colours")
    await caller.fill("image", [picture], "image")
    await expect(caller.page.locator("#inputs .shape").first).to_have_text("shape [3, 5, 3]")
    await caller.run()
    assert await caller.answer() == {"mean": ("FP32 [3]", "[255, 102, 0]")}
    # The calls for a terminal read what can be saved.
    async with caller.page.expect_download() as saved:
        await caller.page.get_by_role("link", name="Save image.bin").click()
    await (await saved.value).save_as(tmp_path / "image.bin")
    printed = await asyncio.to_thread(pasted, (await caller.snippets())["curl"], tmp_path)
    assert json.loads(printed)["outputs"][0]["data"] == [255, 102, 0]


async def test_values_are_sent_and_shown_exactly(caller: Caller) -> None:
    long = 2**53 + 1
    for model, sent in (
        ("int64", f"[[{long}, -{long}]]"),
        ("fp16", "[[1.5, 0.1]]"),
        ("bf16", "[[1.5, 0.1]]"),
        ("uint16", "[[65535], [0]]"),
    ):
        await caller.choose(model, "KServe V2")
        await caller.fill("x", sent)
        await caller.run()
        assert (await caller.answer())["y"][1] == sent
    await caller.choose("odd")
    await caller.fill("id", str(long))
    await caller.run()
    assert await caller.answer() == {
        "raw": ("BYTES [2]", '[2 bytes: ff 00, "é"]'),
        "floats": ("FP32 [4]", "[NaN, Infinity, 0.1, 0]"),
        "long": ("INT64 [2]", f"[{long}, -1]"),
    }
    # An optional input is left out, until it is wanted.
    await caller.fill("mask", "[[true, true], [false, true]]", "json")
    await caller.run()
    assert (await caller.answer())["long"][1] == f"[{long}, 3]"
    # An empty list is a tensor of its rank.
    await caller.choose("int64")
    await caller.fill("x", "[]")
    await caller.run()
    assert await caller.answer() == {"y": ("INT64 [0, 0]", "[]")}


async def test_examples_and_sequences(caller: Caller) -> None:
    await caller.choose("regresses", "TF Serving")
    await caller.fill("examples", '[{"age": 3.0}]')
    await caller.run()
    await expect(caller.page.locator("#answer pre")).to_have_text('{"results": [3]}')
    assert list(await caller.snippets()) == ["curl"]
    await caller.choose("speaks_json", "TF Serving")
    await caller.fill("instances", '[{"a": 1.0}, null]')
    await caller.run()
    await expect(caller.page.locator("#answer pre")).to_have_text('{"predictions": [{"a": 1}, null]}')
    await caller.choose("speaks_json", "KServe V2")
    await caller.run()
    assert await caller.answer() == {"predictions": ("BYTES [1]", r'["[{}]"]')}
    await caller.choose("total", "KServe V2")
    await expect(caller.control("request parameters")).to_have_value(re.compile('"sequence_start": true'))
    await caller.run()
    assert (await caller.answer())["y"] == ("INT32 [1, 1]", "[[1]]")


async def test_errors_are_shown_as_the_server_sent_them(caller: Caller) -> None:
    for protocol, status in (
        ("KServe V2", "400 Bad Request"),
        ("TF Serving", "400 Bad Request"),
        ("grps", "500 "),
    ):
        await caller.choose("fails", protocol)
        async with caller.page.expect_response(re.compile(r"/v1/models/|/v2/models/|/infer/predict")) as sent:
            await caller.run()
        await expect(caller.status).to_have_text(re.compile(f"^{status}.* in "))
        assert await caller.page.locator("#answer pre").text_content() == await (await sent.value).text()
        assert "touch pwned" in await (await sent.value).text()
    assert await caller.page.locator("img").count() == 0
    # The browser says it, too.
    caller.complaints = [
        complaint for complaint in caller.complaints if "Failed to load resource" not in complaint
    ]
    await caller.choose("half", "KServe V2")
    for text, problem in (
        ("[1,", "invalid JSON: "),
        ("[[1], [2, 3]]", "ragged: the inner arrays differ in length"),
    ):
        asked = len(caller.asked)
        await caller.fill("x", text)
        await expect(caller.page.locator("#inputs .problem").first).to_contain_text(problem)
        await caller.run()
        await expect(caller.status).to_contain_text(problem)
        assert not [url for url in caller.asked[asked:] if "infer" in url]
        assert await caller.snippets() == {}


async def test_the_details_of_a_model(caller: Caller) -> None:
    await caller.choose("half")
    page = caller.page
    versions = page.locator("#versions tbody tr")
    await expect(versions).to_have_count(2)
    assert [await row.locator("th, td").all_inner_texts() for row in await versions.all()] == [
        ["1", "ready", HOSTILE, ""],
        ["2", "ready", "", ""],
    ]
    await expect(page.locator("#facts")).to_contain_text("version 2")
    await page.locator("#config summary").click()
    await expect(page.locator("#config pre")).to_contain_text('"name": "half"')
    await page.locator("#statistics summary").click()
    await expect(page.locator("#statistics tr", has_text="inferences")).to_contain_text("0")
    await caller.run()
    await expect(page.locator("#statistics tr", has_text="inferences")).to_contain_text("1")
    await expect(page.locator("#statistics tr", has_text="success")).to_contain_text(re.compile("1.* each"))


async def test_a_model_is_loaded_and_unloaded(tmp_path: Path) -> None:
    good = (
        "import triglot\nclass Model(triglot.Model):\n    inputs = [triglot.TensorSpec('x', 'FP32', [1])]\n"
        "    outputs = inputs\n    def infer(self, inputs): return inputs"
    )
    write_model(tmp_path / "good", good)
    write_model(tmp_path / "broken", f"raise RuntimeError({HOSTILE!r})")
    async with (
        testing.serve(tmp_path, grace=0.0, model_control_mode="explicit", load_model="") as server,
        calling(server.server) as caller,
    ):
        page = caller.page
        load, unload = (page.get_by_role("button", name=name, exact=True) for name in ("Load", "Unload"))
        # Nothing has been loaded, and what could be is known.
        names = page.get_by_role("combobox", name="Model", exact=True)
        assert await names.locator("option").all_inner_texts() == ["broken", "good"]
        await names.select_option("good")
        await expect(page.locator("#model-error")).to_contain_text("good")
        await expect(page.locator("#try")).to_be_hidden()
        await expect(unload).to_be_disabled()
        await load.click()
        await expect(page.locator("#control-status")).to_have_text(re.compile("^load good: done in "))
        await expect(page.locator("#models tr[data-model=good]")).to_contain_text("ready")
        await caller.run()
        assert await caller.answer() == {"x": ("FP32 [1]", "[1.5]")}
        await unload.click()
        await expect(page.locator("#control-status")).to_have_text(re.compile("^unload good: done in "))
        await expect(page.locator("#try")).to_be_hidden()
        await expect(page.locator("#versions tbody")).to_contain_text("unloaded")
        await names.select_option("broken")
        async with page.expect_response(re.compile("/load$")) as sent:
            await load.click()
        await expect(page.locator("#control-status")).to_have_text(re.compile("^load broken: failed 4"))
        assert await page.locator("#control-error").text_content() == await (await sent.value).text()
        await expect(page.locator("#versions tbody")).to_contain_text("touch pwned")
        assert await page.locator("img").count() == 0
        caller.complaints = [
            complaint for complaint in caller.complaints if "Failed to load resource" not in complaint
        ]


async def test_without_explicit_control_nothing_is_loaded(caller: Caller) -> None:
    await expect(caller.page.get_by_role("button", name="Load", exact=True)).to_be_hidden()
    assert not [url for url in caller.asked if "repository" in url]


@pytest.mark.parametrize(
    ("options", "tabs"),
    [
        ({"protocols": "grps"}, ["grps"]),
        ({"protocols": "tfserving,grps"}, ["TF Serving", "grps"]),
        ({"protocols": "kserve,grps", "grps_customized_body": True}, ["KServe V2"]),
    ],
)
async def test_what_is_not_served_has_no_tab(tmp_path: Path, options: dict[str, Any], tabs: list[str]) -> None:
    async with served(tmp_path, **options) as server, calling(server) as caller:
        await caller.choose("half")
        assert await caller.page.get_by_role("tab").all_inner_texts() == tabs
        await caller.run()
        ((_, values),) = (await caller.answer()).values()
        assert values == "[0.75]"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_on_a_phone(server: triglot.Server, scheme: str) -> None:
    phone = {"width": 360, "height": 740}
    async with calling(server, viewport=phone, color_scheme=scheme, has_touch=True, is_mobile=True) as caller:
        for model in ("hostile", "large", "steps"):
            await caller.choose(model)
            if model != "steps":
                await caller.run()
            await caller.page.locator("#config").evaluate("node => { node.open = true }")
            assert await caller.page.evaluate(OVERFLOW) == 0
            assert await caller.page.evaluate(UNREADABLE) == []


async def test_everything_has_a_name(caller: Caller) -> None:
    for model in ("half", "hostile", "odd"):
        await caller.choose(model)
        await caller.run()
        assert await caller.page.evaluate(NAMELESS) == []


UNREADABLE = """() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => numbers(colour).slice(0, 3).map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    const behind = node => {
        for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor, [, , , alpha = 1] = numbers(colour);
            if (alpha === 1) return light(colour);
        }
    };
    const found = [];
    for (const node of document.querySelectorAll("#model-details *")) {
        const text = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
        if (!text || !node.checkVisibility() || node.disabled || node.tagName === "OPTION") continue;
        const [one, other] = [light(getComputedStyle(node).color), behind(node)].sort();
        if ((other + 0.05) / (one + 0.05) < 4.5) found.push(node.outerHTML);
    }
    return found;
}"""
"""Elements with text whose contrast is below what WCAG's AA asks for."""
NAMELESS = """() => [...document.querySelectorAll(
    "#model-details :is(button, input, select, textarea, summary, [tabindex], [role=region], [role=tabpanel])")]
    .filter(node => {
        const by = node.getAttribute("aria-labelledby");
        const other = [by && document.getElementById(by), node.labels?.[0]].map(one => one?.textContent);
        const texts = [node.ariaLabel, ...other];
        if (["BUTTON", "SUMMARY"].includes(node.tagName)) texts.push(node.textContent);
        return !texts.some(text => text?.trim());
    }).map(node => node.outerHTML)"""
"""Elements that a screen reader cannot name."""
