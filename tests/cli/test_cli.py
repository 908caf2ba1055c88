"""The command line as its user sees it: what it prints, and the exit status."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import grpc
import pytest

import triglot
from tests.process import (
    FREE_PORTS,
    IDENTITY,
    SECONDS,
    Triglot,
    clean_environment,
    compiled_build,
    is_listening,
    run_triglot,
    unused_ports,
    write_model,
)
from tests.protocol_clients.channel import grpc_channel
from tests.protocol_clients.kserve import infer
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until
from triglot.cli import serve, triton_flags
from triglot.config.option_fields import default_text, groups
from triglot.config.options import OPTIONS, Config
from triglot.run import DEMO

SECONDS_TEXT = r"\d+\.\d\d s"
WITHOUT_ONNXRUNTIME = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "onnxruntime":
            raise {error}

sys.meta_path.insert(0, Missing())
"""
NOT_INSTALLED = WITHOUT_ONNXRUNTIME.format(error='ModuleNotFoundError("No module named onnxruntime", name=name)')
BROKEN_INSTALL = WITHOUT_ONNXRUNTIME.format(error='ImportError("libonnx.so: undefined symbol", name=name)')


def assert_one_line(text: str) -> str:
    (line,) = text.splitlines()
    assert line.startswith("triglot: ")
    return line


# --- help and usage ---


def test_version() -> None:
    completed = run_triglot("--version")
    build = "compiled" if compiled_build() else "pure Python"
    assert (completed.returncode, completed.stdout) == (0, f"triglot {triglot.__version__} ({build})\n")


ENDING = """
import atexit, sys, threading, time
from triglot.__main__ import run
atexit.register(print, "at exit")
atexit.register(print, end="half a line")
main_thread = threading.main_thread()
threading.Thread(target=lambda: (main_thread.join(), print("thread"))).start()
sys.argv = ["triglot", "serve", "no/such/folder"]
run()
"""


