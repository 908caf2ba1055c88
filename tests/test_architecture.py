"""docs/architecture.md lists the folders, and the files that a call enters: as it is."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import grpc
import numpy as np
import pytest

import triglot
from served_models import serving
from triglot.pb.kserve import inference_pb2 as pb
from triglot.telemetry import store

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "server" / "triglot"
CORE = "transports/http2/core/"
"""What is before the event that begins a call, and after its answer."""
CALLS = 50


class Identity(triglot.Model):
    """As most models are: a plain `infer`, on a thread."""

    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]

    def infer(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": inputs["x"]}


PAGE = ROOT / "docs" / "architecture.md"
FOLDERS, _, WALK = PAGE.read_text().partition("<!-- walk -->")


def test_every_folder_is_listed() -> None:
    rows = re.findall(r"^\| (`.+?) \|", FOLDERS, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)/`", row)]
    assert sorted(named) == sorted({file.relative_to(PACKAGE).parts[0] for file in PACKAGE.glob("*/**/*.py")})


def test_the_picture_shows_folders() -> None:
    parts = re.findall(r'class="name".*?>(\w+)', PAGE.with_suffix(".svg").read_text())
    assert set(parts) > {"transports", "dataplane"}
    assert [part for part in parts if part != "client" and not (PACKAGE / part).is_dir()] == []


def listed() -> list[str]:
    return re.findall(r"^\| `(\S+\.py)` \|", WALK, re.MULTILINE)


async def test_the_files_that_a_call_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each second's numbers are no part of a call, however slow the machine is.
    monkeypatch.setattr(store, "LAG_SECONDS", 3600.0)
    entered: Counter[str] = Counter()
    by_this_call: set[str] = set()
    noting = threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and noting.is_set():
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                by_this_call.add(file.relative_to(PACKAGE).as_posix())

    threading.setprofile(note)
    try:
        async with (
            serving({"m": Identity()}, grpc_transport="h2") as here,
            grpc.aio.insecure_channel(f"127.0.0.1:{here.server.grpc_port}") as channel,
        ):
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(64)])
            request.inputs.add(name="x", datatype="FP32", shape=[1, 16])
            for number in range(2 * CALLS):
                if number == CALLS:  # By now all that is remembered is there.
                    noting.set()
                    sys.setprofile(note)
                request.id = str(number)
                await infer(request.SerializeToString(), timeout=30)
                entered.update(by_this_call)
                by_this_call.clear()
            sys.setprofile(None)
            noting.clear()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    # What comes now and then is not part of a call; what ends one may come after it.
    walk = sorted(file for file, count in entered.items() if count > CALLS // 2 and not file.startswith(CORE))
    assert walk == sorted(listed())
