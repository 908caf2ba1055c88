"""The calls that the monitor page writes for a terminal, taken out of the page and run as they are."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from multidict import CIMultiDict

from tests.access.access_files import client, write
from tests.e2e.browser import IN_ONE_BROWSER, visiting
from tests.e2e.tried_models import HOSTILE, Caller, calling, expect, in_python, needs_grpcurl, pasted, served
from tests.transports.tls_server import Authority
from triglot.core.tensor import DATATYPES, unpack_bytes

pytestmark = IN_ONE_BROWSER

FILE_NAME = HOSTILE.replace("/", "")
FILES = {
    FILE_NAME: b"\x89PNG\r\n\xff\x00",
    "-x": b"",
    "numbers.bin": (np.arange(12288) % 5).astype("<f4").tobytes(),
}
LONG = 2**53 + 1
TEXT, DIGEST = [HOSTILE.encode()], [hashlib.sha256(FILES[FILE_NAME]).hexdigest().encode()]


@dataclass(frozen=True)
class Case:
    """What is filled in (kind, value), and what is answered: outputs, or those of each answer of a stream."""

    model: str
    inputs: Mapping[str, tuple[str, str | list[str]]]
    expected: Mapping[str, list[Any]]
    version: str = ""
    signature: str = ""
    protocols: tuple[str, ...] = ("KServe V2", "TF Serving", "grps")


CASES = [
    Case("half", {}, {"y": [0.75]}),
    Case("half", {"x": ("json", "[1, 2, 5]")}, {"y": [2.0, 4.0, 10.0]}, "1", "twice", ("KServe V2", "TF Serving")),
    Case("hostile", {HOSTILE: ("text", HOSTILE)}, {HOSTILE: TEXT}),
    Case("hostile", {HOSTILE: ("json", json.dumps([HOSTILE]))}, {HOSTILE: TEXT}),
    Case("digest", {"data": ("files", [FILE_NAME])}, {"hex": DIGEST}),
    Case(
        "digest",
        {"data": ("files", [FILE_NAME, "-x"])},
        {"hex": [*DIGEST, hashlib.sha256(b"").hexdigest().encode()]},
        protocols=("KServe V2", "TF Serving"),
    ),
    Case("large", {"image": ("zeros", "[2, 3, 64, 64]")}, {"sum": [0.0, 0.0]}),
    Case("large", {"image": ("files", ["numbers.bin"])}, {"sum": [24573.0]}),
    Case("fp16", {"x": ("json", "[[1.5, -2]]")}, {"y": [[1.5, -2.0]]}, protocols=("KServe V2",)),
    Case("bf16", {"x": ("json", "[[1.5, -2]]")}, {"y": [[1.5, -2.0]]}, protocols=("KServe V2",)),
    Case("int64", {"x": ("json", f"[[{LONG}], [-{LONG}]]")}, {"y": [[LONG], [-LONG]]}),
    Case("total", {}, {"y": [[1]]}, protocols=("KServe V2",)),
    Case(
        "steps",
        {"gate": ("text", "/"), "count": ("json", "[3]")},
        {"step": [0, 1, 2]},
        protocols=("KServe V2", "grps"),
    ),
]


async def test_each_snippet_works_as_pasted(tmp_path: Path) -> None:
    needs_grpcurl()
    async with served(tmp_path / "models") as server, calling(server) as caller:
        await check_snippets(caller, CASES, with_files(tmp_path / "here"))


async def test_snippets_of_a_reader_with_a_token(tmp_path: Path) -> None:
    needs_grpcurl()
    file = tmp_path / "access.toml"
    write(file, client("reader", ["secret-of-reader"], ["infer", "inspect"]))
    cases = [case for case in CASES if case.model in ("half", "fp16", "steps")]
    variables = {"TRIGLOT_TOKEN": "secret-of-reader"}
    async with (
        served(tmp_path / "models", access=str(file)) as server,
        calling(server, "secret-of-reader") as caller,
    ):
        await caller.choose("half", "KServe V2")
        assert "secret" not in "".join((await caller.snippets()).values())
        await check_snippets(caller, cases, with_files(tmp_path / "here"), **variables)


def with_files(folder: Path) -> Path:
    """The folder, made, with those that are chosen in it."""
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def check_snippets(caller: Caller, cases: Sequence[Case], folder: Path, **variables: str) -> None:
    """Each of each case answers what it should, in the folder and with the variables."""
    python: dict[str, list[tuple[Case, str]]] = {"tritonclient": [], "tensorflow": []}
    for case in cases:
        for protocol in case.protocols:
            await fill_in(caller, case, protocol, folder)
            snippets = await caller.snippets()
            # Only what has many values in JSON is too long.
            expected = ["curl", "grpcurl"] if protocol == "grps" else ["curl", "Python", "grpcurl"]
            assert list(snippets) == expected, (case, protocol)
            for name in ("curl", "grpcurl"):
                printed = await asyncio.to_thread(pasted, snippets[name], folder, **variables)
                if "-o answer.bin" in snippets[name]:
                    check_binary((folder / "answer.bin").read_bytes(), case)
                else:
                    assert values_of(printed) == as_lists(case.expected), (protocol, snippets[name], printed)
            if "Python" in snippets:
                environment = "tritonclient" if protocol == "KServe V2" else "tensorflow"
                python[environment].append((case, snippets["Python"]))
    for environment, calls in python.items():
        texts = [text for _, text in calls]
        printed_by = await asyncio.to_thread(in_python, environment, texts, folder, **variables)
        for (case, text), printed in zip(calls, printed_by, strict=True):
            check_printed(printed, case, named=environment == "tensorflow", text=text)
    assert names_in(folder) == sorted([*FILES, "answer.bin"])


async def fill_in(caller: Caller, case: Case, protocol: str, folder: Path) -> None:
    await caller.choose(case.model, protocol, version=case.version, signature=case.signature)
    for name, (kind, value) in case.inputs.items():
        sent = value if isinstance(value, str) else [folder / name for name in value]
        await caller.fill(name, sent, kind)
    if case.inputs:
        await expect(caller.page.locator("#inputs .problem").first).to_be_hidden()


def as_lists(expected: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The elements in a row, texts as such."""
    return {
        name: [
            element.decode() if isinstance(element, bytes) else element
            for element in np.array(values, object).ravel()
        ]
        for name, values in expected.items()
    }


