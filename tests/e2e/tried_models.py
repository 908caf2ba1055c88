"""Models that the monitor page calls, a server of them, and a reader of the page who calls them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import triglot
from tests import environments
from tests.e2e.browser import BrowserPage, playwright_api, visiting
from tests.process import SECONDS, clean_environment, outcome, start_python, write_model
from triglot.model.config import ALL
from triglot.repository.config.settings import ModelSettings

expect = playwright_api.expect
HOSTILE = """<img src=x onerror=alert(1)> it's "$(touch pwned)" `touch pwned` \\ </script> é"""
"""A name of tensors and of files, and a text."""
HEAD = """
import asyncio, hashlib, os
import numpy as np
import triglot
from triglot import TensorSpec
"""
MODELS = {
    "half": """
class Model(triglot.Model):
    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]
    signatures = {"twice": triglot.Signature(inputs=inputs, outputs=outputs)}

    def infer(self, inputs, call):
        return {"y": inputs["x"] * (2 if call.signature_name == "twice" else 0.5)}
""",
    "digest": """
class Model(triglot.Model):
    inputs = [TensorSpec("data", "BYTES", [-1])]
    outputs = [TensorSpec("hex", "BYTES", [-1])]

    def infer(self, inputs):
        return {"hex": np.array([hashlib.sha256(one).hexdigest() for one in inputs["data"]], object)}
""",
    "large": """
class Model(triglot.Model):
    inputs = [TensorSpec("image", "FP32", [-1, 3, 64, 64])]
    outputs = [TensorSpec("sum", "FP64", [-1]), TensorSpec("all", "FP32", [-1, 3, 64, 64])]

    def infer(self, inputs):
        return {"sum": inputs["image"].sum((1, 2, 3), dtype=np.float64), "all": inputs["image"]}
""",
    "regresses": """
class Model(triglot.Model):
    signatures = {
        "serving_default": triglot.Signature(
            inputs=[TensorSpec("inputs", "BYTES", [-1])],
            outputs=[TensorSpec("outputs", "FP32", [-1])],
            method="regress",
        )
    }

    def infer(self, inputs):
        return {"outputs": triglot.parse_examples(inputs["inputs"], [TensorSpec("age", "FP32", [])])["age"]}
""",
    "speaks_json": """
class Model(triglot.Model):
    inputs = [TensorSpec("instances", "BYTES", [-1]), TensorSpec("parameters", "BYTES", [1])]
    outputs = [TensorSpec("predictions", "BYTES", [1])]
    speaks_json = True

    def infer(self, inputs):
        return {"predictions": np.array([b"[%b]" % b", ".join(inputs["instances"])], object)}
""",
    "colours": """
class Model(triglot.Model):
    inputs = [TensorSpec("image", "UINT8", [-1, -1, 3])]
    outputs = [TensorSpec("mean", "FP32", [3])]

    def infer(self, inputs):
        return {"mean": inputs["image"].mean((0, 1), dtype=np.float32)}
""",
    "odd": """
class Model(triglot.Model):
    outputs = [
        TensorSpec("raw", "BYTES", [2]), TensorSpec("floats", "FP32", [4]), TensorSpec("long", "INT64", [2])
    ]
    inputs = [TensorSpec("id", "INT64", []), TensorSpec("mask", "BOOL", [-1, 2], optional=True)]

    def infer(self, inputs):
        return {
            "raw": np.array([b"\\xff\\x00", "é".encode()], object),
            "floats": np.array([np.nan, np.inf, 0.1, -0.0], np.float32),
            "long": np.array([inputs["id"], inputs["mask"].sum() if "mask" in inputs else -1]),
        }
""",
    "hostile": f"""
NAME = {HOSTILE!r}

class Model(triglot.Model):
    inputs = [TensorSpec(NAME, "BYTES", [1])]
    outputs = [TensorSpec(NAME, "BYTES", [1])]

    def infer(self, inputs):
        return {{NAME: inputs[NAME]}}
""",
    "fails": f"""
class Model(triglot.Model):
    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        raise triglot.InvalidArgument({HOSTILE!r})
""",
    "waits": """
class Model(triglot.Model):
    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]

    async def infer(self, inputs):
        await asyncio.Event().wait()
""",
    "steps": """
class Model(triglot.Model):
    inputs = [TensorSpec("gate", "BYTES", [1]), TensorSpec("count", "INT32", [1])]
    outputs = [TensorSpec("step", "INT32", [1])]

    async def infer(self, inputs):
        for step in range(inputs["count"][0]):
            # The first step is free.
            while step and not os.path.exists(inputs["gate"][0]):
                await asyncio.sleep(0.01)
            yield {"step": np.array([step], np.int32)}
""",
    "total": """
class Model(triglot.Model):
    inputs = [TensorSpec(name, "INT32", [-1, 1]) for name in ("x", "total_in")]
    outputs = [TensorSpec(name, "INT32", [-1, 1]) for name in ("y", "total_out")]
    max_batch_size = 4
    sequence_batching = triglot.SequenceBatching(
        states=[triglot.SequenceState("total_in", "total_out", "INT32", [1])]
    )

    def infer(self, inputs):
        total = inputs["total_in"] + inputs["x"]
        return {"y": total, "total_out": total}
""",
}
for _datatype in ("fp16", "bf16", "int64", "uint16"):
    MODELS[_datatype] = f"""
class Model(triglot.Model):
    inputs = [TensorSpec("x", "{_datatype.upper()}", [-1, -1])]
    outputs = [TensorSpec("y", "{_datatype.upper()}", [-1, -1])]

    def infer(self, inputs):
        return {{"y": inputs["x"]}}
"""


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[triglot.Server]:
    """The models on free ports, `half` in two versions with a label."""
    for name, text in MODELS.items():
        for version in ("1", "2") if name == "half" else ("1",):
            write_model(folder / name / version, HEAD + text)
    ports: dict[str, Any] = {"grpc_port": 0, "rest_port": 0}
    config = triglot.Config(drain_delay=0, grace=0, **ports | options)
    models = [
        ModelSettings(name, folder / name, ALL, labels={HOSTILE: 1} if name == "half" else {}) for name in MODELS
    ]
    async with triglot.Server([], config, models=models) as server:
        yield server


