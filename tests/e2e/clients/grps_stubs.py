"""Modules as protoc makes them for clients of grps: `grps_pb2` and `grps_pb2_grpc`, registered as `grps.proto`."""

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[3] / "protos" / "grps"


def generate():
    """Put them where they can be imported from."""
    folder = tempfile.mkdtemp(prefix="grps_stubs_")
    known = resources.files("grpc_tools") / "_proto"
    flags = [f"--proto_path={PROTOS}", f"--proto_path={known}", f"--python_out={folder}"]
    status = protoc.main(["protoc", *flags, f"--grpc_python_out={folder}", "grps.proto"])
    assert status == 0, f"protoc ended with status {status}"
    sys.path.insert(0, folder)
