"""Key sets: what is read of them, and how they are fetched."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import RSAAlgorithm

import triglot
from tests.access.access_files import write
from tests.access.signed_tokens import Signer, issuer, key_server, keyset
from tests.waiting import wait_until
from triglot.access.control import AccessControl
from triglot.access.jwks import FETCH_SECONDS, MAX_BYTES, REFRESH_SECONDS, KeySetError, KeyUrl, read_keys
from triglot.core.errors import Code, ServingError, Unavailable
from triglot.core.operation import REST, Operation

DEFAULTS = {"refresh": REFRESH_SECONDS, "timeout": FETCH_SECONDS}
ONE, OTHER = Signer("one"), Signer("other")
EC, ED = Signer("ec", "ES256"), Signer("ed25519", "EdDSA")


# --- what is read ---


def of(*keys: Any) -> bytes:
    """A set."""
    return json.dumps({"keys": keys}).encode()


def changed(signer: Signer, **fields: Any) -> dict[str, Any]:
    """Its key with other fields; None takes one away."""
    return {name: value for name, value in (signer.jwk | fields).items() if value is not None}


@pytest.mark.parametrize(
    ("jwk", "algorithm"),
    [
        (changed(ONE, alg=None), "RS256"),
        (changed(ONE, alg="PS512"), "PS512"),
        (changed(ONE, use=None, key_ops=["verify", "sign"]), "RS256"),
        (changed(EC, alg=None), "ES256"),
        (changed(ED, alg=None), "EdDSA"),
        (changed(ED, use=None), "EdDSA"),
    ],
)
def test_the_algorithm_is_the_keys(jwk: dict[str, Any], algorithm: str) -> None:
    assert [key.algorithm for key in read_keys(of(jwk))] == [algorithm]


WEAK = json.loads(RSAAlgorithm.to_jwk(rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()))
UNUSABLE: dict[str, Any] = {
    "a secret": {"kty": "oct", "k": "c2VjcmV0", "kid": "k", "alg": "HS256"},
    "for encryption": changed(ONE, use="enc"),
    "for something else": changed(ONE, key_ops=["encrypt"]),
    "operations in text": changed(ONE, key_ops="verify"),
    "a weak one": WEAK,
    "a shared secret's algorithm": changed(ONE, alg="HS256"),
    "no algorithm": changed(ONE, alg="none"),
    "an algorithm of another kind": changed(ONE, alg="ES256"),
    "an algorithm of another curve": changed(EC, alg="ES384"),
    "an unknown curve": changed(EC, crv="secp256k1", alg="ES256K"),
    "a curve that is a list": changed(EC, crv=["P-256"]),
    "no numbers": changed(ONE, n=None),
    "numbers that are none": changed(ONE, n="!!"),
    "an exponent of zero": changed(ONE, e="AA"),
    "a point that is on no curve": changed(EC, x=EC.jwk["y"]),
    "a short point": changed(ED, x="AAAA"),
    "kid is a number": changed(ONE, kid=1),
    "algorithm is a list": changed(ONE, alg=["RS256"]),
    "a text": "key",
    "nothing": None,
    "no kind": {},
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_keys_without_an_issuer(name: str) -> None:
    assert [key.kid for key in read_keys(of(UNUSABLE[name], OTHER.jwk))] == ["other"]
    with pytest.raises(KeySetError, match="has no key for signatures"):
        read_keys(of(UNUSABLE[name]))


def test_duplicate_key() -> None:
    keys = read_keys(keyset(ONE, ONE, OTHER))
    assert [key.kid for key in keys] == ["one", "other"]
    assert read_keys(keyset(ONE, OTHER)) == keys
    assert read_keys(of()) == ()


def test_a_private_key_is_read_as_its_public_one() -> None:
    private = json.loads(RSAAlgorithm.to_jwk(ONE.key))
    assert "d" in private
    (key,) = read_keys(of(private | {"key_ops": ["verify"]}))
    signed, _, _ = ONE.token().rpartition(".")
    algorithm = RSAAlgorithm(RSAAlgorithm.SHA256)
    assert key.verify(signed.encode(), algorithm.sign(signed.encode(), ONE.key))
    assert not key.verify(b"else", algorithm.sign(signed.encode(), ONE.key))


NAMES = st.sampled_from(["kty", "crv", "x", "y", "n", "e", "alg", "use", "kid"])
VALUES = st.none() | st.text(max_size=8) | st.sampled_from(["RSA", "EC", "OKP", "P-256", "Ed25519"])


@given(st.lists(st.dictionaries(NAMES, VALUES | st.lists(VALUES, max_size=2))))
def test_keys_of_anything(keys: list[dict[str, Any]]) -> None:
    assert [key.kid for key in read_keys(of(*keys, ONE.jwk))] == ["one"]


@given(st.binary() | st.sampled_from([b"[]", b"null", b'{"keys": 1}', b"[" * 10_000, b'{"keys": [[]]}']))
def test_any_bytes(content: bytes) -> None:
    with pytest.raises(KeySetError):
        read_keys(content)


# --- how they are fetched ---


def fetched(source: KeyUrl) -> KeyUrl:
    """The same, when it has news."""
    wait_for(source, lambda: source.keys or source.problem)
    return source


def wait_for(source: KeyUrl | AccessControl, true: Callable[[], object]) -> None:
    """Look for new keys until it is true."""

    def look() -> object:
        source.renew()
        return true()

    wait_until(look)


def test_keys_behind_a_url() -> None:
    with key_server(keyset(ONE)) as server:
        source = KeyUrl(server.url)
        assert (source.keys, source.problem) == ((), "")
        assert [key.kid for key in fetched(source).keys] == ["one"]
        # Kept: neither time nor an unknown key is a reason to ask again so soon; it may be there the next time.
        source.renew()
        assert source.request_refresh("k")
        assert len(server.seen) == 1
        assert "authorization" not in server.seen[0]


def test_keys_are_fetched_again() -> None:
    with key_server(keyset(ONE)) as server:
        source = fetched(KeyUrl(server.url, refresh=0.01))
        server.content = keyset(OTHER)
        wait_for(source, lambda: [key.kid for key in source.keys] == ["other"])


def test_an_unknown_key_is_asked_for_soon() -> None:
    with key_server(keyset(ONE)) as server:
        source = fetched(KeyUrl(server.url, retry_delay=0.01))
        server.content = keyset(OTHER)
        wait_until(lambda: source.request_refresh("k"))
        wait_until(lambda: [key.kid for key in source.keys] == ["other"])


@pytest.mark.parametrize(
    ("content", "status", "headers", "problem"),
    [
        (b"no keys", 200, {}, "/openid/v1/jwks is not JSON"),
        (b"", 200, {}, "/openid/v1/jwks is not JSON"),
        (b"{}", 200, {}, "has no list 'keys'"),
        (b" " * (MAX_BYTES + 1), 200, {}, f"has more than {MAX_BYTES} bytes"),
        (keyset(ONE), 404, {}, "answers with HTTP status 404"),
        (keyset(ONE), 500, {}, "answers with HTTP status 500"),
        (keyset(ONE), 302, {"location": "http://localhost:1/"}, "answers with HTTP status 302"),
        (keyset(ONE), 302, {"location": "file:///etc/passwd"}, "answers with HTTP status 302"),
        (keyset(ONE)[:100], 200, {"content-length": "5000"}, "is not JSON"),
    ],
    ids=["text", "nothing", "no list", "huge", "404", "500", "elsewhere", "a file", "cut off"],
)
def test_a_server_that_has_none(content: bytes, status: int, headers: dict[str, str], problem: str) -> None:
    with key_server(content, status, **headers) as server:
        source = fetched(KeyUrl(server.url + "?key=secret", retry_delay=0.01))
        assert problem in source.problem
        assert "secret" not in source.problem
        assert source.request_refresh("k")
        # It is asked again, and until then the key may be one that it has.
        server.content, server.status, server.headers = keyset(ONE), 200, {}
        wait_for(source, lambda: source.keys)
        wait_until(lambda: not source.problem)


def test_keys_outlast_their_server() -> None:
    with key_server(keyset(ONE)) as server:
        source = fetched(KeyUrl(server.url, refresh=0.01))
    server.server_close()
    wait_for(source, lambda: source.problem)
    assert source.problem == f"cannot fetch {server.url}: Connection refused"
    assert [key.kid for key in source.keys] == ["one"]


@contextmanager
def raw_server(answer: bytes) -> Iterator[int]:
    """The port of a server that answers with this, and leaves."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                client.recv(65536)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000]
)
def test_what_is_no_http_server(answer: bytes) -> None:
    with raw_server(answer) as port:
        assert "cannot fetch" in fetched(KeyUrl(f"http://127.0.0.1:{port}/")).problem


