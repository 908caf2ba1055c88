"""JWTs: which are taken, what they give, and for how long."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import triglot
from tests.access.access_clients import guarded_server
from tests.access.access_files import anonymous, client, write
from tests.access.signed_tokens import AUDIENCE, ISSUER, Signer, claims_of, hmac_token, issuer, keyset, part
from tests.waiting import ever_later, wait_until
from triglot.access.control import AccessControl
from triglot.access.credentials import MAX_TOKEN
from triglot.access.issuers import LEEWAY_SECONDS, MAX_VERIFIED
from triglot.config.options import ConfigError
from triglot.core.errors import PermissionDenied, ServingError, Unauthenticated
from triglot.core.operation import REST, Operation, Permission

ONE = Signer("one")
OTHER = Signer("other")


class Access:
    """A file with these tables, and the keys of `signers` beside it."""

    def __init__(self, folder: Path, *tables: str, signers: tuple[Signer, ...] = (ONE,)) -> None:
        self.file, self.keys = folder / "access.toml", folder / "jwks.json"
        self.keys.write_bytes(keyset(*signers))
        write(self.file, *(tables or (issuer("cluster", "jwks.json"),)))
        self.control = AccessControl(triglot.Config(access=str(self.file)))

    def permission(self, token: str, operation: Operation = Operation.INFER) -> Permission:
        """What a call with the token has."""
        return self.sent("authorization", f"Bearer {token}", operation)

    def sent(self, name: str, value: str, operation: Operation = Operation.INFER) -> Permission:
        """What a call with this field has."""
        return self.control.permission(operation, REST, [(name, value)], lambda: ())

    def refusal(self, token: str) -> str:
        """The text of it, which has nothing of the token."""
        with pytest.raises(Unauthenticated) as raised:
            self.permission(token)
        text = str(raised.value)
        assert not any(len(part) > 3 and part in text for part in token.split("."))
        return text

    def rewrite(self, *tables: str) -> None:
        """The file says something else."""
        write(self.file, *tables)
        self.control.renew()


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(tmp_path)


# --- which are taken ---


@pytest.mark.parametrize(
    ("algorithm", "kid"),
    [(f"{family}{bits}", "k") for family in ("RS", "PS", "ES") for bits in (256, 384, 512)]
    + [("EdDSA", "ed25519"), ("EdDSA", "ed448")],
)
def test_every_algorithm(tmp_path: Path, algorithm: str, kid: str) -> None:
    signer = Signer(kid, algorithm)
    permission = Access(tmp_path, signers=(OTHER, signer)).permission(signer.token())
    assert (permission.client, permission.group) == ("cluster:somebody", "cluster")


GOOD: dict[str, Callable[[], str]] = {
    "a list of audiences": lambda: ONE.token(aud=["elsewhere", AUDIENCE]),
    "just expired": lambda: ONE.token(exp=time.time() - LEEWAY_SECONDS + 20),
    "a clock that is late": lambda: ONE.token(nbf=time.time() + LEEWAY_SECONDS - 20),
    "no nbf and iat": lambda: ONE.token(nbf=None, iat=None),
    "no kid, as there is one key": lambda: ONE.token({"kid": None}),
    "no typ": lambda: ONE.token({"typ": None}),
    "typ of OAuth": lambda: ONE.token({"typ": "at+jwt"}),
    "a key in it, which nobody looks at": lambda: ONE.token({"jwk": OTHER.jwk, "jku": "https://evil.example"}),
    "a name in another script": lambda: ONE.token(sub="名前"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_tokens(access: Access, name: str) -> None:
    assert access.permission(GOOD[name]()).group == "cluster"


def unsigned(header: Any, claims: Any = None) -> str:
    """With an unknown signature."""
    return f"{part(header)}.{part(claims_of() if claims is None else claims)}.{part(b'x' * 256)}"


def deep(levels: int) -> bytes:
    return b'{"iss":' + b"[" * levels + b"]" * levels + b"}"


def with_last(token: str, change: Callable[[str], str]) -> str:
    """With another signature."""
    head, _, signature = token.rpartition(".")
    return f"{head}.{change(signature)}"


ES = Signer("es", "ES256")
FORGED = {"kid": "one", "jwk": OTHER.jwk, "alg": "RS256"}
BAD: dict[str, tuple[Callable[[], str], str]] = {
    "expired": (lambda: ONE.token(exp=time.time() - LEEWAY_SECONDS - 1), "has expired"),
    "no exp": (lambda: ONE.token(exp=None), "an exp"),
    "exp in text": (lambda: ONE.token(exp=str(time.time() + 600)), "an exp"),
    "exp is true": (lambda: ONE.token(exp=True), "an exp"),
    "exp is a list": (lambda: ONE.token(exp=[time.time() + 600]), "an exp"),
    "exp is null": (lambda: ONE.signed({"alg": "RS256", "kid": "one"}, claims_of() | {"exp": None}), "an exp"),
    "exp is infinite": (
        lambda: ONE.signed({"alg": "RS256", "kid": "one"}, claims_of() | {"exp": float("inf")}),
        "no valid JWT",
    ),
    "not yet": (lambda: ONE.token(nbf=time.time() + 600), "not valid yet"),
    "nbf in text": (lambda: ONE.token(nbf="0"), "nbf"),
    "another issuer": (lambda: ONE.token(iss="https://elsewhere"), "of no issuer"),
    "no issuer": (lambda: ONE.token(iss=None), "of no issuer"),
    "a list of issuers": (lambda: ONE.token(iss=[ISSUER]), "of no issuer"),
    "another audience": (lambda: ONE.token(aud="elsewhere"), "of no issuer"),
    "other audiences": (lambda: ONE.token(aud=["elsewhere", [AUDIENCE], {AUDIENCE: 1}, None]), "of no issuer"),
    "no audience": (lambda: ONE.token(aud=None), "of no issuer"),
    "a part of the audience": (lambda: ONE.token(aud=AUDIENCE[:-1]), "of no issuer"),
    "audience in a table": (lambda: ONE.token(aud={AUDIENCE: True}), "of no issuer"),
    "no subject": (lambda: ONE.token(sub=None), "sub is not"),
    "an empty subject": (lambda: ONE.token(sub=""), "sub is not"),
    "a number as subject": (lambda: ONE.token(sub=7), "sub is not"),
    "a long subject": (lambda: ONE.token(sub="s" * 257), "sub is not"),
    "two lines of subject": (lambda: ONE.token(sub="a\nb"), "sub is not"),
    # Who has the public key has all that these need.
    "alg none": (lambda: unsigned({"alg": "none", "kid": "one"}), "expected one of RS256"),
    "alg None": (lambda: unsigned({"alg": "None", "kid": "one"}), "expected one of RS256"),
    "alg none, and no signature": (lambda: f"{part({'alg': 'none'})}.{part(claims_of())}.", "is unknown"),
    "no alg": (lambda: unsigned({"kid": "one"}), "expected one of RS256"),
    "alg is a list": (lambda: unsigned({"alg": ["RS256"], "kid": "one"}), "expected one of RS256"),
    "the public key as secret": (lambda: hmac_token(ONE.pem), "expected one of RS256"),
    "the JWK as secret": (lambda: hmac_token(json.dumps(ONE.jwk).encode()), "expected one of RS256"),
    "an empty secret": (lambda: hmac_token(b""), "expected one of RS256"),
    "another algorithm of the family": (lambda: Signer("one", "RS512").token(), "not that of its key"),
    "another padding": (lambda: Signer("one", "PS256").token(), "not that of its key"),
    "another kind of key": (lambda: ES.token({"kid": "one"}), "not that of its key"),
    "the alg of another kind": (lambda: ONE.token({"alg": "ES256"}), "not that of its key"),
    # Somebody else's key.
    "another key": (lambda: OTHER.token({"kid": "one"}), "signature is wrong"),
    "its own key": (lambda: OTHER.signed(FORGED, claims_of()), "signature is wrong"),
    "an unknown key": (OTHER.token, "key is not one of issuer 'cluster'"),
    "an unknown key of its own": (lambda: OTHER.token({"jwk": OTHER.jwk}), "not one of issuer"),
    "kid is a number": (lambda: ONE.token({"kid": 1}), "a text as kid"),
    "kid is a list": (lambda: ONE.token({"kid": ["one"]}), "a text as kid"),
    "an empty kid": (lambda: ONE.token({"kid": ""}), "not one of issuer"),
    "kid is a path": (lambda: ONE.token({"kid": "../../dev/null"}), "not one of issuer"),
    "crit": (lambda: ONE.token({"crit": ["exp"]}), "crit"),
    "an empty crit": (lambda: ONE.token({"crit": []}), "crit"),
    "a payload that is not encoded": (lambda: ONE.token({"b64": False, "crit": ["b64"]}), "crit"),
    # Damaged.
    "no signature": (lambda: ONE.token().rpartition(".")[0], "is unknown"),
    "an empty signature": (lambda: with_last(ONE.token(), lambda _: ""), "is unknown"),
    "a short signature": (lambda: with_last(ONE.token(), lambda part: part[:-4]), "the token"),
    "a longer signature": (lambda: with_last(ONE.token(), lambda part: part + "AAAA"), "signature is wrong"),
    "half a byte": (lambda: with_last(ONE.token(), lambda part: part[:-1]), "no valid JWT"),
    "base64 of one character": (lambda: with_last(ONE.token(), lambda part: part + "AAA"), "no valid JWT"),
    "padding": (lambda: ONE.token() + "==", "is unknown"),
    "a character of no alphabet": (
        lambda: with_last(ONE.token(), lambda part: part[:9] + "!" + part[9:]),
        "unknown",
    ),
    "the alphabet of base64": (lambda: with_last(ONE.token(), lambda part: "+/" + part[2:]), "is unknown"),
    "a digit of another script": (lambda: with_last(ONE.token(), lambda part: "٣" + part[1:]), "is unknown"),
    "a line's end": (lambda: ONE.token()[:40] + "\n" + ONE.token()[40:], "is unknown"),
    "a fourth part": (lambda: ONE.token() + ".AAAA", "is unknown"),
    "five parts, as of JWE": (lambda: ".".join(["AAAA"] * 5), "is unknown"),
    "dots": (lambda: "..", "is unknown"),
    "a header that is a list": (lambda: ONE.signed([{"alg": "RS256"}], claims_of()), "no valid JWT"),
    "a header that is no JSON": (lambda: ONE.signed(b"{", claims_of()), "no valid JWT"),
    "a header in UTF-16": (lambda: ONE.signed('{"alg":"RS256"}'.encode("utf-16"), claims_of()), "no valid JWT"),
    "claims that are a text": (lambda: ONE.signed({"alg": "RS256", "kid": "one"}, "claims"), "no valid JWT"),
    "claims that are null": (lambda: ONE.signed({"alg": "RS256", "kid": "one"}, None), "no valid JWT"),
    "claims with NaN": (lambda: ONE.signed({"alg": "RS256", "kid": "one"}, b'{"exp":NaN}'), "no valid JWT"),
    "claims with half a surrogate": (lambda: ONE.token(sub="\ud800"), "no valid JWT"),
    "deep claims": (lambda: ONE.signed({"alg": "RS256", "kid": "one"}, deep(5000)), "no valid JWT"),
    "a deep header": (lambda: ONE.signed(deep(5000), claims_of()), "no valid JWT"),
    "a number of 5000 digits": (
        lambda: ONE.signed({"alg": "RS256", "kid": "one"}, b'{"exp":' + b"9" * 5000 + b"}"),
        "",
    ),
    "a token in a token": (
        lambda: ONE.signed({"alg": "RS256", "kid": "one", "cty": "JWT"}, ONE.token().encode()),
        "no valid JWT",
    ),
    "16 KiB of claims": (lambda: ONE.token(sub="s" * 11_000), "sub is not"),
    "too long": (lambda: ONE.token(more="s" * MAX_TOKEN), f"at most {MAX_TOKEN} characters"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tokens(access: Access, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    made, problem = BAD[name]
    token = made()
    assert problem in access.refusal(token)
    assert problem in access.refusal(token)
    assert not any(len(part) > 3 and part in caplog.text for part in token.split("."))
    assert access.permission(ONE.token()).group == "cluster"


def test_several_keys_need_a_kid(tmp_path: Path) -> None:
    access = Access(tmp_path, signers=(ONE, OTHER, ES))
    assert "which of its issuer's keys" in access.refusal(ONE.token({"kid": None}))
    assert access.permission(ES.token({"kid": None})).group == "cluster"


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_any_change_is_seen(tmp_path_factory: pytest.TempPathFactory, algorithm: str) -> None:
    signer = Signer("k", algorithm)
    access = Access(tmp_path_factory.mktemp("access"), signers=(signer,))
    token = signer.token()

    @given(st.integers(0, len(token) - 1), st.sampled_from("AZaz09-_.=+/ é"), st.sampled_from([0, 1]))
    def check(at: int, other: str, cut: int) -> None:
        changed = token[:at] + other + token[at + cut :]
        if changed.strip() != token:
            access.refusal(changed)

    check()
    assert access.permission(token).group == "cluster"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
HEADERS = st.fixed_dictionaries({}, optional=dict.fromkeys(("alg", "kid", "crit", "typ", "b64", "jwk"), JSON))
CLAIMS = st.fixed_dictionaries({}, optional=dict.fromkeys(("iss", "aud", "exp", "nbf", "iat", "sub"), JSON))


def test_nothing_else_is_raised(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever an issuer signs, and whatever is not signed."""
    access = Access(
        tmp_path_factory.mktemp("access"),
        issuer("cluster", "jwks.json", groups="{ claim = 'sub', admins = ['administer'] }"),
    )

    @given(HEADERS, CLAIMS, st.booleans())
    def check(header: dict[str, Any], claims: dict[str, Any], signed: bool) -> None:
        good = {"alg": "RS256", "kid": "one"}
        token = ONE.signed(good | header, claims_of() | claims) if signed else unsigned(header, claims)
        try:
            permission = access.permission(token)
        except Unauthenticated:
            return
        assert signed
        assert permission.group == "cluster"

    check()


