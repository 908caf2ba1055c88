"""The benches of the server, one after the other: `python -m bench`, from the repository's root.

What the page of results says is measured in ten minutes; the others run when they are named, or all of them. What
each prints is kept beside it, as NAME.txt; the load bench comes last and writes the page.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.servers import ROOT, ended_by_sigterm, signals_held_back

HERE = Path(__file__).parent
PAGE = "load"
# Some are shorter than by themselves.
BENCHES: tuple[tuple[str, Sequence[str]], ...] = (
    ("micro", ()),
    ("lifecycle", ()),
    ("leaks", ()),
    ("connection_memory", ()),
    ("failed_bodies", ()),
    ("batching", ("--in-flight", "1", "64", "256", "--seconds", "0.6")),
    ("overload", ()),
    ("process", ("--rounds", "5", "--seconds", "0.5")),
    ("shared_memory", ("--in-flight", "1", "--seconds", "0.7")),
    ("aio_tuning", ()),
    ("storms", ()),
    ("hostile_json", ()),
    ("access", ()),
    ("spans", ()),
    ("ray", ()),
)
USUAL = ("micro", "lifecycle", "leaks", PAGE)
ALL = "all"


def keep(name: str, words: Sequence[str], folder: Path = HERE) -> bool:
    """Run a bench, show what it prints and keep that; whether it ended well."""
    printed = []
    with running(name, words, subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    if process.returncode:
        printed.append(f"ended with {process.returncode}\n")
    (folder / f"{name}.txt").write_text("".join(printed), encoding="utf-8")
    return process.returncode == 0


def main(words: Sequence[str] | None = None) -> int:
    """Run them; 1 when one has failed."""
    names = [*dict(BENCHES), PAGE]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    text = f"benches to run: {', '.join(names)}, or {ALL} (default: {', '.join(USUAL)})"
    parser.add_argument("name", nargs="*", help=text)
    chosen = parser.parse_args(words).name or USUAL
    if ALL in chosen:
        chosen = names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"unknown bench {unknown[0]!r}; there are {', '.join(names)}")
    began, failed = time.monotonic(), []
    for name in names:
        if name not in chosen:
            continue
        print(f"\n=== {name}, after {(time.monotonic() - began) / 60:.1f} minutes\n", flush=True)
        # The page is what the load bench keeps.
        good = show(name) if name == PAGE else keep(name, dict(BENCHES)[name])
        if not good:
            failed.append(name)
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes" + "".join(f"; {name} failed" for name in failed))
    return 1 if failed else 0


def show(name: str) -> bool:
    """Run a bench; whether it ended well."""
    with running(name) as process:
        process.wait()
    return process.returncode == 0


@contextmanager
def running(name: str, words: Sequence[str] = (), stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A bench; where the block is left early, it ends too, and has its time to end its servers."""
    command = [sys.executable, "-m", f"bench.{name}", *words]

    def end(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            if kind is not KeyboardInterrupt:  # Which the terminal has told it, too.
                process.terminate()
            process.wait()

    with ended_by_sigterm(), ExitStack() as ends:
        with signals_held_back():
            process = ends.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=stdout, text=True))
            ends.push(end)
        yield process


if __name__ == "__main__":
    sys.exit(main())