def test_the_end_waits_for_threads_and_runs_what_is_registered() -> None:
    """Python lets threads end first, then what is registered, the last one first; all that is printed is there."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (1, "thread\nhalf a lineat exit\n")
    assert "no/such/folder" in done.stderr


def test_the_command_ends_so_too() -> None:
    """It is what an installation makes of pyproject.toml."""
    command = Path(sys.executable).parent / "triglot"
    done = subprocess.run(
        [command, "serve", "no/such/folder"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 1
    assert "no/such/folder" in done.stderr
    assert "from triglot.__main__ import run" in command.read_text()


def test_help_lists_every_option_in_its_group_with_its_value_and_default() -> None:
    completed = run_triglot("serve", "--help-all", environment={"COLUMNS": "1000"})
    assert completed.returncode == 0
    sections = dict(re.findall(r"^(\S.*):\n((?:  .*\n)+)", completed.stdout, re.MULTILINE))
    assert len(groups(OPTIONS.values())) >= 10
    for title, names in groups(OPTIONS.values()).items():
        assert re.findall(r"^  --(?!no-)([a-z-]+)", sections[title], re.MULTILINE) == [
            name.replace("_", "-") for name in names
        ]
    for name, option in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        both = rf", --no-{flag.removeprefix('--')}" if isinstance(option.default, bool) else r" (?:[A-Z{]\S+|N)"
        default = re.escape(f" (default: {default_text(option)})") if default_text(option) else ""
        pattern = rf"^  {flag}(?:{both})\s+\S.*{default}$"
        assert re.search(pattern, completed.stdout, re.MULTILINE), flag
    assert " VALUE" not in completed.stdout


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--grpc-transport", "{aio,h2}"),
        ("--grace", "SECONDS"),
        ("--max-message-size", "BYTES"),
        ("--grpc-port", "PORT"),
        ("--log-file", "FILE"),
        ("--load-model", "NAME,..."),
        ("--workers", "N"),
    ],
)
def test_help_names_choices_and_units(flag: str, value: str) -> None:
    completed = run_triglot("serve", "--help-all")
    assert re.search(rf"^  {flag} {re.escape(value)}\s", completed.stdout, re.MULTILINE)


def test_help_lists_the_commands() -> None:
    completed = run_triglot("--help")
    assert completed.returncode == 0
    for command in ("serve", "check", "infer", "models", "replay", "tfserving", "grps", "token", "completion"):
        assert re.search(rf"^ +{command}\s+\S", completed.stdout, re.MULTILINE)
    bare = run_triglot()
    assert (bare.returncode, bare.stdout) == (0, completed.stdout)


def test_the_short_help_has_the_options_that_matter() -> None:
    """And names the one that lists all."""
    offered = run_triglot("serve", "--help").stdout
    assert {"--host", "--grpc-port", "--rest-port", "--access", "--help-all"} <= set(
        re.findall(r"--[a-z-]+", offered)
    )
    assert "--keepalive-time" not in offered
    assert len(offered.splitlines()) < 80


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--grpc-prot", "1"], "unknown option '--grpc-prot', did you mean '--grpc-port'?"),
        (["--rest-prot=1"], "unknown option '--rest-prot', did you mean '--rest-port'?"),
        (
            ["--no-exit-on-load-eror"],
            "unknown option '--no-exit-on-load-eror', did you mean '--no-exit-on-load-error'?",
        ),
        (["--zzz"], "unknown option '--zzz'\n"),
        # A beginning of a flag is not the flag: a later version may have two that begin so.
        (["--grpc", "1"], "unknown option '--grpc'"),
        (
            ["--model-repository=/models"],
            "'--model-repository' of Triton's; here: the repository is an argument: triglot",
        ),
        (["--http-port", "8000"], "unknown option '--http-port' of Triton's; here: --rest-port\n"),
        (["--grpc-port", "many"], "argument --grpc-port: invalid int value: 'many'"),
        (["--grace", "long"], "argument --grace: invalid float value: 'long'"),
        (["--grpc-port"], "argument --grpc-port: expected one argument"),
        (["--exit-on-load-error=yes"], "argument --exit-on-load-error/--no-exit-on-load-error: ignored"),
    ],
)
def test_wrong_flags(arguments: list[str], text: str) -> None:
    completed = run_triglot("serve", *arguments)
    assert completed.returncode == 2
    assert text in completed.stderr
    assert_one_line(completed.stderr)
    assert not completed.stdout


def test_an_unknown_command() -> None:
    completed = run_triglot("srve")
    assert completed.returncode == 2
    line = assert_one_line(completed.stderr)
    assert "unknown command 'srve', did you mean 'serve'?" in line
    assert all(name in line for name in ("tfserving", "grps"))


def test_wrong_values_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "triglot.toml"
    file.write_text('grpc_port = "many"')
    completed = run_triglot("serve", "--config", file)
    assert completed.returncode == 2
    assert assert_one_line(completed.stderr) == f"triglot: {file}: grpc_port: expected int, got 'many'"
    completed = run_triglot("serve", environment={"TRIGLOT_GRPC_PROT": "1"})
    assert completed.returncode == 2
    assert "'TRIGLOT_GRPC_PROT', did you mean 'TRIGLOT_GRPC_PORT'?" in assert_one_line(completed.stderr)


def test_paths_may_stand_on_both_sides_of_the_options(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path / name)
    with Triglot(tmp_path / "a", *FREE_PORTS, tmp_path / "b") as server:
        assert Rest(server.ports()[1]).get("/v2/models") == (200, {"models": ["a", "b"]})


def test_names_for_paths(tmp_path: Path) -> None:
    for name in ("a", "b", "models"):
        write_model(tmp_path / name)
    with Triglot("iris=a", "--watch", f"rank={tmp_path / 'b'}/model.py", *FREE_PORTS, folder=tmp_path) as server:
        rest = Rest(server.ports()[1])
        assert rest.get("/v2/models") == (200, {"models": ["iris", "rank"]})
        assert rest.infer("iris")[0] == 200
    with Triglot("models", "--model-name=iris", "--workers=2", *FREE_PORTS, folder=tmp_path) as server:
        assert Rest(server.ports()[1]).infer("iris")[0] == 200
    completed = run_triglot("check", "--json", tmp_path / "models", "--model-name", "iris")
    assert [model["model"] for model in json.loads(completed.stdout)["models"]] == ["iris"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model-name", "m"], "--model-name: expected one PATH, got 0"),
        (["a", "b", "--model-name", "m"], "expected one PATH, got 2; name each of several by NAME=PATH"),
        (["n=a", "--model-name", "m"], "--model-name: expected PATH without a name of its own, got NAME=PATH"),
        (["a", "--model-name="], "--model-name: '' is not a valid model name; expected 1 to 128 letters"),
        (["a b=c"], "a b=c: 'a b' is not a valid model name"),
        (["name="], "name=: expected NAME=PATH"),
        (["a", "--model_name", "m"], "unknown option '--model_name', did you mean '--model-name'?"),
    ],
)
def test_wrong_names_for_paths(arguments: list[str], text: str) -> None:
    completed = run_triglot("serve", *arguments)
    assert completed.returncode == 2
    assert text in assert_one_line(completed.stderr)


def test_a_path_with_an_equals_sign(tmp_path: Path) -> None:
    write_model(tmp_path / "a=b" / "identity")
    for path in ("./a=b", tmp_path / "a=b"):
        with Triglot(path, *FREE_PORTS, folder=tmp_path) as server:
            assert Rest(server.ports()[1]).infer("identity")[0] == 200


def test_sources_of_options_meet_in_the_process(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    file = tmp_path / "triglot.toml"
    file.write_text('server_name = "file"\ngrpc_port = 1\nrest_port = 1\nexit_on_load_error = false')
    environment = {"TRIGLOT_SERVER_NAME": "environment", "TRIGLOT_REST_PORT": "0"}
    with Triglot(tmp_path, "--config", file, "--grpc-port", "0", environment=environment) as server:
        status, metadata = Rest(server.ports()[1]).get("/v2")
    assert (status, metadata["name"]) == (200, "environment")


# --- what a start says ---


def test_the_log_of_a_start_and_the_sample_calls(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    for version in ("2", "10"):
        write_model(tmp_path / "two" / version)
    with Triglot(tmp_path, *FREE_PORTS) as server:
        grpc_port, rest_port = server.ports()
        server.stdout.wait_for("curl .*\n")
    expected = [
        "models to load: 2",
        rf"3 versions loaded in {SECONDS_TEXT}",
        "model +version +backend +inputs +outputs +batching +instances +load +state",
        rf"one +1 +python +x INT32 \[1\] +y INT32 \[1\] +- +1 thread +{SECONDS_TEXT} +READY",
        rf"two +2 +python +x INT32 \[1\] +y INT32 \[1\] +- +1 thread +{SECONDS_TEXT} +READY",
        rf"two +10 +python +x INT32 \[1\] +y INT32 \[1\] +- +1 thread +{SECONDS_TEXT} +READY",
        rf"gRPC on 127\.0\.0\.1:{grpc_port} and REST on 127\.0\.0\.1:{rest_port} in {SECONDS_TEXT}",
    ]
    lines = server.stderr.text().splitlines()
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(r"\d\d:\d\d:\d\d I " + pattern, line)
    monitor, api, infer, curl = server.stdout.text().splitlines()
    assert monitor == f"# monitor: http://127.0.0.1:{rest_port}/"
    assert api == f"# API: http://127.0.0.1:{rest_port}/docs"
    assert infer.endswith(f"triglot infer one --url 127.0.0.1:{grpc_port}")
    assert curl.startswith(f"curl -s http://127.0.0.1:{rest_port}/v2/models/one/predict ")


def test_what_loads_later_has_lines_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    with Triglot(tmp_path, *FREE_PORTS, "--watch", "--poll-interval", "0.1") as server:
        server.ports()
        assert "loaded one" not in server.stderr.text()
        write_model(tmp_path / "two")
        server.stderr.wait_for(rf"loaded two version 1 \(python\) in {SECONDS_TEXT}")


def test_each_load_is_logged_at_debug(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    with Triglot(tmp_path, *FREE_PORTS, "--log-level", "debug") as server:
        server.ports()
        server.stderr.wait_for(rf"loaded one version 1 \(python\) in {SECONDS_TEXT}")


def test_workers_print_the_table_once(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    with Triglot(tmp_path, *FREE_PORTS, "--workers", "2", "--drain-delay", "0") as server:
        for number in (1, 2):
            server.stderr.wait_for(rf"worker {number}\b.* serves")
        server.stop()
    assert len(re.findall("model +version +backend", server.stderr.text())) == 1
    assert len(re.findall("one +1 +python", server.stderr.text())) == 1


def test_the_sample_calls_are_for_a_model_that_serves(tmp_path: Path) -> None:
    write_model(tmp_path / "a_broken", "1 +")
    write_model(tmp_path / "b_large", IDENTITY.replace("[1]", "[1000]"))
    write_model(tmp_path / "c_half", IDENTITY.replace("INT32", "FP16"))
    write_model(tmp_path / "e_good")
    with Triglot(tmp_path, *FREE_PORTS, "--no-exit-on-load-error") as server:
        server.stdout.wait_for("curl .*\n")
    assert "/v2/models/e_good/predict" in server.stdout.text().splitlines()[-1]
    assert re.search(r" I a_broken +1 +python +- .* FAILED$", server.stderr.text(), re.MULTILINE)


@pytest.mark.parametrize(("old", "new"), [("[1]", "[1000]"), ("INT32", "BF16")])
def test_no_sample_call_is_printed_that_cannot_work(tmp_path: Path, old: str, new: str) -> None:
    write_model(tmp_path / "model", IDENTITY.replace(old, new))
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0") as server:
        server.ports()
        server.stop()
    assert [line[:2] for line in server.stdout.text().splitlines()] == ["# "] * 2


def test_an_ipv6_address(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    write_model(tmp_path / "model")
    with Triglot(tmp_path, *FREE_PORTS, "--host", "::1") as server:
        port = server.stdout.wait_for(r"curl -s http://\[::1\]:(\d+)/v2/models/model/predict ")[1]
        address = server.stdout.wait_for(r"triglot infer model --url (\[::1\]:\d+)")[1]
        assert Rest(int(port), "[::1]").get("/v2/health/ready")[0] == 200
        with grpc.insecure_channel(address) as channel:
            assert infer(channel, "model") == 7


# --- the demo, and libraries that are not there ---


def test_without_a_path_the_demo_is_served() -> None:
    pytest.importorskip("onnxruntime")
    with Triglot(*FREE_PORTS) as server:
        rest = Rest(server.ports()[1])
        status, listed = rest.get("/v2/models")
        assert (status, sorted(listed["models"])) == (200, sorted(p.name for p in DEMO.iterdir() if p.is_dir()))
        assert rest.get("/v2/health/ready")[0] == 200


def test_the_demo_does_without_onnxruntime() -> None:
    with Triglot(*FREE_PORTS, before=NOT_INSTALLED) as server:
        grpc_port, rest_port = server.ports()
        rest = Rest(rest_port)
        assert rest.get("/v2/health/ready") == (200, {"ready": True, "live": True})
        assert "digits" not in rest.get("/v2/models")[1]["models"]
        assert rest.get("/v2/models/digits")[0] == 404
        with grpc_channel(grpc_port) as channel:
            assert infer(channel, "identity") == 7
    (warning,) = [line for line in server.stderr.text().splitlines() if " W " in line]
    assert "digits version 1 is skipped" in warning
    assert "pip install onnxruntime" in warning


def test_a_model_that_was_asked_for_needs_its_library() -> None:
    completed = run_triglot("serve", DEMO / "digits", *FREE_PORTS, before=NOT_INSTALLED)
    assert completed.returncode == 1
    text = f"{DEMO / 'digits/1/model.onnx'}: the onnx backend needs onnxruntime, which is not installed"
    assert text in completed.stderr
    assert "run: pip install onnxruntime" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_library_that_cannot_be_imported_is_an_error_of_its_models() -> None:
    completed = run_triglot("serve", DEMO / "digits", *FREE_PORTS, before=BROKEN_INSTALL)
    assert completed.returncode == 1
    line = completed.stderr.splitlines()[-2]
    assert str(DEMO / "digits/1/model.onnx") in line
    assert "libonnx.so: undefined symbol" in line
    assert "Traceback" not in completed.stderr


# --- flags that add up ---


def test_models_to_load_add_up(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        write_model(tmp_path / name)
    flags = ("--model-control-mode=explicit", "--load-model=a", "--load-model", "c,b")
    with Triglot(tmp_path, *FREE_PORTS, *flags) as server:
        rest = Rest(server.ports()[1])
        assert [rest.get(f"/v2/models/{name}/ready")[0] for name in ("a", "b", "c", "d")] == [200, 200, 200, 404]


# --- models that cannot be loaded ---

FAILURES = {
    "syntax": ("class", "SyntaxError: invalid syntax"),
    "no class": ("import triglot", "found no subclass of triglot.Model with an infer()"),
    "import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "load": (IDENTITY + "    def load(self, folder):\n        raise OSError('no disk')\n", "OSError: no disk"),
    "exit": ("raise SystemExit(0)", "SystemExit"),
    "own error": (
        IDENTITY + "    def load(self, folder):\n        raise Odd\n"
        "class Odd(triglot.ModelLoadError):\n    def __init__(self): pass\n",
        "model.py: Odd: ",
    ),
    "inputs": (IDENTITY.replace('triglot.TensorSpec("x", "INT32", [1])', '"x"'), "inputs"),
}


OWN_CODE = ("load", "exit")
"""What the model's code raised while it ran; a missing module needs no traceback."""


