"""Public keys of token issuers: a JSON Web Key Set (RFC 7517) in a file, or behind a URL.

Strategy: verifying reads `keys` and never waits. A file is read again when it changes; a URL is fetched on a
thread, every few minutes and when a token names an unknown key.
"""

from __future__ import annotations

import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from triglot.core.fast_json import loads

MAX_BYTES = 256 * 1024
"""Largest key set, in bytes; large providers have some 20 KiB."""
REFRESH_SECONDS = 300.0
"""Interval of fetches, in seconds."""
RETRY_SECONDS = 5.0
"""Least time in seconds between the starts of fetches: the most that unknown keys of strangers delay one."""
MAX_ASKED = 1024
"""Most ids of unknown keys that are remembered, twice."""
FETCH_SECONDS = 10.0
"""Timeout of a fetch, in seconds."""
FEWEST_RSA_BITS = 2048
_ALGORITHMS = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
    ("OKP", "Ed448"): ("EdDSA",),
}
"""Algorithms by key type and curve: the first is the default of a key that names none."""
ALGORITHMS = tuple(dict.fromkeys(algorithm for some in _ALGORITHMS.values() for algorithm in some))
"""Supported algorithms; none with a shared secret: a verifier could then sign tokens, too."""
_PUBLIC = ("kty", "crv", "n", "e", "x", "y")


class KeySetError(Exception):
    """An error in a key set; the text continues after the name of the set."""


@dataclass(frozen=True, slots=True)
class Key:
    """A public key for exactly one algorithm."""

    kid: str
    algorithm: str
    material: tuple[str, ...]
    verify: Callable[[bytes, bytes], bool] = field(compare=False, repr=False)
    """Return whether its second argument is the signature of the first."""


def read_keys(content: bytes) -> tuple[Key, ...]:
    """Return the keys that can verify signatures; other entries are ignored (RFC 7517 5).

    Raise `KeySetError`.
    """
    if len(content) > MAX_BYTES:
        raise KeySetError(f"has more than {MAX_BYTES} bytes")
    try:
        keyset = loads(content)
    except ValueError:
        raise KeySetError("is not JSON") from None
    listed = keyset.get("keys") if isinstance(keyset, dict) else None
    if not isinstance(listed, list):
        raise KeySetError("has no list 'keys', as a JSON Web Key Set has")
    # Without duplicates, in order.
    keys = dict.fromkeys(key for entry in listed if isinstance(entry, dict) and (key := _key(entry)) is not None)
    if listed and not keys:
        raise KeySetError(f"has no key for signatures: RSA of {FEWEST_RSA_BITS} bits or more, EC or Ed25519")
    return tuple(keys)


def _key(jwk: dict[str, Any]) -> Key | None:
    """Return the key of a JWK, None if it is for another use, or unsupported."""
    import jwt  # noqa: PLC0415 - only where there is an issuer.

    public = {name: value for name in _PUBLIC if isinstance(value := jwk.get(name), str)}
    algorithms = _ALGORITHMS.get((public.get("kty", ""), public.get("crv", "")), ())
    algorithm, kid = jwk.get("alg", algorithms[0] if algorithms else None), jwk.get("kid", "")
    if algorithm not in algorithms or not isinstance(kid, str) or not _is_for_signatures(jwk):
        return None
    try:
        made = jwt.PyJWK(public, algorithm)
    except Exception:  # Of many types: invalid numbers, points that are not on the curve.
        return None
    if public["kty"] == "RSA" and made.key.key_size < FEWEST_RSA_BITS:
        return None
    algorithm_of_key, key = made.Algorithm, made.key

    def verify(signed: bytes, signature: bytes) -> bool:
        return algorithm_of_key.verify(signed, key, signature)

    return Key(kid, algorithm, tuple(public.values()), verify)


def _is_for_signatures(jwk: dict[str, Any]) -> bool:
    operations = jwk.get("key_ops", ["verify"])
    return jwk.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations


class KeySource(Protocol):
    """A source of keys. On the event loop."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The latest keys that could be read."""

    @property
    def problem(self) -> str:
        """Why the keys may be outdated; "" if they are not."""

    def renew(self) -> None:
        """Check for new keys, if it is time. Does not block."""

    def request_refresh(self, kid: str | None) -> bool:
        """Handle the id of an unknown key: return whether it may be among the keys soon."""


class Asked:
    """The ids of unknown keys that tokens named, by their hashes: strangers' tokens name any, of any length."""

    def __init__(self) -> None:
        self.since: set[int] = set()
        """Those that were named first since the keys were last looked at."""
        self._before: set[int] = set()

    def add(self, kid: str | None) -> bool:
        """Note an id; returns whether the keys have not been looked at since it was named first."""
        if (key := hash(kid)) in self._before:
            return False
        if len(self.since) < MAX_ASKED:
            self.since.add(key)
        return True

    def look(self) -> None:
        """Note that the keys are looked at from now on."""
        self._before = self.since if len(self._before) >= MAX_ASKED else self._before | self.since
        self.since = set()


