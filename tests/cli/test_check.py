"""`triglot check`: what would be served, loaded and warmed up, without a port."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

from tests import environments, saved_models
from tests.process import (
    IDENTITY,
    SECONDS,
    Triglot,
    clean_environment,
    run_triglot,
    taken_port,
    triglot_command,
    write_model,
)
from triglot.run import DEMO

READY = r"x INT32 \[1\] +y INT32 \[1\] +- +1 thread +\d+\.\d\d s +READY"
CONFIG = """
max_batch_size: 4
dynamic_batching {}
instance_group { count: 2 }
"""
NOT_INSTALLED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "onnxruntime":
            raise ModuleNotFoundError("No module named onnxruntime", name=name)

sys.meta_path.insert(0, Missing())
"""
BATCHED = IDENTITY.replace("[1]", "[-1, 1]")
CLOSES = IDENTITY + "    def close(self):\n        print('closed')\n"
WARMS = IDENTITY + "    example = {'x': [1]}\n"
WARMS_WRONG = WARMS.replace('return {"y": inputs["x"]}', "raise OSError('not warm')")


def test_a_repository_is_loaded_and_shown(tmp_path: Path) -> None:
    write_model(tmp_path / "own", CLOSES)
    for version in ("2", "10"):
        write_model(tmp_path / "two" / version)
    write_model(tmp_path / "triton" / "1", BATCHED)
    (tmp_path / "triton" / "config.pbtxt").write_text(CONFIG)
    with taken_port() as grpc_port, taken_port() as rest_port:  # None is opened.
        completed = run_triglot("check", tmp_path, "--grpc-port", str(grpc_port), "--rest-port", str(rest_port))
    assert completed.returncode == 0, completed.stderr
    heading, own, triton, two, ten, closed = completed.stdout.splitlines()
    assert heading.split() == [
        "model", "version", "backend", "inputs", "outputs", "batching", "instances", "load", "state"
    ]  # fmt: skip
    assert re.fullmatch(rf"own +1 +python +{READY}", own)
    assert re.fullmatch(
        r"triton +1 +python +x INT32 \[-1,1\] +y INT32 \[-1,1\] +dynamic, up to 4 +2 threads +\S+ s +READY", triton
    )
    assert re.fullmatch(rf"two +2 +python +{READY}", two)
    assert re.fullmatch(rf"two +10 +python +{READY}", ten)
    assert closed == "closed"
    assert "gRPC on" not in completed.stderr


def test_every_error_is_shown(tmp_path: Path) -> None:
    write_model(tmp_path / "a_broken", "1 +")
    write_model(tmp_path / "b_good")
    write_model(tmp_path / "c_cold", WARMS_WRONG)
    write_model(tmp_path / "d_wrong" / "1")
    (tmp_path / "d_wrong" / "config.pbtxt").write_text("no such field")
    completed = run_triglot("check", tmp_path, "--json")
    assert completed.returncode == 1
    shown = json.loads(completed.stdout)
    states = {model["model"]: (model["state"], model["error"]) for model in shown["models"]}
    assert list(states) == ["a_broken", "b_good", "c_cold", "d_wrong"]
    assert states["b_good"] == ("READY", "")
    for name, text in (("a_broken", "SyntaxError"), ("c_cold", "not warm"), ("d_wrong", "config.pbtxt")):
        state, error = states[name]
        assert state == "FAILED"
        assert text in error
    assert shown["errors"] == []
    completed = run_triglot("check", tmp_path)
    assert completed.returncode == 1
    assert re.search(r"^a_broken +1 +python +- .* FAILED$", completed.stdout, re.MULTILINE)
    assert re.search(r"^a_broken version 1: .*SyntaxError", completed.stdout, re.MULTILINE)
    assert re.search(r"^d_wrong: .*config\.pbtxt", completed.stdout, re.MULTILINE)


def test_missing_path() -> None:
    completed = run_triglot("check", "no/such/folder")
    assert completed.returncode == 1
    assert re.search("^/.*no/such/folder: no such file or folder$", completed.stdout.strip())


def test_options_are_those_of_serve(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path / name)
    flags = ("--model-control-mode", "explicit", "--load-model", "b")
    completed = run_triglot("check", tmp_path, *flags, "--json", "--workers", "2")
    assert [model["model"] for model in json.loads(completed.stdout)["models"]] == ["b"]
    completed = run_triglot("check", "--grpc-prot", "1")
    assert (completed.returncode, completed.stderr) == (
        2,
        "triglot: unknown option '--grpc-prot', did you mean '--grpc-port'?\n",
    )
    offered = run_triglot("check", "--help").stdout
    assert "--load-timeout SECONDS" in offered
    assert "--grpc-port" not in offered