def values_of(printed: str) -> dict[str, list[Any]]:
    """The outputs in what curl or grpcurl prints, in any of the protocols; of a stream those of all answers."""
    found: dict[str, list[Any]] = {}
    decoder, text = json.JSONDecoder(), re.sub("^data: ", "", printed, flags=re.MULTILINE).strip()
    while text:
        if not text.startswith("{"):
            return {"hex": [text]}  # grps answers bytes with bytes.
        document, end = decoder.raw_decode(text)
        text = text[end:].strip()
        for name, values in outputs_in(document.get("inferResponse", document)):
            if name != "all":
                found.setdefault(name, []).extend(values)
    return found


def outputs_in(document: Any) -> list[tuple[str, list[Any]]]:
    if "gtensors" in document:
        return [(tensor["name"], list_in(tensor, "flat")) for tensor in document["gtensors"]["tensors"]]
    if "binData" in document:
        return [("hex", [base64.b64decode(document["binData"]).decode()])]
    outputs = document.get("outputs", [])
    if raw := document.get("rawOutputContents"):
        pairs = zip(outputs, raw, strict=True)
        return [(pair["name"], elements(base64.b64decode(data), pair["datatype"])) for pair, data in pairs]
    if isinstance(outputs, dict) and all(
        isinstance(output, dict) and "dtype" in output for output in outputs.values()
    ):
        return [(name, list_in(output, "Val")) for name, output in outputs.items()]
    if isinstance(outputs, list) and all(isinstance(output, dict) and "datatype" in output for output in outputs):
        return [(output["name"], np.array(output["data"], object).ravel().tolist()) for output in outputs]
    # TensorFlow Serving's REST has no name for the only output.
    named = outputs if isinstance(outputs, dict) else {only_name(outputs): outputs}
    return [(name, np.array(values, object).ravel().tolist()) for name, values in named.items()]


def only_name(values: Any) -> str:
    first = np.array(values, object).ravel()[0]
    if isinstance(first, str):
        return HOSTILE if first == HOSTILE else "hex"
    return "y"


def list_in(tensor: Mapping[str, Any], word: str) -> list[Any]:
    """Of the field with the elements; int64 are texts there, bytes in base64."""
    ((key, values),) = [(key, value) for key, value in tensor.items() if word in key]
    if key == "stringVal":
        return [base64.b64decode(value).decode() for value in values]
    return [int(value) if "64" in key and isinstance(value, str) else value for value in values]


def elements(data: bytes, datatype: str) -> list[Any]:
    if datatype == "BYTES":
        count, at = 0, 0
        while at < len(data):
            at += 4 + int.from_bytes(data[at : at + 4], "little")
            count += 1
        return [element.decode() for element in unpack_bytes(data, count)]
    values: list[Any] = np.frombuffer(data, DATATYPES[datatype].dtype).tolist()
    return values


def check_binary(answer: bytes, case: Case) -> None:
    ((name, values),) = case.expected.items()
    array = np.array(values, DATATYPES[case.model.upper()].dtype)
    assert f'"name":"{name}"'.encode() in answer
    assert answer.endswith(array.tobytes())


def check_printed(printed: str, case: Case, *, named: bool, text: str) -> None:
    """What numpy prints of each output is there, of a stream for each answer."""
    for name, values in case.expected.items():
        head = f"{name} " if named else ""
        is_stream = case.model == "steps"
        for value in [[value] for value in values] if is_stream else [values]:
            is_bytes = isinstance(value[0], bytes)
            shown = f"{head}{np.array(value, object if is_bytes else None)}"
            assert squeezed(shown) in squeezed(printed), (text, shown, printed)