class KeyFile:
    """A key set in a file; see `KeySource`."""

    def __init__(self, path: str) -> None:
        self.keys: tuple[Key, ...] = ()
        self.problem = ""
        self._path = Path(path)
        self._content: bytes | None = None
        self.renew()

    def renew(self) -> None:
        try:
            content = _start_of(self._path)
        except OSError as error:
            self._content, self.problem = None, f"cannot read {self._path}: {error.strerror}"
            return
        if content == self._content:
            return
        self._content = content
        try:
            self.keys, self.problem = read_keys(content), ""
        except KeySetError as error:
            self.problem = f"{self._path} {error}"

    def request_refresh(self, kid: str | None) -> bool:
        before = self.keys
        self.renew()  # The file may have changed since the last look.
        return self.keys != before or bool(self.problem)


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


class KeyUrl:
    """A key set behind a URL; see `KeySource`.

    `ca`: a PEM file with the CAs for its server, "" for the system's. `token_file`: a file with the bearer token
    to send. Both are read for each fetch. Redirects are refused.
    """

    def __init__(
        self,
        url: str,
        ca: str = "",
        token_file: str = "",
        *,
        refresh: float = REFRESH_SECONDS,
        retry_delay: float = RETRY_SECONDS,
        timeout: float = FETCH_SECONDS,
    ) -> None:
        self.keys: tuple[Key, ...] = ()
        self.problem = ""
        self._url, self._ca, self._token_file = url, ca, token_file
        self._refresh, self._retry_delay, self._timeout = refresh, retry_delay, timeout
        self._began = float("-inf")
        self._asked = Asked()
        self._thread: threading.Thread | None = None

    def renew(self) -> None:
        age = monotonic() - self._began
        if self._thread is not None and self._thread.is_alive():
            if age > self._timeout:
                self.problem = self._timeout_text
        elif age >= (self._retry_delay if self.problem or self._asked.since else self._refresh):
            self._begin()

    def request_refresh(self, kid: str | None) -> bool:
        is_new = self._asked.add(kid)
        alive = self._thread is not None and self._thread.is_alive()
        if not alive and monotonic() - self._began >= self._retry_delay:
            self._begin()
            return True
        return is_new or alive or bool(self.problem)

    def _begin(self) -> None:
        self._began = monotonic()
        self._asked.look()
        # A daemon thread, which does not delay the process's exit.
        self._thread = threading.Thread(target=self._fetch, name="jwks", daemon=True)
        self._thread.start()

    def _fetch(self) -> None:
        """Fetch the key set. On the thread."""
        try:
            self.keys, self.problem = read_keys(self._content()), ""
        except KeySetError as error:
            self.problem = f"{self._name} {error}"
        except urllib.error.HTTPError as error:
            error.close()
            self.problem = f"{self._name} answers with HTTP status {error.code}"
        except OSError as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            reason = getattr(cause, "strerror", None) or str(cause)
            late = isinstance(cause, TimeoutError)
            self.problem = self._timeout_text if late else f"cannot fetch {self._name}: {reason}"
        except Exception as error:  # Without its text, which for an invalid header contains the header.
            self.problem = f"cannot fetch {self._name}: {type(error).__name__}"

    def _content(self) -> bytes:
        request = urllib.request.Request(self._url, headers={"user-agent": "triglot", "accept": "*/*"})
        if self._token_file:
            token = _start_of(Path(self._token_file)).decode("ascii", "replace").strip()
            request.add_unredirected_header("authorization", f"Bearer {token}")
        context = ssl.create_default_context(cafile=self._ca or None)
        # Only https is proxied: http URLs are on this machine.
        proxies = {scheme: proxy for scheme, proxy in urllib.request.getproxies().items() if scheme == "https"}
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=context), _NoRedirection()
        )
        end, content = monotonic() + self._timeout, b""
        with opener.open(request, timeout=self._timeout) as response:
            while len(content) <= MAX_BYTES and (more := response.read1(MAX_BYTES)):
                content += more
                if monotonic() > end:
                    raise TimeoutError
        return content

    @property
    def _timeout_text(self) -> str:
        return f"cannot fetch {self._name}: no answer within {self._timeout:g} seconds"

    @property
    def _name(self) -> str:
        """The URL without its query, which may contain a secret."""
        return self._url.partition("?")[0]


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which could lead from https to anywhere."""

    def redirect_request(self, *_: Any) -> None:
        """Return None, so that the redirect's status becomes an error."""
