"""Runs Triton's server, if the variable TRITON names its binary (the wheel of nvidia-pytriton has one).

Its models are the bench's small ones, with a backend in C++ that returns the inputs, without Python.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bench.compiled import can_compile, compiled
from bench.servers import Server, answers_ready, free_port, started

VARIABLE = "TRITON"
SOURCE = Path(__file__).with_name("triton.cc")
FLAGS = ("-shared", "-fPIC")
BACKEND = "bench"
MODELS = {
    "identity_fp32": ("FP32", ("x",)),
    "identity_other": ("FP32", ("x",)),
    "identity_two": ("FP32", ("x", "x2")),
    "identity_bytes": ("STRING", ("x",)),
}
"""Datatype and inputs of each model."""


@cache
def left_out() -> str:
    """Return why Triton is not measured; "" if it is."""
    binary = os.environ.get(VARIABLE, "")
    if not binary:
        return f"tritonserver was not measured: {VARIABLE} does not name its binary"
    if not os.access(binary, os.X_OK):
        return f"tritonserver was not measured: {binary}, which {VARIABLE} names, is not executable"
    return "" if can_compile() else "tritonserver was not measured: its backend needs g++"


@contextlib.contextmanager
def serving(core: int | None) -> Iterator[tuple[Server, int, int]]:
    """Run the server with `MODELS`; yields it, its gRPC port and its REST port."""
    grpc_port, rest_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        folder = Path(name)
        library = folder / "backends" / BACKEND / f"libtriton_{BACKEND}.so"
        library.parent.mkdir(parents=True)
        library.symlink_to(compiled(SOURCE, FLAGS))
        for model, (datatype, inputs) in MODELS.items():
            (folder / "models" / model / "1").mkdir(parents=True)
            (folder / "models" / model / "config.pbtxt").write_text(_configuration(datatype, inputs))
        command = [os.environ[VARIABLE], f"--model-repository={folder / 'models'}"]
        command += [f"--backend-directory={folder / 'backends'}", "--allow-metrics=false"]
        command += ["--grpc-address=127.0.0.1", f"--grpc-port={grpc_port}"]
        command += ["--http-address=127.0.0.1", f"--http-port={rest_port}"]
        with started(
            "tritonserver",
            command,
            lambda: answers_ready(rest_port),
            core=core,
            log=folder / "log",
            environment={},
        ) as server:
            yield server, grpc_port, rest_port


def _configuration(datatype: str, inputs: tuple[str, ...]) -> str:
    def tensors(kind: str, names: list[str]) -> str:
        template = "{{ name: '{name}' data_type: TYPE_{datatype} dims: [-1, -1] }}"
        return f"{kind} [{', '.join(template.format(name=name, datatype=datatype) for name in names)}]"

    outputs = [name.replace("x", "y") for name in inputs]
    return "\n".join((f"backend: '{BACKEND}'", tensors("input", list(inputs)), tensors("output", outputs), ""))