class Caller(BrowserPage):
    """A reader of the page who calls models with it."""

    def __init__(self, page: Any, server: triglot.Server) -> None:
        super().__init__(page)
        self.url = f"http://127.0.0.1:{server.rest_port}/"
        self.status = page.locator("#call-status")
        self.outputs = page.locator("#answer .output")

    async def choose(self, model: str, protocol: str = "", *, version: str = "", signature: str = "") -> None:
        """A model, one of its versions and signatures, and the tab of a protocol; the form is there then."""
        await self.page.get_by_role("combobox", name="Model", exact=True).select_option(model)
        if version:
            await self.page.get_by_role("combobox", name="Version", exact=True).select_option(version)
        await expect(self.page.locator("#try:not([inert])")).to_be_visible()
        if signature:
            await self.page.get_by_role("combobox", name="Signature", exact=True).select_option(signature)
        if protocol:
            await self.page.get_by_role("tab", name=protocol).click()

    def control(self, name: str) -> Any:
        """What an input's value is typed into, or chosen with."""
        # CSS quotes texts as JSON does.
        field = f"#inputs [data-input={json.dumps(name, ensure_ascii=False)}]"
        return self.page.locator(f"{field} :is(textarea, input)")

    async def fill(self, name: str, value: str | Sequence[Any], kind: str = "") -> None:
        """An input's value, or its files; `kind`: in which form."""
        if kind:
            await self.page.get_by_label(f"Form of {name}", exact=True).select_option(kind)
        control = self.control(name)
        await (control.fill(value) if isinstance(value, str) else control.set_input_files(value))

    async def run(self) -> None:
        """Press the button, and wait for the answer."""
        await self.page.get_by_role("button", name="Run").click()
        await expect(self.page.get_by_role("button", name="Cancel")).to_be_hidden()

    async def answer(self) -> dict[str, tuple[str, str]]:
        """Of each output its datatype and shape, and its values."""
        texts = await self.outputs.evaluate_all(
            "nodes => nodes.map(node => [node.dataset.output, node.firstElementChild.textContent, "
            "node.querySelector('pre').textContent])"
        )
        return {name: (title.removeprefix(name).strip(), values) for name, title, values in texts}

    async def snippets(self) -> dict[str, str]:
        """The calls that can be copied, by the name of what they are for."""
        shown = await self.page.locator(".snippet:visible").evaluate_all(
            "nodes => nodes.map(node => [node.dataset.snippet, node.querySelector('pre').textContent])"
        )
        return {name: text for name, text in shown if text}


@asynccontextmanager
async def calling(server: triglot.Server, token: str = "", **options: Any) -> AsyncIterator[Caller]:
    """The page of a server, open; it must complain of nothing but refusals, where there is a token."""
    async with visiting(**options) as visitor:
        caller = Caller(visitor.page, server)
        await caller.open(caller.url, token)
        yield caller
        assert (caller.other_complaints() if token else caller.complaints) == []


def pasted(command: str, folder: Path, **variables: str) -> str:
    """What a command prints that is pasted into bash in this folder."""
    grpcurl = environments.python("grpcurl").parent
    environment = clean_environment(PATH=f"{grpcurl}{os.pathsep}{os.environ['PATH']}", **variables)
    done = subprocess.run(
        ["bash", "-ec", f"set -o pipefail\n{command}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout.decode()


def in_python(environment: str, snippets: Sequence[str], folder: Path, **variables: str) -> list[str]:
    """What each of the snippets prints, in one process of the environment."""
    program = (
        "import contextlib, io, json, sys\n"
        "printed = []\n"
        "for text in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        exec(text, {})\n"
        "    printed.append(out.getvalue())\n"
        "print(json.dumps(printed))\n"
    )
    arguments = ["-c", program, json.dumps(snippets)]
    done = outcome(start_python(arguments, environments.python(environment), variables, folder), 3 * SECONDS)
    assert done.returncode == 0, done.stderr
    printed: list[str] = json.loads(done.stdout.splitlines()[-1])
    return printed


def needs_grpcurl() -> None:
    """Skips the test where the wheel of grpcurl has no program."""
    if os.uname().sysname != "Linux" or os.uname().machine != "x86_64" or shutil.which("bash") is None:
        pytest.skip("the wheel of grpcurl is for Linux on x86-64")