@given(st.text(max_size=100) | st.binary(max_size=100).map(lambda data: data.decode("latin-1")))
def test_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    access = Access(tmp_path_factory.mktemp("access"))
    with pytest.raises(Unauthenticated):
        access.sent("x-api-key", text)


# --- what they give ---


GROUPS = "{ claim = 'groups', admins = ['administer'], readers = ['inspect'] }"


@pytest.mark.parametrize(
    ("groups", "operations"),
    [
        (None, {"infer"}),
        ("admins", {"infer", "model-control"}),
        (["readers"], {"infer", "metrics"}),
        (["admins", "readers", "others"], {"infer", "model-control", "metrics"}),
        (["others", 7, ["admins"], {"admins": 1}, None], {"infer"}),
        ({"admins": True}, {"infer"}),
        ("admins readers", {"infer"}),
    ],
)
def test_groups(tmp_path: Path, groups: Any, operations: set[str]) -> None:
    access = Access(tmp_path, issuer("cluster", "jwks.json", groups=GROUPS), anonymous(["health"]))
    token = ONE.token(groups=groups)
    for name in ("infer", "model-control", "metrics", "health", "log-status"):
        if name in operations | {"health"} | ({"log-status"} if "metrics" in operations else set()):
            assert access.permission(token, Operation(name)).client == "cluster:somebody"
        else:
            with pytest.raises(PermissionDenied, match=f"client 'cluster:somebody' may not use {name}"):
                access.permission(token, Operation(name))


