"""All of tritonclient, unmodified, against a repository of models written as users of Triton write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_scripts import ClientScript, Report
from server_process import ServerProcess

pytest.importorskip("onnxruntime")

MODELS = Path(__file__).resolve().parents[1] / "models_triton"
COMMON = ("triton_all_common.py", "triton_all_control.py")
SCRIPTS = [
    ClientScript("tritonclient", f"triton_all_{door}.py", (kind,), COMMON)
    for door in ("grpc", "http")
    for kind in (door, f"{door}.aio")
]
CASES = [pytest.param(script, name, id=f"{script}-{name}") for script in SCRIPTS for name in script.check_names()]
ReportOf = Callable[[ClientScript], Report]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportOf]:
    """What a client script found; it runs when it is first asked for, and all of them with one server."""
    flags = ["--model-control-mode", "explicit", "--load-model", "*", "--server-name", "triton"]
    flags += ["--shared-memory-prefix", "/"]
    flags += ["--trace-file", str(tmp_path_factory.mktemp("traces") / "trace.json")]
    reports: dict[ClientScript, Report] = {}
    with ServerProcess(str(MODELS), *flags) as server:

        def report_of(script: ClientScript) -> Report:
            if script not in reports:
                reports[script] = script.run(server)
            return reports[script]

        yield report_of


@pytest.mark.parametrize(("script", "name"), CASES)
def test_check(script: ClientScript, name: str, report: ReportOf) -> None:
    found = report(script)
    finding = found.findings.get(name, f"not reported: {found.end}")
    assert not finding, finding


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_check_is_reported_in_order(script: ClientScript, report: ReportOf) -> None:
    found = report(script)
    assert list(found.findings) == script.check_names(), found.end
    assert found.end.startswith("exit status 0\n"), found.end


@pytest.mark.newest  # The onnx package is of that environment.
def test_the_onnx_files_are_what_their_script_makes() -> None:
    onnx = pytest.importorskip("onnx", reason="the onnx package makes the models")
    import triton_onnx  # noqa: PLC0415 - it needs that package

    assert {file.parts[-3] for file in MODELS.glob("*/*/model.onnx")} == set(triton_onnx.models())
    for name, model in triton_onnx.models().items():
        assert onnx.load(triton_onnx.file_of(name)) == model, name
