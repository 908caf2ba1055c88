"""Models at gs:// and az://, and the credentials of AWS's files: what differs from S3 with variables."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import obstore
import pytest
from obstore.store import AzureStore

from tests.process import FREE_PORTS, Triglot
from tests.protocol_clients.rest import Rest
from tests.repository.object_stores import AZURE_ACCOUNT, AZURE_KEY, Proxy, azurite, google, moto, refuse, request
from tests.repository.stored_models import POLL, SAYS, serving
from tests.waiting import until, until_found
from triglot.core.errors import ModelLoadError
from triglot.repository.scan.urls import Url
from triglot.repository.storage.buckets import Bucket
from triglot.repository.storage.store import StoreError


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def google_port() -> Iterator[int]:
    with google() as port:
        yield port


@pytest.fixture(scope="module")
def azure_port() -> Iterator[int]:
    with azurite() as port:
        yield port


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture
def s3(s3_port: int, no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """S3 behind a proxy, with the model s3://models/r/a."""
    request(s3_port, "POST", "/moto-api/reset")
    for path, body in (("", b""), ("/r/a/1/value.txt", b"1"), ("/r/a/1/model.py", SAYS.encode())):
        request(s3_port, "PUT", f"/models{path}", body)
    with Proxy(s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


async def test_google(google_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{google_port}")

    def put(name: str, text: str) -> None:
        path = f"/upload/storage/v1/b/models/o?uploadType=media&name={quote(name, safe='')}"
        request(google_port, "POST", path, text.encode(), {"Content-Type": "text/plain"})

    put("r/a/1/value.txt", "1")
    put("r/a/1/model.py", SAYS)
    async with serving("gs://models/r", **POLL) as served:
        assert await served.value("a") == 1
        put("r/a/1/value.txt", "2")
        await until_found(lambda: served.value("a"), lambda value: value == 2)
    with pytest.raises(ModelLoadError, match=r"^gs://others/r: "):
        async with serving("gs://others/r"):
            pass


async def test_google_objects_that_are_compressed(google_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `gcloud storage cp --gzip-local` makes them: the store decompresses them, and then sends no ranges."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{google_port}")
    metadata = json.dumps({"name": "gzip/a/1/model.py", "contentEncoding": "gzip"}).encode()
    parts = (b"application/json", metadata), (b"text/plain", gzip.compress(SAYS.encode()))
    body = b"".join(b"--part\r\nContent-Type: %s\r\n\r\n%s\r\n" % part for part in parts) + b"--part--\r\n"
    headers = {"Content-Type": "multipart/related; boundary=part"}
    request(google_port, "POST", "/upload/storage/v1/b/models/o?uploadType=multipart", body, headers)
    with pytest.raises(ModelLoadError, match=r"^gs://models/gzip: gzip/a/1/model.py: .* Content-Encoding: gzip"):
        async with serving("gs://models/gzip"):
            pass


async def test_azure(azure_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{azure_port}/{AZURE_ACCOUNT}"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    store = AzureStore("models", client_options={"allow_http": True})
    obstore.put(store, "r/a/1/value.txt", b"1")
    obstore.put(store, "r/a/1/model.py", SAYS.encode())
    async with serving("az://models/r", **POLL) as served:
        assert await served.value("a") == 1
        obstore.put(store, "r/a/1/value.txt", b"2")
        await until_found(lambda: served.value("a"), lambda value: value == 2)
    with pytest.raises(ModelLoadError, match=r"^az://others/r: ContainerNotFound") as caught:
        async with serving("az://others/r"):
            pass
    assert AZURE_KEY not in str(caught.value)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY.replace("E", "F"))
    with pytest.raises(ModelLoadError, match=r"^az://models/r: (AuthorizationFailure|AuthenticationFailed)"):
        async with serving("az://models/r"):
            pass


def test_credentials_of_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AWS's files; variables go before them."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = A\naws_secret_access_key = B\n[team]\naws_access_key_id = C\n"
        "aws_secret_access_key = D\naws_session_token = E\n[empty]\n"
    )
    (tmp_path / ".aws" / "config").write_text("[profile team]\nregion = eu-north-1\n")

    def credentials() -> dict[str, str]:
        return dict(Bucket(Url("s3", "bucket", "")).store.config)

    assert credentials().items() >= {"access_key_id": "A", "secret_access_key": "B"}.items()
    monkeypatch.setenv("AWS_PROFILE", "team")
    of_team = {"access_key_id": "C", "secret_access_key": "D", "session_token": "E"}
    assert credentials().items() >= {**of_team, "region": "eu-north-1"}.items()
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert credentials().items() >= of_team.items()
    assert credentials().get("region") != "eu-north-1"
    for name in ("empty", "none"):
        monkeypatch.setenv("AWS_PROFILE", name)
        with pytest.raises(StoreError, match=f"has no aws_access_key_id for the profile '{name}'"):
            credentials()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "F")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "G")
    assert "D" not in credentials().values()


def profile(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *lines: str) -> None:
    """Use a profile of AWS's files with these settings."""
    file = folder / "config"
    file.write_text("\n".join((f"[profile {name}]", "region = eu-north-1", *lines, "")))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", name)


def refuse_others(key: str, handler: BaseHTTPRequestHandler) -> bool:
    """Answer 403 to requests that another key signs."""
    return f"Credential={key}" not in handler.headers.get("Authorization", "") and refuse(handler, 403)