def test_the_subject_as_group(tmp_path: Path) -> None:
    """Kubernetes' service accounts have no groups, but names."""
    deployer = "system:serviceaccount:ml:deployer"
    groups = f"{{ claim = 'sub', '{deployer}' = ['administer'] }}"
    access = Access(tmp_path, issuer("cluster", "jwks.json", groups=groups, operations="[]"))
    permission = access.permission(ONE.token(sub=deployer), Operation.MODEL_CONTROL)
    assert permission.client == f"cluster:{deployer}"
    with pytest.raises(PermissionDenied):
        access.permission(ONE.token(sub=deployer + "2"), Operation.MODEL_CONTROL)


def test_models_and_limits_are_the_issuers(tmp_path: Path) -> None:
    access = Access(tmp_path, issuer("cluster", "jwks.json", models="['a*']", concurrent=1))
    first, second = (access.permission(ONE.token(jti=jti)) for jti in ("first", "second"))
    assert first is not second
    assert (first.covers("apple"), first.covers("pear")) == (True, False)
    # Of one subject, whichever of its tokens it uses; of nobody else.
    first.enter()
    with pytest.raises(ServingError, match="too many open calls of client 'cluster:somebody'"):
        second.enter()
    access.permission(ONE.token(sub="else")).enter()


def test_one_issuer_for_several_audiences(tmp_path: Path) -> None:
    tables = [issuer(f"for-{name}", "jwks.json", audience=f"'{name}'") for name in ("people", "robots")]
    access = Access(tmp_path, *tables)
    assert access.permission(ONE.token(aud="robots")).group == "for-robots"
    assert access.permission(ONE.token(aud=["robots", "people"])).group == "for-people"
    access.refusal(ONE.token())