def test_a_server_that_is_slow() -> None:
    with key_server(keyset(ONE)) as server:
        server.gate.clear()
        source = fetched(KeyUrl(server.url, retry_delay=0.01, timeout=0.1))
        assert source.problem == f"cannot fetch {server.url}: no answer within 0.1 seconds"
        server.gate.set()
        wait_for(source, lambda: source.keys)


def test_a_server_that_never_ends() -> None:
    """It sends a little now and then, and would be waited for as long as it does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        source = KeyUrl(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout=0.2)
        source.renew()
        client, _ = listening.accept()
        with client:
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

            def refused() -> bool:
                try:
                    client.sendall(b" ")
                except OSError:
                    return True
                return False

            wait_until(refused)
        wait_for(source, lambda: source.problem.endswith("no answer within 0.2 seconds"))


# --- over TLS ---


def test_a_server_with_a_ca_that_wants_a_token(tmp_path: Path) -> None:
    """As Kubernetes' API server."""
    ca, other = trustme.CA(), trustme.CA()
    files = tmp_path / "ca.crt", tmp_path / "token"
    other.cert_pem.write_to_path(files[0])
    with key_server(keyset(ONE), tls=ca.issue_cert("localhost")) as server:
        source = KeyUrl(server.url, *map(str, files), refresh=0.01, retry_delay=0.01)
        assert "cannot fetch" in fetched(source).problem
        assert "No such file or directory" in source.problem
        files[1].write_text("secret-1\nsecret-2\n")
        wait_for(source, lambda: "ValueError" in source.problem)
        assert "secret" not in source.problem
        files[1].write_text("secret-1\n")
        wait_for(source, lambda: "CERTIFICATE_VERIFY_FAILED" in source.problem)
        assert not server.seen
        # Both are renewed by Kubernetes.
        ca.cert_pem.write_to_path(files[0])
        wait_for(source, lambda: source.keys)
        assert server.seen[-1]["authorization"] == "Bearer secret-1"
        files[1].write_text("secret-2\n")
        wait_for(source, lambda: server.seen[-1]["authorization"] == "Bearer secret-2")


