"""codegen/generate.py: what is committed is what it makes, and it notices when that is not so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PB = Path("server/triglot/pb")
# The stubs are those of one protoc.
pytestmark = pytest.mark.newest


def generate(root: Path, *arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, str(root / "codegen" / "generate.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in (Path("protos"), Path("codegen"), PB):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_committed_files_are_up_to_date() -> None:
    assert generate(ROOT, "--check") == (0, [])


def test_a_changed_proto_is_noticed(copy: Path) -> None:
    proto = copy / "protos/kserve/inference.proto"
    proto.write_text(proto.read_text().replace("bool live = 1;", "bool live = 2;"))
    assert generate(copy, "--check") == (1, ["differs: descriptors.binpb"])
    proto.write_text(proto.read_text().replace("bool live = 2;", "bool alive = 1;"))
    assert generate(copy, "--check") == (
        1,
        ["differs: descriptors.binpb", "differs: kserve/inference_pb2.pyi"],
    )


def test_comments_change_nothing(copy: Path) -> None:
    proto = copy / "protos/kserve/inference.proto"
    proto.write_text(proto.read_text() + "\n// The end.\n")
    assert generate(copy, "--check") == (0, [])


def test_missing_and_left_over_files_are_listed_and_put_right(copy: Path) -> None:
    (copy / PB / "kserve/model_config_pb2.py").unlink()
    (copy / PB / "kserve/older_pb2.py").touch()
    (copy / PB / "kserve/inference_pb2.pyi").write_text("")
    expected = [
        "differs: kserve/inference_pb2.pyi",
        "missing: kserve/model_config_pb2.py",
        "left over: kserve/older_pb2.py",
    ]
    assert generate(copy, "--check") == (1, expected)
    assert (copy / PB / "kserve/older_pb2.py").exists()
    assert generate(copy) == (0, expected)
    assert not (copy / PB / "kserve/older_pb2.py").exists()
    assert generate(copy, "--check") == (0, [])


def test_the_hand_written_module_is_left_alone(copy: Path) -> None:
    written = copy / PB / "__init__.py"
    written.write_text("# mine\n")
    assert generate(copy) == (0, [])
    assert written.read_text() == "# mine\n"