@pytest.mark.parametrize("case", FAILURES)
def test_a_model_that_cannot_be_loaded_ends_the_start(tmp_path: Path, case: str) -> None:
    text, reason = FAILURES[case]
    write_model(tmp_path / "a_good")
    file = write_model(tmp_path / "b_broken", text)
    completed = run_triglot("serve", tmp_path, *FREE_PORTS)
    assert completed.returncode == 1
    *lines, last = completed.stderr.splitlines()
    assert last == (
        "triglot: 1 of the models could not be loaded (b_broken); --no-exit-on-load-error serves the others"
    )
    (line,) = [line for line in lines if " E " in line]
    assert "E b_broken version 1 could not be loaded: " in line
    assert str(file) in line
    assert reason in line
    assert [*re.findall('Traceback .*\n *File "(.*?)"', completed.stderr)] == [str(file)] * (case in OWN_CODE)
    assert "gRPC on" not in completed.stderr
    assert not completed.stdout


def test_defaults() -> None:
    """What is promised to everybody who types no more than `triglot serve`."""
    config = Config()
    assert (config.host, config.grpc_port, config.rest_port) == ("127.0.0.1", 8001, 8000)
    assert (config.drain_delay, config.grace) == (5, 20)
    # Orchestrators kill after 30 s.
    assert config.drain_delay + config.grace < 30