def test_nothing_is_waited_for(tmp_path: Path) -> None:
    """As it is served: others may come later."""
    completed = run_triglot("check", tmp_path, "--watch", "--wait-for-models")
    assert (completed.returncode, completed.stdout) == (0, "no models\n")


def test_without_a_path_it_is_the_demo() -> None:
    completed = run_triglot("check", before=NOT_INSTALLED)
    assert completed.returncode == 0
    names = [line.split()[0] for line in completed.stdout.splitlines() if re.search(r" (READY|SKIPPED)$", line)]
    assert sorted(names) == sorted(path.name for path in DEMO.iterdir() if path.is_dir())
    assert re.search(r"^digits +1 +onnx .* SKIPPED$", completed.stdout, re.MULTILINE)
    assert "pip install onnxruntime" in completed.stdout


def test_a_saved_model(tmp_path: Path) -> None:
    saved_models.write(tmp_path, "half_plus_two")
    with Triglot(tmp_path, command="check", python=environments.python("tensorflow")) as checking:
        assert checking.wait() == 0, checking.stderr.text()
        assert re.search(r"^half_plus_two +123 +tensorflow .* READY$", checking.stdout.text(), re.MULTILINE)


# --- on a terminal ---


def on_terminal(*arguments: str | Path) -> str:
    """What `triglot ARGUMENTS` writes to a terminal."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        triglot_command(arguments), stdout=slave, stderr=slave, env=clean_environment(TERM="xterm")
    ) as process:
        os.close(slave)
        text = b""
        try:
            while more := os.read(master, 4096):
                text += more
        except OSError:  # Its end, as Linux says it.
            pass
        process.wait(SECONDS)
    os.close(master)
    return text.decode()


SLOW = IDENTITY + (
    "    def load(self, folder):\n"
    "        import logging, time\n"
    "        time.sleep(0.6)\n"
    "        logging.getLogger('slow').warning('half way')\n"
    "        time.sleep(0.6)\n"
)


def test_what_loads_is_one_line_below_the_log(tmp_path: Path) -> None:
    write_model(tmp_path / "a")
    write_model(tmp_path / "b", SLOW)
    text = on_terminal("check", tmp_path)
    drawn = text.split("\r\x1b[K")
    assert "1 of 2 loaded; loading b version 1 (1 s)" in drawn
    # A line of the log takes its place, and it is there again below.
    (around,) = [line for line in drawn if "half way" in line]
    assert re.fullmatch(r"\S+ W half way\r\n1 of 2 loaded; loading b version 1 \([01] s\)", around)
    assert drawn[-1].startswith("model ")


def test_no_line_is_drawn_into_a_pipe(tmp_path: Path) -> None:
    write_model(tmp_path / "b", SLOW)
    with Triglot(tmp_path, "--json", command="check") as checking:
        assert checking.wait() == 0
        assert "\x1b" not in checking.stderr.text()
        assert "half way" in checking.stderr.text()


def test_a_call_with_made_inputs(tmp_path: Path) -> None:
    doubles = IDENTITY.replace('inputs["x"]', 'inputs["x"] * 1.5')
    refuses = IDENTITY.replace("return", "raise triglot.InvalidArgument('odd'); return")
    write_model(tmp_path / "good")
    write_model(tmp_path / "refuses", refuses)
    assert run_triglot("check", tmp_path).returncode == 0
    write_model(tmp_path / "doubles", doubles)
    completed = run_triglot("check", tmp_path)
    assert completed.returncode == 1
    assert completed.stdout.splitlines()[-1] == (
        "doubles version 1: example: model 'doubles' returned output 'y' as FP64, its signature says INT32 (the "
        "example was made: x: INT32 [1] of 1; give it one of its own, or use --no-calls)"
    )
    assert run_triglot("check", "--no-calls", tmp_path).returncode == 0


def test_a_file_that_no_backend_reads_says_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "model.keras").touch()
    for path in (tmp_path, tmp_path / "model.keras"):
        completed = run_triglot("check", path)
        assert completed.returncode == 1
        assert (
            "it is: save the model with model.export(FOLDER), and serve FOLDER with its saved_" in completed.stdout
        )