def squeezed(text: str) -> str:
    """Without blanks, and dots behind numbers, which bfloat16 has not."""
    return re.sub(r"\.(?!\d)|\s", "", text)


async def test_without_grpc_curl_is_left(tmp_path: Path) -> None:
    async with served(tmp_path, grpc_port=-1) as server, calling(server) as caller:
        await caller.choose("half", "TF Serving")
        assert list(await caller.snippets()) == ["curl"]
        note = caller.page.locator("[data-snippet=grpcurl] small")
        await expect(note).to_have_text("the gRPC port is disabled")
        await caller.choose("half", "KServe V2")
        assert list(await caller.snippets()) == ["curl", "Python"]


async def test_what_would_be_too_long_is_not_written(tmp_path: Path) -> None:
    async with served(tmp_path) as server, calling(server) as caller:
        await caller.choose("large", "TF Serving")
        await caller.fill("image", "[9, 3, 64, 64]", "zeros")
        assert list(await caller.snippets()) == ["Python", "grpcurl"]
        note = caller.page.locator("[data-snippet=curl] small")
        await expect(note).to_have_text(re.compile(r"^too long to paste: \d+,\d+ characters$"))
        # What the shell takes as no argument is piped.
        await caller.fill("image", "[3, 3, 64, 64]", "zeros")
        assert "--data-binary @-" in (await caller.snippets())["curl"]


async def test_copying(tmp_path: Path) -> None:
    async with served(tmp_path) as server, calling(server) as caller:
        await caller.choose("hostile")
        await caller.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        for name, text in (await caller.snippets()).items():
            await caller.page.get_by_role("button", name=f"Copy the call for {name}").click()
            await expect(caller.page.locator(f"[data-snippet={name}] [role=status]")).to_have_text("copied")
            assert await caller.page.evaluate("navigator.clipboard.readText()") == text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_the_address_is_that_of_the_page(tmp_path: Path, host: str) -> None:
    async with served(tmp_path) as server, calling(server) as caller:
        await caller.open(f"http://{host}:{server.rest_port}/grps/v1/monitor/metrics")
        await caller.choose("half")
        snippets = await caller.snippets()
        assert f" http://{host}:{server.rest_port}/v2/models/half/infer " in snippets["curl"]
        assert f" {host}:{server.grpc_port} " in snippets["grpcurl"]


async def test_behind_a_proxy_with_a_prefix(tmp_path: Path) -> None:
    async with served(tmp_path / "models") as server, proxied(server.rest_port) as url, calling(server) as caller:
        await caller.open(url)
        await caller.choose("half")
        await caller.run()
        assert await caller.answer() == {"y": ("FP32 [1]", "[0.75]")}
        snippets = await caller.snippets()
        assert f" {url}v2/models/half/infer " in snippets["curl"]
        assert values_of(await asyncio.to_thread(pasted, snippets["curl"], tmp_path)) == {"y": [0.75]}
        (printed,) = await asyncio.to_thread(in_python, "tritonclient", [snippets["Python"]], tmp_path)
        assert printed == "[0.75]\n"
        links = caller.page.locator("a[href$=docs], footer a")
        assert await links.evaluate_all("links => links.map(link => link.href)") == [f"{url}docs", f"{url}metrics"]


@asynccontextmanager
async def proxied(port: int) -> AsyncIterator[str]:
    """The address below which another server passes everything on to this one."""

    async def forward(request: web.Request) -> web.Response:
        url = f"http://127.0.0.1:{port}/{request.match_info['path']}"
        kept = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, url, params=request.query, headers=kept, data=await request.read()
            ) as answer,
        ):
            left_out = ("content-length", "date", "server")
            headers = [(name, value) for name, value in answer.headers.items() if name.lower() not in left_out]
            return web.Response(status=answer.status, headers=CIMultiDict(headers), body=await answer.read())

    app = web.Application()
    app.router.add_route("*", "/some/where/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/some/where/"
    finally:
        await runner.cleanup()


async def test_with_tls(tmp_path: Path) -> None:
    needs_grpcurl()
    options = Authority(tmp_path).server()
    async with served(tmp_path / "models", **options) as server, visiting(ignore_https_errors=True) as visitor:
        caller = Caller(visitor.page, server)
        await caller.open(f"https://localhost:{server.rest_port}/")
        await caller.choose("half")
        await caller.run()
        assert await caller.answer() == {"y": ("FP32 [1]", "[0.75]")}
        snippets = await caller.snippets()
        for name in ("curl", "grpcurl"):
            assert values_of(await asyncio.to_thread(pasted, snippets[name], tmp_path)) == {"y": [0.75]}
        assert f'triton.InferenceServerClient("localhost:{server.rest_port}", ssl=True)' in snippets["Python"]