TRITON = """
help id exit-timeout-secs model-store model-repository exit-on-error disable-auto-complete-config
strict-readiness model-control-mode repository-poll-secs load-model model-config-name model-load-thread-count
model-load-retry-count model-namespacing enable-peer-access allow-http http-address http-port reuse-http-port
http-header-forward-pattern http-thread-count http-restricted-api http-max-input-size allow-grpc grpc-address
grpc-port reuse-grpc-port grpc-header-forward-pattern grpc-infer-thread-count grpc-infer-allocation-pool-size
grpc-max-response-pool-size grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert grpc-server-key grpc-root-cert
grpc-infer-response-compression-level grpc-keepalive-time grpc-keepalive-timeout
grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
grpc-max-connection-age-grace grpc-restricted-protocol log-verbose log-info log-warning log-error log-format
log-file allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count allow-vertex-ai
vertex-ai-port vertex-ai-thread-count vertex-ai-default-model allow-metrics allow-gpu-metrics allow-cpu-metrics
metrics-address metrics-port metrics-interval-ms metrics-config trace-config cache-config cache-directory
rate-limit rate-limit-resource pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size
min-supported-compute-capability buffer-manager-thread-count host-policy model-load-gpu-limit backend-directory
backend-config repoagent-directory strict-model-config response-cache-byte-size trace-file trace-level
trace-rate trace-count trace-log-frequency
"""
"""The flags of tritonserver."""


