"""Clients that call `who` all the time, in a process that does nothing else with gRPC: the tests' own has run many
clients and servers of both kinds, grpc.aio's among them, and a stalled call there says nothing of the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import grpc

from tests.process import SECONDS, clean_environment
from tests.protocol_clients.kserve import infer
from tests.waiting import wait_until

REPORT_SECONDS = 0.02
"""Between two lines of what was answered so far."""
PAUSE_SECONDS = 0.005
"""Between two calls: a worker has to come up beside the callers."""
CALLS = 5
"""Over one channel: what workers that come and go do to connections is what matters."""


class Callers:
    """What threads of another process were answered by now, each over a channel that connects again when it must.

    `answers`: how many, by the worker's process. `errors`: as texts.
    """

    def __init__(self, port: int, count: int) -> None:
        self.answers: Counter[int] = Counter()
        self.errors: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environment(PYTHONPATH=os.pathsep.join(sys.path)),
            text=True,
        )
        assert self._process.stdout is not None
        self._thread = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._thread.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            report = json.loads(line)
            self.errors = report["errors"]
            self.answers = Counter({int(pid): number for pid, number in report["answers"].items()})

    def stop(self) -> None:
        """Have them end; their last word is heard. Raise `AssertionError` when they have failed."""
        with self._process as process:  # Closes what leads to it, and waits for its end.
            assert process.stdin is not None
            process.stdin.close()
            self._thread.join(2 * SECONDS)
        assert process.returncode == 0


@contextmanager
def calling(port: int, workers: int, count: int = 4) -> Iterator[Callers]:
    """So many; each of the workers has answered one."""
    callers = Callers(port, count)
    try:
        wait_until(lambda: len(callers.answers) == workers or bool(callers.errors))
        yield callers
    finally:
        callers.stop()


def _call(port: int, stopped: threading.Event, answers: Counter[int], errors: list[str]) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    while not stopped.is_set():
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            for _ in range(CALLS):
                if stopped.wait(PAUSE_SECONDS):
                    return
                try:
                    answers[infer(channel, "who")] += 1
                except grpc.RpcError as error:
                    errors.append(f"{error.code()}: {error.details()}")


def _wait_for_the_end(stopped: threading.Event) -> None:
    sys.stdin.read()
    stopped.set()


def main(port: int, count: int) -> None:
    """Until standard input ends."""
    stopped, answers, errors = threading.Event(), [Counter[int]() for _ in range(count)], list[str]()
    threads = [threading.Thread(target=_call, args=(port, stopped, own, errors)) for own in answers]
    threads.append(threading.Thread(target=_wait_for_the_end, args=(stopped,)))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        stopped.wait(REPORT_SECONDS)
        for thread in threads if stopped.is_set() else ():
            thread.join()
        total = sum((own.copy() for own in answers), Counter[int]())
        print(json.dumps({"answers": total, "errors": errors}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
