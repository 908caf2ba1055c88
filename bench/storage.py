"""Measures how long a server with models in S3 takes to start, against the same models in a local folder.

From the repository's root: `python -m bench.storage --help`. Each round starts the server with the local folder,
with S3 and an empty cache, and with S3 and the cache that the start before it filled. S3 is moto, on the client's
core, so its own speed is part of the figures.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import obstore
from obstore.store import S3Store

from bench import report, servers
from bench.lifecycle import MODEL
from bench.tally import BenchError

BUCKET = "models"
LOCAL, EMPTY, WARM = "local folder", "S3, empty cache", "S3, full cache"
GOAL = 3.0
"""Times as long as from the local folder that a start with an empty cache may take."""
START_LIMIT = 300.0


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds until the server is ready, its CPU seconds until then, objects that it downloaded."""

    seconds: float
    cpu: float
    downloads: int


class Emulator:
    """A running moto with a bucket."""

    def __init__(self, port: int, log: Path) -> None:
        self._log = log
        bucket = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(bucket).close()
        self.environment: Mapping[str, str] = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def put(self, root: Path) -> None:
        """Upload the files of a folder."""
        os.environ.update(self.environment)
        store = S3Store(BUCKET, client_options={"allow_http": True})
        for file in sorted(root.rglob("*")):
            if file.is_file():
                obstore.put(store, str(file.relative_to(root.parent)), file)

    def downloads(self) -> int:
        """Return how many objects were read so far."""
        return len(re.findall(f"GET /{BUCKET}/", self._log.read_text(errors="replace")))


@contextlib.contextmanager
def emulator(folder: Path, core: int | None) -> Iterator[Emulator]:
    """Run moto, in its environment, which is created first if it is missing."""
    made = subprocess.run(
        [sys.executable, "tests/environments.py", "storage"],
        cwd=servers.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    port, log = servers.free_port(), folder / "moto.log"
    command = [made.stdout.strip(), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with servers.started("moto", command, lambda: servers.accepts(port), core=core, log=log, environment={}):
        yield Emulator(port, log)


def write_models(root: Path, count: int, megabytes: float) -> None:
    """Write a repository of models whose weights have this size."""
    for number in range(count):
        version = root / f"model{number:03}" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        np.save(version / "weights.npy", np.full(int(megabytes * 1e6) // 4, number, np.float32))


def start(models: str, cache: Path, s3: Emulator, core: int | None) -> Start:
    """Start a server, wait until all models are ready, and end it."""
    port, before = servers.free_port(), s3.downloads()
    command = [sys.executable, "-m", "triglot", "serve", models, "--storage-cache", str(cache)]
    command += ["--grpc-port", "0", "--rest-port", str(port), "--drain-delay", "0"]
    began = time.perf_counter()
    seconds = 0.0

    def ready() -> bool:
        nonlocal seconds
        while not servers.answers_ready(port) and time.perf_counter() < began + START_LIMIT:
            time.sleep(0.005)  # No event signals that another process is ready.
        seconds = time.perf_counter() - began
        return True

    log = cache.parent / "log"
    with servers.started("triglot", command, ready, core=core, log=log, environment=s3.environment) as server:
        if seconds >= START_LIMIT or not server.alive():
            raise BenchError(f"{models}: the server was not ready within {START_LIMIT:.0f} s:\n{server.tail()}")
        return Start(seconds, server.cpu_seconds() or 0.0, s3.downloads() - before)


def measure(count: int, megabytes: float, rounds: int, cores: servers.Cores) -> Mapping[str, Sequence[Start]]:
    """Return the starts of each kind, one for each round."""
    found: dict[str, list[Start]] = {LOCAL: [], EMPTY: [], WARM: []}
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        folder = Path(name)
        root = folder / "r"
        write_models(root, count, megabytes)
        with emulator(folder, cores.client) as s3:
            s3.put(root)
            for number in range(rounds):
                cache = folder / f"cache{number}"
                for kind, models in ((LOCAL, str(root)), (EMPTY, f"s3://{BUCKET}/r"), (WARM, f"s3://{BUCKET}/r")):
                    found[kind].append(start(models, cache, s3, cores.server))
    return found


def lines(found: Mapping[str, Sequence[Start]]) -> Iterator[str]:
    """Yield the lines to print."""
    for kind, starts in found.items():
        ratios = [start.seconds / local.seconds for start, local in zip(starts, found[LOCAL], strict=True)]
        goal = f", goal {GOAL:g}" if kind == EMPTY else ""
        yield (
            f"{kind:>15}: ready after {np.median([start.seconds for start in starts]):6.2f} s, "
            f"{np.median(ratios):.2f} times the local folder ({min(ratios):.2f}-{max(ratios):.2f}{goal}), "
            f"{np.median([start.cpu for start in starts]):.2f} s of the server's CPU time, "
            f"{max(start.downloads for start in starts)} objects downloaded"
        )


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.storage", description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=100, help="models (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=5, help="weights of a model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each kind (default: %(default)s)")
    arguments = parser.parse_args(words)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    models = f"{arguments.models} models of {arguments.megabytes:g} MB"
    what = f"{models}, {arguments.rounds} starts of each kind; S3 and {cores.note}"
    print(*report.machine(), what, "", sep="\n", flush=True)
    try:
        print(*lines(measure(arguments.models, arguments.megabytes, arguments.rounds, cores)), sep="\n")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
