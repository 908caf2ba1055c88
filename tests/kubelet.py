"""Runs a container's command as the kubelet does: starts, probes (with the configured timings), and ends it."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests import environments
from tests.process import SECONDS, clean_environment
from triglot.testing.process import Lines

CONTAINER = Path(__file__).parent / "container.sh"


def restricted(models: Path, *volumes: Path) -> list[str]:
    """Return the command prefix that runs a command with the file system of a container, which has these volumes.

    Skips the test where the system does not allow that.
    """
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        pytest.skip("only root can make a file system for a process of its own, and not in every container")
    return [
        "unshare",
        "--mount",
        "sh",
        *map(str, (CONTAINER, models, environments.ROOT, sys.base_prefix, *volumes)),
        "--",
    ]


@dataclass(frozen=True)
class Probe:
    """An HTTP probe; names and defaults are those of Kubernetes."""

    path: str
    period_seconds: float = 10
    timeout_seconds: float = 1
    failure_threshold: int = 3
    scheme: str = "HTTP"

    @classmethod
    def of(cls, probe: Mapping[str, Any]) -> Self:
        """Return the probe for an entry of a container's spec, such as `livenessProbe`."""
        named = {"periodSeconds": "period_seconds", "timeoutSeconds": "timeout_seconds"}
        named["failureThreshold"] = "failure_threshold"
        assert probe.keys() <= {"httpGet", *named}
        given = {name: probe[key] for key, name in named.items() if key in probe}
        return cls(probe["httpGet"]["path"], scheme=probe["httpGet"].get("scheme", "HTTP"), **given)

    def succeeds(self, port: int) -> bool:
        """Probe once; returns whether a response with a status of 200 to 399 arrives within `timeout_seconds`."""
        connection: http.client.HTTPConnection
        if self.scheme == "HTTPS":  # Without a check of the certificate, as the kubelet does.
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(
                "127.0.0.1", port, timeout=self.timeout_seconds, context=context
            )
        else:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=self.timeout_seconds)
        try:
            connection.request("GET", self.path, headers={"user-agent": "kube-probe/1.37", "connection": "close"})
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Pod:
    """A running container that listens on `port`; `with` starts its process, and kills it at the end.

    `ready` is its state by the readiness probe, updated on a thread.
    """

    def __init__(self, container: Mapping[str, Any], command: Sequence[str], port: int) -> None:
        self.port = port
        self._startup, self._readiness, self._liveness = (
            Probe.of(container[kind]) for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        self._command = command
        self._variables = {variable["name"]: variable["value"] for variable in container.get("env", ())}
        self._stopped = threading.Event()
        self._watching: list[threading.Thread] = []
        self.ready = False
        self.failed_liveness = 0
        """Number of liveness probes after which the kubelet would have restarted the container."""

    def __enter__(self) -> Self:
        # The home folder of a user without an entry in /etc/passwd; and the variables that Kubernetes sets for a
        # Service named triglot.
        environment = clean_environment(
            HOME="/", KUBERNETES_SERVICE_HOST="10.0.0.1", TRIGLOT_PORT="tcp://10.0.0.2:8080", **self._variables
        )
        self._process = subprocess.Popen(
            self._command,
            cwd="/",
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        self.log = Lines(self._process.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._process.kill()
        self._process.wait()
        for thread in self._watching:
            thread.join(SECONDS)
        self.log.close()

    def wait_until_ready(self) -> None:
        """Probe until startup and then readiness succeed; readiness and liveness are probed further on threads."""
        self._probe_until(self._startup)
        self._probe_until(self._readiness)
        self.ready = True
        for watch in (self._watch_readiness, self._watch_liveness):
            self._watching.append(threading.Thread(target=watch, daemon=True))
            self._watching[-1].start()

    def terminate(self, grace_seconds: float) -> float:
        """Send SIGTERM; returns the seconds until the process ended.

        Raise `subprocess.TimeoutExpired` after `grace_seconds`, when Kubernetes would send SIGKILL, and
        `AssertionError` for an exit status other than 0.
        """
        self._stopped.set()
        begun = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(grace_seconds)
        assert status == 0, self.log.text()
        return time.monotonic() - begun

    def _probe_until(self, probe: Probe) -> None:
        for _ in range(probe.failure_threshold + int(SECONDS / probe.period_seconds)):
            if probe.succeeds(self.port):
                return
            assert self._process.poll() is None, self.log.text()
            self._stopped.wait(probe.period_seconds)
        raise AssertionError(f"{probe.path} did not succeed:\n{self.log.text()}")

    def _watch_readiness(self) -> None:
        failures = 0
        while not self._stopped.wait(self._readiness.period_seconds):
            failures = 0 if self._readiness.succeeds(self.port) else failures + 1
            self.ready = failures < self._readiness.failure_threshold

    def _watch_liveness(self) -> None:
        failures = 0
        while not self._stopped.wait(self._liveness.period_seconds):
            failures = 0 if self._liveness.succeeds(self.port) else failures + 1
            self.failed_liveness += failures >= self._liveness.failure_threshold