def test_two_issuers_with_keys_of_one_name(tmp_path: Path) -> None:
    other = Signer("one", "ES256")
    (tmp_path / "other.json").write_bytes(keyset(other))
    access = Access(
        tmp_path, issuer("one", "jwks.json"), issuer("two", "other.json", issuer="'https://two.example'")
    )
    assert access.permission(other.token(iss="https://two.example")).group == "two"
    access.refusal(other.token())
    access.refusal(ONE.token(iss="https://two.example"))


def test_how_it_is_sent(access: Access) -> None:
    token = ONE.token()
    assert access.sent("x-api-key", token).client == "cluster:somebody"
    basic = {user: base64.b64encode(f"{user}:{token}".encode()).decode() for user in ("cluster", "somebody")}
    assert access.sent("authorization", f"Basic {basic['cluster']}").client == "cluster:somebody"
    with pytest.raises(Unauthenticated):
        access.sent("authorization", f"Basic {basic['somebody']}")


# --- what is kept ---


def test_a_token_is_verified_once(access: Access) -> None:
    token = ONE.token()
    assert access.permission(token) is access.permission(token)


def test_a_kept_token_expires_and_its_streams_go_on(access: Access) -> None:
    for seconds in ever_later(1):
        token = ONE.token(exp=time.time() - LEEWAY_SECONDS + seconds)
        try:
            permission = access.permission(token)
        except Unauthenticated:
            continue
        break
    closed_streams: list[bool] = []
    permission.streams.add(lambda: closed_streams.append(True))

    def expired() -> bool:
        access.control.renew()  # What a header's text stands for is remembered until then.
        try:
            return access.permission(token) is not permission
        except Unauthenticated as error:
            return "has expired" in str(error)

    wait_until(expired)
    # Its key goes, as all that it has signed has expired.
    access.keys.write_bytes(keyset(OTHER))
    access.control.renew()
    assert (closed_streams, permission.withdrawn) == ([], False)
    # Its issuer goes.
    access.rewrite(client("friend", ["secret"], ["infer"]))
    assert (closed_streams, permission.withdrawn) == ([True], True)


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    signer = Signer("ed25519", "EdDSA")
    access = Access(tmp_path, signers=(signer,))
    followed, first, second = (signer.token(jti=name) for name in ("followed", "first", "second"))
    before = {token: access.permission(token) for token in (followed, first, second)}
    before[followed].streams.add(lambda: None)
    for number in range(MAX_VERIFIED - 3):
        access.permission(signer.token(jti=number))
    access.control.renew()  # What a header's text stands for is remembered until then.
    assert access.permission(first) is before[first]
    access.permission(signer.token(jti="one more"))
    assert access.permission(followed) is before[followed]
    assert access.permission(first) is before[first]
    assert access.permission(second) is not before[second]