# --- what a client is told ---


def error_of(control: AccessControl, token: str) -> ServingError | None:
    """What a call with the token is refused with."""
    try:
        control.permission(Operation.INFER, REST, [("x-api-key", token)], lambda: ())
    except ServingError as error:
        return error
    return None


def code_of(control: AccessControl, token: str) -> Code:
    """The error's."""
    error = error_of(control, token)
    return Code.OK if error is None else error.code


def test_a_call_never_waits(tmp_path: Path) -> None:
    with key_server(keyset(ONE)) as server:
        server.gate.clear()
        write(tmp_path / "access.toml", issuer("cluster", server.url))
        control = AccessControl(triglot.Config(access=str(tmp_path / "access.toml")))
        for _ in range(3):
            error = error_of(control, ONE.token())
            assert isinstance(error, Unavailable)
            assert error.retry_after == 1
        assert server.asked.wait(60)
        # What no key can help needs no second try.
        assert code_of(control, ONE.token(aud="else")) is Code.UNAUTHENTICATED
        assert code_of(control, ONE.token({"alg": "none"})) is Code.UNAUTHENTICATED
        server.gate.set()
        wait_until(lambda: error_of(control, ONE.token()) is None)
        wait_for(control, lambda: code_of(control, OTHER.token()) is Code.UNAUTHENTICATED)
        # The issuer has a new key: asked for as soon as so many seconds have passed since the last time.
        server.content = keyset(ONE, OTHER)
        wait_until(lambda: error_of(control, OTHER.token()) is None)
        assert error_of(control, ONE.token()) is None


@pytest.mark.parametrize("strangers", [0, 1, 50], ids=["no strangers", "one", "many"])
def test_a_rotated_key_is_waited_for(tmp_path: Path, strangers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """UNAVAILABLE from the first call on, also right after a fetch, whatever unknown keys strangers name."""
    monkeypatch.setattr(KeyUrl.__init__, "__kwdefaults__", DEFAULTS | {"retry_delay": 1.0})
    with key_server(keyset(ONE)) as server:
        write(tmp_path / "access.toml", issuer("cluster", server.url))
        control = AccessControl(triglot.Config(access=str(tmp_path / "access.toml")))
        wait_for(control, lambda: error_of(control, ONE.token()) is None)
        server.content = keyset(OTHER)
        numbers = count()

        def code() -> Code:
            for _ in range(strangers):
                assert code_of(control, ONE.token({"kid": f"stranger-{next(numbers)}"})) is Code.UNAVAILABLE
            control.renew()
            return code_of(control, OTHER.token())

        codes = [code()]

        def is_known() -> bool:
            codes.append(code())
            return codes[-1] is Code.OK

        wait_until(is_known)
        assert set(codes) == {Code.UNAVAILABLE, Code.OK}
        # A key that the issuer does not have is refused, once the keys were looked at.
        wait_for(control, lambda: code_of(control, ONE.token({"kid": "none"})) is Code.UNAUTHENTICATED)


def test_a_rotated_key_of_a_file_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(keyset(ONE))
    write(tmp_path / "access.toml", issuer("cluster", file))
    control = AccessControl(triglot.Config(access=str(tmp_path / "access.toml")))
    assert code_of(control, OTHER.token()) is Code.UNAUTHENTICATED
    file.write_bytes(keyset(OTHER))
    assert [code_of(control, OTHER.token()) for _ in range(2)] == [Code.UNAVAILABLE, Code.OK]


def test_an_issuer_that_is_down_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with key_server() as server:
        url = server.url
    write(tmp_path / "access.toml", issuer("cluster", url))
    control = AccessControl(triglot.Config(access=str(tmp_path / "access.toml")))
    wait_for(control, lambda: caplog.records)
    control.renew()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"issuer.cluster.jwks: cannot fetch {url}: Connection refused; keys")
    error = error_of(control, ONE.token())
    assert isinstance(error, Unavailable)