def test_replacements_of_tritons_flags_exist() -> None:
    offered = run_triglot("serve", "--help-all").stdout
    for named in re.findall(r"--[a-z-]+", " ".join(triton_flags.REPLACEMENTS.values())):
        assert re.search(rf" {named}[ ,]", offered), named
    assert not [flag for flag in triton_flags.REPLACEMENTS if re.search(rf" {flag}[ ,]", offered)]
    # Every flag of tritonserver's is one of ours, or has something in its place.
    assert not [
        flag
        for flag in TRITON.split()
        if not re.search(rf" --{flag}[ ,]", offered + " --help ") and f"--{flag}" not in triton_flags.REPLACEMENTS
    ]


def test_flags_on_the_page_for_who_comes_from_triton() -> None:
    """Those of Triton are Triton's, or the same here, and the others are ours."""
    page = (Path(__file__).parents[2] / "docs" / "migrating" / "triton.md").read_text()
    offered = set(re.findall(r"--[a-z-]+", run_triglot("serve", "--help-all").stdout))
    table, differs = page.partition("## Flags")[2].split("## What differs on purpose")
    for row in re.findall(r"^\| `-.*$", table, re.MULTILINE):
        theirs, ours = row.strip("| ").split(" | ")
        assert offered.issuperset(re.findall(r"--[a-z-]+", ours)), row
        assert (offered | triton_flags.REPLACEMENTS.keys()).issuperset(re.findall(r"--[a-z-]+", theirs)), row
    assert offered.issuperset(re.findall(r"`(--[a-z-]+)", differs))


