"""Runs the server's benches, one after the other: `python -m bench`, from the repository's root.

By default, the benches for the results page run, which takes ten minutes; others run if they are named, or all of
them. The output of each is written to bench/NAME.txt; the load bench runs last and writes the page.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.servers import ROOT, signals_held_back, sigterm_raises_exit

HERE = Path(__file__).parent
PAGE = "load"
BENCHES: tuple[tuple[str, Sequence[str]], ...] = (
    ("lifecycle", ()),
    ("storage", ()),
    ("on_demand", ()),
    ("ray", ()),
    ("mlserver", ()),
    ("builds", ()),
    ("shadow", ()),
    ("client", ()),
    ("failover", ()),
)
USUAL = ("lifecycle", PAGE)
ALL = "all"


def keep(name: str, words: Sequence[str], folder: Path = HERE) -> bool:
    """Run a bench, print its output and write it to NAME.txt; returns whether its exit status was 0."""
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
    """Run the chosen benches; returns 1 if any failed, else 0."""
    names = [*dict(BENCHES), PAGE]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    text = f"benches to run: {', '.join(names)}, or {ALL} (default: {', '.join(USUAL)})"
    parser.add_argument("name", nargs="*", help=text)
    parser.add_argument("--server-python", metavar="PATH", help="another interpreter, for builds")
    arguments = parser.parse_args(words)
    chosen = arguments.name or USUAL
    flags = dict(BENCHES)
    if arguments.server_python:
        flags["builds"] = ("--server-python", arguments.server_python)
    if ALL in chosen:
        chosen = names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"unknown bench {unknown[0]!r}; there are {', '.join(names)}")
    began, failed = time.monotonic(), []
    for name in names:
        if name not in chosen:
            continue
        print(f"\n=== {name}, after {(time.monotonic() - began) / 60:.1f} minutes\n", flush=True)
        # The load bench writes the page itself.
        good = show(name) if name == PAGE else keep(name, flags[name])
        if not good:
            failed.append(name)
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes" + "".join(f"; {name} failed" for name in failed))
    return 1 if failed else 0


def show(name: str, words: Sequence[str] = ()) -> bool:
    """Run a bench; returns whether its exit status was 0."""
    with running(name, words) as process:
        process.wait()
    return process.returncode == 0


@contextmanager
def running(name: str, words: Sequence[str] = (), stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a bench as a process; after an error in the block, waits until it has ended its servers and itself."""
    command = [sys.executable, "-m", f"bench.{name}", *words]

    def end(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            if kind is not KeyboardInterrupt:  # The terminal sent SIGINT to the bench, too.
                process.terminate()
            process.wait()

    with sigterm_raises_exit(), ExitStack() as ends:
        with signals_held_back():
            process = ends.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=stdout, text=True))
            ends.push(end)
        yield process


if __name__ == "__main__":
    sys.exit(main())
