"""Shell completion, asked of a real shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.process import SECONDS, run_triglot

ASK = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
function=$(complete -p triglot | sed -E 's/.*-F (\\S+).*/\\1/')
"$function" triglot "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash."""
    file = tmp_path_factory.mktemp("completion") / "triglot.bash"
    completed = run_triglot("completion", "bash")
    assert completed.returncode == 0, completed.stderr
    file.write_text(completed.stdout)
    return file


def completed(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    done = subprocess.run(
        ["bash", "-c", ASK, "ask", script, *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        cwd=folder,
    )
    assert not done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["triglot", ""],
            {
                "serve",
                "check",
                "infer",
                "models",
                "traffic",
                "replay",
                "tfserving",
                "grps",
                "mlserver",
                "token",
                "completion",
            },
        ),
        (["triglot", "s"], {"serve"}),
        (["triglot", "serve", "--grpc-p"], {"--grpc-port"}),
        (["triglot", "serve", "models", "--no-exit"], {"--no-exit-on-load-error"}),
        (["triglot", "serve", "--grpc-transport", ""], {"h2", "aio"}),
        (["triglot", "serve", "--log-level", "w"], {"warning"}),
        (["triglot", "serve", "--log-file", "mod"], {"models"}),
        (["triglot", "check", "mod"], {"models"}),
        (["triglot", "check", "--js"], {"--json"}),
        (["triglot", "infer", "m", "--ur"], {"--url"}),
        (["triglot", "tfserving", "--rest_api_p"], {"--rest_api_port"}),
        (["triglot", "grps", "--http-error-status", "m"], {"mirror"}),
        (["triglot", "token", "search", "--op"], {"--operations"}),
        (["triglot", "completion", "f"], {"fish"}),
    ],
)
def test_bash_completes(script: Path, tmp_path: Path, words: list[str], expected: set[str]) -> None:
    (tmp_path / "models").mkdir()
    assert completed(script, tmp_path, *words) == expected


@pytest.mark.parametrize(("shell", "text"), [("zsh", "#compdef triglot"), ("fish", "complete -c triglot")])
def test_other_shells_have_scripts(shell: str, text: str) -> None:
    completed = run_triglot("completion", shell)
    assert completed.returncode == 0
    assert text in completed.stdout
    assert "grpc-transport" in completed.stdout