def test_another_file_keeps_what_it_may(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(keyset(OTHER))
    other = issuer("other", "other.json", issuer="'https://other.example'")
    groups = "{ claim = 'groups', admins = [] }"
    access = Access(tmp_path, issuer("cluster", "jwks.json", groups=groups), other)
    tokens = ONE.token(groups=["admins"]), OTHER.token(iss="https://other.example")
    kept, removed = map(access.permission, tokens)
    closed_streams: list[str] = []
    kept.streams.add(lambda: closed_streams.append("kept"))
    removed.streams.add(lambda: closed_streams.append("gone"))
    # The one has other rights, also by its group, and the other is for another audience.
    changed = issuer("cluster", "jwks.json", models="['a*']", groups=GROUPS)
    access.rewrite(changed, other.replace(AUDIENCE, "elsewhere"), anonymous(["metadata"]))
    assert access.permission(tokens[0]) is kept
    assert (kept.covers("apple"), kept.covers("pear"), closed_streams) == (True, False, ["gone"])
    for operation in (Operation.MODEL_CONTROL, Operation.METADATA):
        assert access.permission(tokens[0], operation).group == "cluster"
    access.refusal(tokens[1])
    access.rewrite(anonymous(["health"]))
    assert closed_streams == ["gone", "kept"]
    with pytest.raises(ServingError):
        access.permission(tokens[0])


def test_a_broken_file_keeps_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = Access(tmp_path)
    token = ONE.token()
    kept = access.permission(token)
    access.rewrite("[issuer.cluster]\naudience = 1\n")
    assert access.permission(token) is kept
    assert caplog.text.count("previous one stays in force") == 1


def test_keys_of_a_file_change(access: Access, caplog: pytest.LogCaptureFixture) -> None:
    token = ONE.token()
    permission = access.permission(token)
    access.keys.write_bytes(keyset(ONE, OTHER))
    access.control.renew()
    assert access.permission(OTHER.token()).group == "cluster"
    assert access.permission(token) is permission
    for broken in (b"", b"{}", b'{"keys": {}}', b"x" * 300_000):
        access.keys.write_bytes(broken)
        access.control.renew()
        access.control.renew()
        assert access.permission(token) is permission
    access.keys.unlink()
    access.control.renew()
    assert [record.getMessage().partition("; ")[0] for record in caplog.records] == [
        f"issuer.cluster.jwks: {problem}"
        for problem in (
            f"{access.keys} is not JSON",
            f"{access.keys} has no list 'keys', as a JSON Web Key Set has",
            f"{access.keys} has more than 262144 bytes",
            f"cannot read {access.keys}: No such file or directory",
        )
    ]
    access.keys.write_bytes(keyset(OTHER))
    access.control.renew()
    assert permission.withdrawn
    assert "not one of issuer" in access.refusal(token)


# --- the file, and what is installed ---


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (issuer("x", "none.json"), "issuer.x.jwks: cannot read"),
        (issuer("x", "text.json"), "text.json is not JSON"),
        (issuer("x", "http://issuer.example/keys"), "issuer.x.jwks: expected a file, https://HOST..."),
        (issuer("x", "http://127.0.0.1.example/keys"), "issuer.x.jwks: expected a file"),
        (issuer("x", "https://"), "issuer.x.jwks: expected a file"),
        (issuer("x", "https://user:secret@issuer.example/"), "issuer.x.jwks: expected a file"),
        (issuer("x", "https://issuer.example:port/"), "issuer.x.jwks: expected a file"),
        (issuer("x", "file:///etc/passwd"), "issuer.x.jwks: expected a file"),
        (issuer("x", "jwks.json", jwks_ca="'ca.pem'"), "issuer.x.jwks_ca: needs an https:// URL"),
        (issuer("x", "http://localhost/", jwks_token_file="'token'"), "issuer.x.jwks_token_file: needs an https"),
        (issuer("x", "jwks.json", jwks_file="'ca.pem'"), "unknown key 'jwks_file'"),
        (issuer("x", "jwks.json", audience="''"), "issuer.x.audience: missing"),
        (issuer("x", "jwks.json", audience="['a']"), "issuer.x.audience: expected a text"),
        (issuer("x", "jwks.json") + issuer("y", "jwks.json"), "issuer.x has the same issuer and audience"),
    ],
)
def test_a_file_that_says_nothing_sensible(tmp_path: Path, table: str, problem: str) -> None:
    (tmp_path / "text.json").write_text("keys")
    with pytest.raises(ConfigError) as raised:
        Access(tmp_path, table)
    assert problem in str(raised.value)
    assert "secret" not in str(raised.value)