HANGS_UP_EARLY = """
import os, signal, sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Whatever nohup has said to the tests.

class HangUp:
    def find_spec(self, name, path, target=None):
        if name == "triglot.cli.main":
            os.kill(os.getpid(), signal.SIGHUP)

sys.meta_path.insert(0, HangUp())
from triglot.__main__ import run
from triglot.version import build
run()
"""
"""The command, which gets SIGHUP before it has read its options, as by an early `systemctl reload`."""


def _has_hung_up(server: subprocess.Popen[bytes]) -> bool:
    server.send_signal(signal.SIGHUP)
    return server.poll() is not None


@pytest.mark.parametrize("options", [("--workers", "2"), ("--audit-log", "audit"), ("--log-file", "log"), ()])
def test_a_hangup_during_the_start_ends_no_server(tmp_path: Path, options: tuple[str, ...]) -> None:
    write_model(tmp_path / "m")
    grpc_port, rest_port = unused_ports()
    ports = ("--grpc-port", str(grpc_port), "--rest-port", str(rest_port))
    server = subprocess.Popen(
        [sys.executable, "-c", HANGS_UP_EARLY, "serve", str(tmp_path / "m"), *ports, *options],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: is_listening(rest_port) or server.poll() is not None)
        assert server.poll() is None
        server.send_signal(signal.SIGHUP)
        if not options:  # It may listen before it has started in all.
            wait_until(partial(_has_hung_up, server))
            assert server.poll() == -signal.SIGHUP
        else:
            wait_until(lambda: is_listening(rest_port))
            server.send_signal(signal.SIGTERM)
            assert server.wait(SECONDS) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("execution", ["thread", "process"])
def test_debug_answers_with_the_exception(tmp_path: Path, execution: str) -> None:
    text = IDENTITY.replace("return", "raise OSError('no disk')  #")
    file = write_model(tmp_path / "raises", f"{text}\n    execution = {execution!r}\n")
    write_model(tmp_path / "broken", "import nobodys\n")
    for flags, shown in (
        ((), False),
        (("--debug",), True),
        (("--reload",), True),
        (("--reload", "--no-debug"), False),
    ):
        with Triglot(tmp_path, *FREE_PORTS, "--no-exit-on-load-error", *flags) as server:
            rest = Rest(server.ports()[1])
            errors = [rest.infer(name)[1]["error"] for name in ("raises", "broken")]
        assert [f'File "{file}", line' in errors[0], "OSError: no disk" in errors[0]] == [shown, shown]
        assert ("No module named 'nobodys'" in errors[1]) == shown


def test_reload_beyond_loopback_hides_exceptions(tmp_path: Path) -> None:
    flags = {"reload": True, "watch": False, "config": None, "paths": [str(tmp_path)], "model_name": None}
    assert serve.start(flags, (), {}).config.debug
    assert not serve.start(flags | {"host": "0.0.0.0"}, (), {}).config.debug
