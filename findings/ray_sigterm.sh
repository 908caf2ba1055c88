#!/bin/bash
# Ray 2.60.0: SIGTERM does not end an actor; it is a SystemExit raised in the method that runs, which the method can catch.
#
# A process without a handler ends at SIGTERM, and so one expects of Ray's workers, whose node's memory monitor sends it.
# Ray's handler raises SystemExit instead. Where a method catches BaseException, as servers do that report any failure of
# a model to its caller, the call returns as if nothing had happened, and the actor takes further calls: a caller sees no
# ActorDiedError, and what was to be freed is still held.
#
# Output seen, on Python 3.11 (pid True: the same process answered the next call):
#   except Exception:      ActorDiedError; next call: ActorDiedError
#   except BaseException:  returned 'SystemExit'; next call: pid True
# Exits 0 while that is so, and 1 when the second actor ends as the first does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check ray==2.60.0
cat > run.py <<'PY'
import os
import signal
import time
from pathlib import Path

import ray
from ray.exceptions import ActorDiedError


@ray.remote
class Worker:
    def pid(self):
        return os.getpid()

    def work(self, caught, entered):
        try:
            entered.touch()
            time.sleep(120)
        except caught as error:
            return f"returned {type(error).__name__!r}"


def outcome(reference):
    try:
        return ray.get(reference, timeout=60)
    except ActorDiedError:
        return "ActorDiedError"


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
seen = []
for caught in (Exception, BaseException):
    worker = Worker.remote()
    pid = ray.get(worker.pid.remote())
    entered = Path(f"entered-{caught.__name__}").absolute()
    working = worker.work.remote(caught, entered)
    while not entered.exists():
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    first = outcome(working)
    after = outcome(worker.pid.remote())
    seen.append((first, after if after == "ActorDiedError" else f"pid {after == pid}"))
    print(f"{f'except {caught.__name__}:':22} {first}; next call: {seen[-1][1]}", flush=True)
raise SystemExit(seen != [("ActorDiedError", "ActorDiedError"), ("returned 'SystemExit'", "pid True")])
PY
venv/bin/python -W ignore run.py
