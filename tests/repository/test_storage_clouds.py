"""Models at gs:// and az://, and the credentials of AWS's files: what differs from S3 with variables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import obstore
import pytest
from object_stores import AZURE_ACCOUNT, AZURE_KEY, Proxy, azurite, google, moto, refuse, request
from obstore.store import AzureStore
from stored_models import POLL, SAYS, serving

from triglot.core.errors import ModelLoadError
from triglot.repository.storage.buckets import Bucket
from triglot.repository.storage.store import StoreError
from triglot.repository.storage.urls import Url
from waiting import until_found


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

    def said() -> dict[str, str]:
        return dict(Bucket(Url("s3", "bucket", "")).store.config)

    assert said().items() >= {"access_key_id": "A", "secret_access_key": "B"}.items()
    monkeypatch.setenv("AWS_PROFILE", "team")
    of_team = {"access_key_id": "C", "secret_access_key": "D", "session_token": "E"}
    assert said().items() >= {**of_team, "region": "eu-north-1"}.items()
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert said().items() >= of_team.items()
    assert said().get("region") != "eu-north-1"
    for name in ("empty", "none"):
        monkeypatch.setenv("AWS_PROFILE", name)
        with pytest.raises(StoreError, match=f"has no aws_access_key_id for the profile '{name}'"):
            said()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "F")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "G")
    assert "D" not in said().values()


CREDENTIALS = {
    "AccessKeyId": "ASIAPOD",
    "SecretAccessKey": "S",
    "Token": "T",
    "Expiration": "2099-01-01T00:00:00Z",
}


async def test_the_identity_of_a_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As EKS gives pods one: a token of the cluster is exchanged for credentials."""
    (tmp_path / "token").write_text("a token of the cluster")
    with moto() as port, Proxy(port) as proxy:

        def answer(handler: BaseHTTPRequestHandler) -> bool:
            if handler.path == "/credentials":
                allowed = handler.headers.get("Authorization") == "a token of the cluster"
                return refuse(handler, 200 if allowed else 401, json.dumps(CREDENTIALS))
            return "Credential=ASIAPOD" not in handler.headers.get("Authorization", "") and refuse(handler, 403)

        for path, body in (("", b""), ("/r/a/1/value.txt", b"1"), ("/r/a/1/model.py", SAYS.encode())):
            request(port, "PUT", f"/models{path}", body)
        endpoint = f"http://127.0.0.1:{proxy.port}"
        proxy.answer = answer
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{endpoint}/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        async with serving("s3://models/r") as served:
            assert await served.value("a") == 1