async def test_a_profile_that_takes_a_role(s3: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The role's keys are fetched once, and not for each listing."""
    role = ("role_arn = arn:aws:iam::123456789012:role/reader", "source_profile = reader")
    profile(tmp_path, monkeypatch, "reader", *role, "aws_access_key_id = AKIAMINE", "aws_secret_access_key = S")
    s3.answer = lambda handler: refuse_others("AKIAMINE" if handler.path == "/" else "ASIA", handler)
    async with serving("s3://models/r", **POLL) as served:
        assert await served.value("a") == 1
        count = len(s3.requests)
        await until(lambda: len(s3.requests) > count + 3)
    assert s3.requests.count("POST /") == 1


def test_a_profile_that_logs_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What boto3 says is the reason."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    session = ("sso_session = s", "sso_account_id = 1", "sso_role_name = r", "[sso-session s]", "sso_region = a")
    profile(tmp_path, monkeypatch, "login", *session, "sso_start_url = https://example.awsapps.com/start")
    with pytest.raises(
        StoreError, match=r"^SSOTokenLoadError: Error loading SSO Token: Token for s does not exist$"
    ):
        Bucket(Url("s3", "bucket", "")).objects()
    profile(tmp_path, monkeypatch, "program", "credential_process = false")
    with pytest.raises(
        StoreError, match=r"^the AWS profile 'program': Error when retrieving credentials from custom"
    ):
        Bucket(Url("s3", "bucket", ""))
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    profile(tmp_path, monkeypatch, "team", "role_arn = arn:aws:iam::123456789012:role/team", "source_profile = a")
    text = "the AWS profile 'team' has role_arn, which needs boto3, which is not installed; run: pip install boto3"
    with pytest.raises(StoreError, match=f"^{text}$"):
        Bucket(Url("s3", "bucket", ""))


async def test_a_profile_that_has_logged_in(s3: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By SSO: the token of the login is exchanged for the role's keys, once. The log has neither."""
    session = ("sso_session = s", "sso_account_id = 123456789012", "sso_role_name = reader", "[sso-session s]")
    start = "https://example.awsapps.com/start"
    profile(tmp_path, monkeypatch, "login", *session, "sso_region = eu-north-1", f"sso_start_url = {start}")
    cache = tmp_path / ".aws" / "sso" / "cache"
    cache.mkdir(parents=True)
    token = {"startUrl": start, "region": "eu-north-1", "accessToken": "of-the-login"}
    file = cache / f"{hashlib.sha1(b's', usedforsecurity=False).hexdigest()}.json"
    file.write_text(json.dumps(token | {"expiresAt": "2099-01-01T00:00:00Z"}))
    keys = {"accessKeyId": "ASIALOGIN", "secretAccessKey": "of-the-role", "sessionToken": "T"}

    def answer(handler: BaseHTTPRequestHandler) -> bool:
        if not handler.path.startswith("/sso/"):
            return refuse_others("ASIALOGIN", handler)
        allowed = handler.headers["x-amz-sso_bearer_token"] == "of-the-login"
        expiration = {"expiration": 4070908800000}
        return refuse(handler, 200 if allowed else 401, json.dumps({"roleCredentials": keys | expiration}))

    s3.answer = answer
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", f"http://127.0.0.1:{s3.port}/sso")
    options = ("--log-level=debug", "--watch", "--poll-interval=0.05", "--drain-delay=0", *FREE_PORTS)
    # In a process of its own, because botocore looks for the home folder when it is imported.
    with Triglot("s3://models/r", *options) as triglot_process:
        _, port = await asyncio.to_thread(triglot_process.ports)
        assert (await asyncio.to_thread(Rest(port).infer, "a"))[1]["outputs"][0]["data"][0] == 1
        count = len(s3.requests)
        await until(lambda: len(s3.requests) > count + 3)
        await asyncio.to_thread(triglot_process.stop)
    asked = [request for request in s3.requests if "/sso/" in request]
    assert asked == ["GET /sso/federation/credentials?role_name=reader&account_id=123456789012"]
    assert "of-the-login" not in triglot_process.stderr.text()
    assert "of-the-role" not in triglot_process.stderr.text()


CREDENTIALS = {
    "AccessKeyId": "ASIAPOD",
    "SecretAccessKey": "S",
    "Token": "T",
    "Expiration": "2099-01-01T00:00:00Z",
}


async def test_keys_that_change(
    s3: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are read again when the store refuses those of before."""
    profile(tmp_path, monkeypatch, "p", "aws_access_key_id = AKIAONE", "aws_secret_access_key = S")
    s3.answer = lambda handler: refuse_others("AKIAONE", handler)
    async with serving("s3://models/r", **POLL) as served:
        profile(tmp_path, monkeypatch, "p", "aws_access_key_id = AKIATWO", "aws_secret_access_key = S")
        s3.answer = lambda handler: refuse_others("AKIATWO", handler)
        for path, body in (("value.txt", b"2"), ("model.py", SAYS.encode())):
            request(s3.target, "PUT", f"/models/r/a/2/{path}", body)
        await until_found(lambda: served.value("a"), lambda value: value == 2)
    assert "403" not in caplog.text


async def test_the_identity_of_a_pod(s3: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As EKS gives pods one: a token of the cluster is exchanged for credentials, once."""
    (tmp_path / "token").write_text("a token of the cluster")

    def answer(handler: BaseHTTPRequestHandler) -> bool:
        if handler.path == "/credentials":
            allowed = handler.headers.get("Authorization") == "a token of the cluster"
            return refuse(handler, 200 if allowed else 401, json.dumps(CREDENTIALS))
        return refuse_others("ASIAPOD", handler)

    s3.answer = answer
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{s3.port}/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    async with serving("s3://models/r", **POLL) as served:
        assert await served.value("a") == 1
        count = len(s3.requests)
        await until(lambda: len(s3.requests) > count + 3)
    assert s3.requests.count("GET /credentials") == 1
