"""Runs proxies before a server, by the configurations that docs/proxies.md has."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import environments
from tests.docs.doc_pages import ROOT, blocks_of
from tests.process import clean_environment, is_listening, unused_ports
from tests.waiting import wait_until

PAGE = ROOT / "docs" / "proxies.md"


@dataclass(frozen=True)
class Proxy:
    """How a proxy is started: `program` of Debian's `package`, with `arguments` and its file.

    `file` is the title of a block in the page; `before` and `after` stand for Debian's own file that includes it.
    """

    name: str
    file: str
    program: str
    package: str
    arguments: str
    before: str = ""
    after: str = ""

    def path(self) -> str:
        """Return the path of the program; skips the test where it is not installed."""
        found = shutil.which(self.program, path="/usr/sbin:/usr/bin:/sbin:/bin")
        if found is None:
            pytest.skip(f"{self.program} is not installed: apt install {self.package}")
        return found


class Envoy(Proxy):
    """The one that Debian does not have, but PyPI."""

    def path(self) -> str:
        """Return the path of the program in its environment; skips the test where there is no wheel of it."""
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            pytest.skip("the wheel of Envoy is for Linux on x86-64")
        return str(environments.python("envoy").with_name(self.program))


NGINX = "user root; daemon off; pid nginx.pid; error_log stderr; events {} http { access_log off;" + "".join(
    f" {kind}_temp_path {kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
)
MODULES = ("mpm_event", "authz_core", "ssl", "http2", "proxy", "proxy_http", "proxy_http2")
APACHE = "User www-data\nGroup www-data\nPidFile pid\nErrorLog /dev/stderr\n" + "".join(
    f"LoadModule {module}_module /usr/lib/apache2/modules/mod_{module}.so\n" for module in MODULES
)
PROXIES = (
    Proxy("nginx", "triglot.conf", "nginx", "nginx", "-p . -e stderr -c", NGINX, "}"),
    Proxy("HAProxy", "haproxy.cfg", "haproxy", "haproxy", "-db -f"),
    Proxy("nghttpx", "nghttpx.conf", "nghttpx", "nghttp2-proxy", "--conf"),
    Proxy("Caddy", "Caddyfile", "caddy", "caddy", "run --adapter caddyfile --config"),
    Proxy("Apache", "apache.conf", "apache2", "apache2-bin", "-D FOREGROUND -d . -f", APACHE),
    Envoy("Envoy", "envoy.yaml", "envoy", "", "--log-level error --disable-hot-restart -c"),
)


@contextmanager
def running(
    proxy: Proxy, folder: Path, grpc_address: str, rest_address: str, origin: str = "https://app.example.com"
) -> Iterator[int]:
    """Run the proxy before a server; yields its port. `folder` has server.crt and server.key.

    `origin`: of the pages that may call.
    """
    (text,) = (block.text for block in blocks_of(PAGE.read_text()) if block.title == proxy.file)
    port, _ = unused_ports()
    upstream = {"8001": grpc_address.partition(":")[2], "8000": rest_address.partition(":")[2]}
    for documented, real in {
        **upstream,
        "8443": str(port),
        "/etc/triglot": str(folder),
        "https://app.example.com": origin,
    }.items():
        text = text.replace(documented, real)
    own = folder / f"{proxy.name} {port}"
    own.mkdir()
    (file := own / proxy.file).write_text(f"{proxy.before}\n{text}\n{proxy.after}")
    command = [proxy.path(), *proxy.arguments.split(), str(file)]
    with (
        (own / "log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=own,
            env=clean_environment(HOME=str(own)),
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or is_listening(port))
            assert process.poll() is None, (own / "log").read_text()
            yield port
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # Apache would wait for its idle connections.