def without(module: str, file: Path, code: str) -> str:
    """What a process prints that has no such module."""
    lines = [
        "import sys",
        f"sys.modules[{module!r}] = None",
        "from triglot import Config",
        "from triglot.access.control import AccessControl",
        f"file = {str(file)!r}",
        code,
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("module", ["jwt", "cryptography"])
def test_without_the_extra(access: Access, module: str) -> None:
    output = without(module, access.file, "AccessControl(Config(access=file))")
    assert output.rstrip().endswith(
        "ConfigError: access: issuers need PyJWT and cryptography; run: pip install 'PyJWT[crypto]'"
    )
    write(access.file, client("friend", ["secret"], ["infer"]))
    assert without(module, access.file, "AccessControl(Config(access=file)); print('fine')") == "fine\n"


def test_a_file_that_changes_without_the_extra(access: Access) -> None:
    table = access.file.read_text()
    write(access.file, client("friend", ["secret"], ["infer"]))
    code = (
        "control = AccessControl(Config(access=file))\n"
        f"import os; text = open(file).read() + {table!r}\n"
        "os.rename(file, file + '.old'); open(file, 'w').write(text)\n"
        "os.utime(file, (1, 1))\n"
        "control.renew(); control.renew()"
    )
    output = without("jwt", access.file, code)
    assert output.count("previous one stays in force") == 1
    assert "pip install 'PyJWT[crypto]'" in output


# --- over the transports ---


@pytest.fixture(params=["h2", "aio"])
def transports(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"grpc_transport": request.param, "http_transport": {"h2": "h1", "aio": "aiohttp"}[request.param]}


async def test_over_every_transport(tmp_path: Path, transports: dict[str, Any]) -> None:
    (tmp_path / "jwks.json").write_bytes(keyset(ONE))
    expected = [
        (ONE.token(), grpc.StatusCode.OK, 200),
        (ONE.token(exp=1), grpc.StatusCode.UNAUTHENTICATED, 401),
        (OTHER.token(), grpc.StatusCode.UNAUTHENTICATED, 401),
    ]
    async with guarded_server(tmp_path, issuer("cluster", "jwks.json"), **transports) as here:
        for token, code, status in expected * 2:
            headers = {"authorization": f"Bearer {token}"}
            assert await here.code(headers) is code
            assert (await here.status(headers))[0] == status
