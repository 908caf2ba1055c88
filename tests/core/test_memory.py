"""Memory that glibc keeps, and gives back: counted in page faults and in what is resident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.process import FREE_PORTS, SECONDS, Triglot, clean_environment, run_triglot
from tests.transports.live import request
from triglot.platform.memory import TUNABLES, VARIABLES, keep_memory

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
    reason="only glibc is told",
)
SIZE = 8 * 1024 * 1024
PAGE = 4096
PROGRAM = f"""
import json, os, resource
from triglot.platform.memory import trim, keep_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

kept = keep_memory(os.environ)
b"x" * {SIZE}
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    b"x" * {SIZE}
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
blocks = [b"x" * {SIZE} for _ in range(8)]
full = resident()
wall = b"x" * 1024  # So that they do not end the heap.
del blocks
free = resident()
trim()
print(json.dumps([kept, faults, full, free, resident()]))
"""


REST = f"""
import asyncio, os
from triglot.platform.memory import trim_when_idle, keep_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

async def run():
    assert keep_memory(os.environ)
    resting = asyncio.create_task(trim_when_idle(0.2))
    for _ in range(2):  # Each time that it has worked.
        blocks = [b"x" * {SIZE} for _ in range(8)]
        blocks.append(blocks)  # Only the garbage collector finds them.
        wall = b"x" * 1024
        full = resident()
        del blocks
        async with asyncio.timeout({SECONDS}):
            while resident() > full - 7 * {SIZE // PAGE}:
                await asyncio.sleep(0.1)

asyncio.run(run())
"""


THREADS = """
import json, os, threading
from triglot.platform.memory import trim, keep_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

def work():
    blocks = [b"x" * 2**20 for _ in range(48)]

assert keep_memory(os.environ)
sizes = [resident()]
thread = threading.Thread(target=work)
thread.start()
thread.join()
sizes.append(resident())
trim()
print(json.dumps([*sizes, resident()]))
"""


def program(**environment: str) -> Any:
    """Whether memory is kept; faults of 20 large blocks; what is resident: with blocks, without, given back."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean_environment(**environment), check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout)


def test_large_blocks_are_used_again_and_given_back_at_rest() -> None:
    kept, faults, full, free, given_back = program()
    assert kept
    assert faults < SIZE // PAGE
    assert free > full - SIZE
    assert given_back < full - 7 * SIZE


def test_a_process_that_rests_gives_back() -> None:
    subprocess.run([sys.executable, "-c", REST], env=clean_environment(), check=True, timeout=3 * SECONDS)


def test_what_threads_had_is_given_back() -> None:
    """Where threads have heaps of their own, glibc does not trim the ends of these."""
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, env=clean_environment(), check=True, stdout=subprocess.PIPE, timeout=SECONDS)
    before, free, given_back = json.loads(done.stdout)
    assert free > before + 40 * 2**20 // PAGE
    assert given_back < before + 8 * 2**20 // PAGE


@pytest.mark.parametrize("variable", VARIABLES)
def test_what_variables_say_wins(variable: str) -> None:
    value = "131072" if "MAX" not in variable else "65536"
    kept, _, full, free, _ = program(**{variable: value})
    assert not kept
    if variable == "MALLOC_MMAP_THRESHOLD_":
        assert free < full - 7 * SIZE


def test_what_tunables_say_wins() -> None:
    assert not keep_memory({TUNABLES: "glibc.malloc.trim_threshold=131072"})
    assert program(**{TUNABLES: "glibc.pthread.rseq=1"})[0]


def faults_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


MODEL = """
import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec(f"y{number}", "FP32", [-1]) for number in range(5)]

    def infer(self, inputs):
        return {f"y{number}": inputs["x"] * number for number in range(5)}
"""


def test_a_server_makes_no_faults_with_each_large_call(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODEL)
    # Less than what numpy asks for huge pages for, which are few faults in any case.
    sent = np.ones(SIZE // 8 - 1000, np.float32)
    body = request("m", sent.tobytes())
    with Triglot(tmp_path / "m.py", *FREE_PORTS, "--grpc-transport", "h2") as server:
        port, _ = server.ports()
        options = [("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for _ in range(10):
                infer(body)

            def faults_of_calls() -> int:
                before = faults_of(server.pid)
                for _ in range(10):
                    infer(body)
                return faults_of(server.pid) - before

            # The least: on a busy machine the server is idle between calls now and then, and returns a block.
            assert min(faults_of_calls() for _ in range(3)) < sent.nbytes // PAGE


@pytest.mark.parametrize(("malloc", "asked"), [("keep", True), ("system", False)])
def test_option_decides_whether_malloc_is_tuned(tmp_path: Path, malloc: str, asked: bool) -> None:
    words = ("serve", tmp_path / "nothing", *FREE_PORTS, "--log-level", "debug", "--malloc", malloc)
    # Who asks finds that it has been told already, and says so.
    completed = run_triglot(*words, environment={TUNABLES: "glibc.malloc.trim_threshold=131072"})
    assert completed.returncode == 1
    assert ("malloc is left as it is" in completed.stderr) == asked
