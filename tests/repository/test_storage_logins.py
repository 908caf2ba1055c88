"""Credentials that Google's and Azure's own libraries fetch, because obstore does not know how."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import jwt
import obstore
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from obstore.store import AzureStore

from tests.repository.object_stores import AZURE_ACCOUNT, AZURE_KEY, Proxy, azurite, cloud, google, refuse, request
from tests.repository.stored_models import POLL, SAYS, serving
from tests.waiting import until
from triglot.repository.scan.urls import Url
from triglot.repository.storage.buckets import Bucket
from triglot.repository.storage.store import StoreError

TOKEN = "the-token-of-the-store"
SUBJECT = "a-token-of-the-cluster"
REFRESH = "a-refresh-token"
SECRET = "a-client-secret"
OBJECTS = {
    f"{model}/1/{name}": body
    for model in ("r/a", "s/b")
    for name, body in (("value.txt", b"1"), ("model.py", SAYS.encode()))
}


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own."""
    names = ("AWS_", "AZURE_", "CLOUDSDK_", "GOOGLE_", "STORAGE_")
    for name in [name for name in os.environ if name.startswith(names)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def no_secrets(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """In the libraries' logs neither."""
    caplog.set_level(logging.DEBUG)
    yield
    logged = caplog.text
    assert [secret for secret in (TOKEN, SUBJECT, REFRESH, SECRET, "PRIVATE KEY") if secret in logged] == []


class Cloud:
    """What the hosts that give tokens are asked, and what they answer; others answer 404."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, tuple[int, object]] = {}

    def answer(self, url: str, body: bytes) -> tuple[int, object]:
        text = body.decode()
        self.asked.append((url, json.loads(text) if text.startswith("{") else dict(parse_qsl(text))))
        return self.answers.get(url, (404, {}))


@pytest.fixture
def tokens(no_credentials: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    made = Cloud()
    with cloud(made.answer, tmp_path, monkeypatch):
        yield made


def with_token(handler: BaseHTTPRequestHandler) -> bool:
    """Answer 401 to requests without the token; other requests pass, without it."""
    found = handler.headers["Authorization"] == f"Bearer {TOKEN}"
    del handler.headers["Authorization"]
    return not found and refuse(handler, 401)


@pytest.fixture(scope="module")
def google_port() -> Iterator[int]:
    with google() as port:
        for name, body in OBJECTS.items():
            path = f"/upload/storage/v1/b/models/o?uploadType=media&name={quote(name, safe='')}"
            request(port, "POST", path, body, {"Content-Type": "text/plain"})
        yield port


@pytest.fixture
def storage(google_port: int, no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A Google Cloud Storage that wants the token."""
    with Proxy(google_port) as proxy:

        def answer(handler: BaseHTTPRequestHandler) -> bool:
            handler.headers.replace_header("Host", f"127.0.0.1:{google_port}")
            return with_token(handler)

        proxy.answer = answer
        monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


STS = "https://sts.googleapis.com/v1/token"
LOGIN = "https://sts.googleapis.com/v1/oauthtoken"
OAUTH = "https://oauth2.googleapis.com/token"
IMPERSONATION = (
    "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/reader@p.iam.gserviceaccount.com"
    ":generateAccessToken"
)
OF_THE_ACCOUNT = 200, {"accessToken": TOKEN, "expireTime": "2099-01-01T00:00:00Z"}
POOL = "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q"
ACCESS = "urn:ietf:params:oauth:token-type:access_token"
GIVEN = {"access_token": TOKEN, "token_type": "Bearer", "expires_in": 3600, "issued_token_type": ACCESS}
SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
USER = {"client_id": "c", "client_secret": SECRET, "refresh_token": REFRESH}
FEDERATED = {
    "type": "external_account",
    "audience": POOL,
    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
    "token_url": STS,
}
IMPERSONATED = {
    "type": "impersonated_service_account",
    "service_account_impersonation_url": IMPERSONATION,
    "source_credentials": USER | {"type": "authorized_user"},
}


def use(folder: Path, credentials: dict[str, Any]) -> None:
    """A file where gcloud's login writes it; the cluster's token is in one, too, unless something else is said."""
    (folder / "subject").write_text(SUBJECT)
    credentials = {"credential_source": {"file": str(folder / "subject")}} | credentials
    file = folder / ".config" / "gcloud" / "application_default_credentials.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(credentials))


async def check_models(scheme: str, storage: Proxy) -> None:
    """Two models, each of a URL of its own, serve while the store is listed several times."""
    async with serving(f"{scheme}r", f"{scheme}s", **POLL) as served:
        assert [await served.value(name) for name in "ab"] == [1, 1]
        count = len(storage.requests)
        await until(lambda: len(storage.requests) > count + 4)


async def test_a_federated_identity(storage: Proxy, tokens: Cloud, tmp_path: Path) -> None:
    """A token of the cluster is exchanged for one of Google's, once, and nothing else is asked."""
    use(tmp_path, FEDERATED)
    tokens.answers[STS] = 200, GIVEN
    await check_models("gs://models/", storage)
    ((url, form),) = tokens.asked
    assert url == STS
    assert form.items() >= {"subject_token": SUBJECT, "audience": POOL, "scope": SCOPE}.items()


async def test_a_federated_identity_of_aws(
    storage: Proxy, tokens: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token is a signed request to AWS."""
    source = {
        "environment_id": "aws1",
        "regional_cred_verification_url": "https://sts.{region}.amazonaws.com?Action=GetCallerIdentity",
    }
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAMINE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    kind = {"subject_token_type": "urn:ietf:params:aws:token-type:aws4_request"}
    use(tmp_path, FEDERATED | kind | {"credential_source": source})
    tokens.answers[STS] = 200, GIVEN
    await check_models("gs://models/", storage)
    ((_, form),) = tokens.asked
    signed = json.loads(unquote(form["subject_token"]))
    assert signed["url"].startswith("https://sts.eu-north-1.amazonaws.com")
    assert "Credential=AKIAMINE/" in str(signed["headers"])


async def test_a_federated_identity_of_a_program(
    storage: Proxy, tokens: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints the token."""
    token_answer = {
        "version": 1,
        "success": True,
        "token_type": FEDERATED["subject_token_type"],
        "id_token": SUBJECT,
    }
    (tmp_path / "said").write_text(json.dumps(token_answer))
    command = {"command": f"cat {tmp_path / 'said'}", "timeout_millis": 30000}
    monkeypatch.setenv("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "1")
    use(tmp_path, FEDERATED | {"credential_source": {"executable": command}})
    tokens.answers[STS] = 200, GIVEN
    await check_models("gs://models/", storage)
    ((_, form),) = tokens.asked
    assert form["subject_token"] == SUBJECT


async def test_a_federated_identity_that_is_a_service_account(
    storage: Proxy, tokens: Cloud, tmp_path: Path
) -> None:
    impersonation = {"service_account_impersonation_url": IMPERSONATION}
    use(tmp_path, FEDERATED | impersonation)
    tokens.answers[STS] = 200, GIVEN | {"access_token": "federated"}
    tokens.answers[IMPERSONATION] = OF_THE_ACCOUNT
    await check_models("gs://models/", storage)
    assert [url for url, _ in tokens.asked] == [STS, IMPERSONATION]
    assert tokens.asked[1][1]["scope"] == [SCOPE]


async def test_a_federated_user(
    storage: Proxy, tokens: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that the variable names."""
    file = tmp_path / "user.json"
    login = {"type": "external_account_authorized_user", "audience": POOL, "token_url": LOGIN}
    file.write_text(json.dumps(USER | login))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    tokens.answers[LOGIN] = 200, GIVEN
    await check_models("gs://models/", storage)
    ((url, form),) = tokens.asked
    assert (url, form["refresh_token"]) == (LOGIN, REFRESH)


async def test_an_impersonated_service_account(storage: Proxy, tokens: Cloud, tmp_path: Path) -> None:
    use(tmp_path, IMPERSONATED)
    tokens.answers[OAUTH] = 200, GIVEN | {"access_token": "of-the-user"}
    tokens.answers[IMPERSONATION] = OF_THE_ACCOUNT
    await check_models("gs://models/", storage)
    assert [url for url, _ in tokens.asked] == [OAUTH, IMPERSONATION]
    assert tokens.asked[1][1]["scope"] == [SCOPE]


async def test_tokens_that_expire(storage: Proxy, tokens: Cloud, tmp_path: Path) -> None:
    """They are renewed, by the subject's token of then."""
    use(tmp_path, FEDERATED)
    tokens.answers[STS] = 200, GIVEN | {"expires_in": 100}
    async with serving("gs://models/r", **POLL) as served:
        assert await served.value("a") == 1
        (tmp_path / "subject").write_text(f"{SUBJECT}-2")
        await until(lambda: tokens.asked[-1][1]["subject_token"] == f"{SUBJECT}-2")


def test_an_identity_that_google_does_not_know(storage: Proxy, tokens: Cloud, tmp_path: Path) -> None:
    use(tmp_path, FEDERATED)
    tokens.answers[STS] = 400, {"error": "invalid_grant", "error_description": "The audience is wrong."}
    with pytest.raises(StoreError, match=r"^OAuthError: .*invalid_grant: The audience is wrong") as caught:
        Bucket(Url("gs", "models", "r")).objects()
    assert SUBJECT not in str(caught.value)


def test_a_google_file_that_lacks_something(tmp_path: Path) -> None:
    use(tmp_path, {"type": "impersonated_service_account", "source_credentials": {"type": "none"}})
    with pytest.raises(StoreError, match=r"application_default_credentials\.json: .*"):
        Bucket(Url("gs", "models", "r"))


@pytest.mark.parametrize("module", ["google.auth", "requests"])
def test_without_google_auth(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, IMPERSONATED)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "google.auth.transport.requests", raising=False)
    missing = r"google-auth, which is not installed; run: pip install 'google-auth\[requests\]'"
    with pytest.raises(
        StoreError, match=rf"\.json has the type impersonated_service_account, which needs {missing}$"
    ):
        Bucket(Url("gs", "models", "r"))


@pytest.mark.parametrize("variable", ["GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"])
def test_settings_that_precede_the_file(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, FEDERATED)
    monkeypatch.setenv(variable, str(tmp_path / "none"))
    with pytest.raises(StoreError, match="Unable to open service account file"):
        Bucket(Url("gs", "models", "r"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"type": "other"}', "\xff"])
def test_files_that_obstore_finds_wrong(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(text.encode("latin1"))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with pytest.raises(StoreError, match=r"^Generic GCS error: Unable to (decode|read) service account file"):
        Bucket(Url("gs", "models", "r"))


MICROSOFT = "https://login.microsoftonline.com"
TENANT = "00000000-0000-0000-0000-000000000001"
TOKENS_OF_TENANT = f"{MICROSOFT}/{TENANT}/oauth2/v2.0/token"
TENANTS_CONFIGURATION = {
    "issuer": f"{MICROSOFT}/{TENANT}/v2.0",
    "authorization_endpoint": f"{MICROSOFT}/{TENANT}/oauth2/v2.0/authorize",
    "token_endpoint": TOKENS_OF_TENANT,
}


@pytest.fixture(scope="module")
def azure_port() -> Iterator[int]:
    with azurite() as port:
        endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        store = AzureStore(
            "public",
            account_name=AZURE_ACCOUNT,
            account_key=AZURE_KEY,
            endpoint=endpoint,
            client_options={"allow_http": True},
        )
        for name, body in OBJECTS.items():
            obstore.put(store, name, body)
        yield port


@pytest.fixture
def application(tokens: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The certificate of an application of the tenant, and its key."""
    tokens.answers[f"{MICROSOFT}/{TENANT}/v2.0/.well-known/openid-configuration"] = 200, TENANTS_CONFIGURATION
    tokens.answers[f"{MICROSOFT}/common/discovery/instance"] = 200, {"metadata": []}
    file = tmp_path / "application.pem"
    authority = trustme.CA(key_type=trustme.KeyType.RSA)
    authority.issue_cert("application", key_type=trustme.KeyType.RSA).private_key_and_cert_chain_pem.write_to_path(
        str(file)
    )
    monkeypatch.setenv("AZURE_CLIENT_CERTIFICATE_PATH", str(file))
    monkeypatch.setenv("AZURE_TENANT_ID", TENANT)
    monkeypatch.setenv("AZURE_CLIENT_ID", "application")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
    return file


async def test_an_azure_application_with_a_certificate(
    azure_port: int, application: Path, tokens: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application signs with its certificate's key, once."""
    key: Any = load_pem_private_key(application.read_bytes(), None)  # noqa: ASYNC240 - nothing else runs.
    tokens.answers[TOKENS_OF_TENANT] = 200, {"access_token": TOKEN, "token_type": "Bearer", "expires_in": 3600}
    with Proxy(azure_port) as proxy:
        proxy.answer = with_token
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{proxy.port}/{AZURE_ACCOUNT}")
        await check_models("az://public/", proxy)
    (form,) = [form for url, form in tokens.asked if url == TOKENS_OF_TENANT]
    assert form["scope"].split()[0] == "https://storage.azure.com/.default"
    signed = jwt.decode(form["client_assertion"], key.public_key(), ["PS256", "RS256"], audience=TOKENS_OF_TENANT)
    assert signed["iss"] == "application"


def test_an_azure_application_that_is_refused(application: Path, tokens: Cloud) -> None:
    error = {"error": "invalid_client", "error_description": "AADSTS700027: The certificate is not registered."}
    tokens.answers[TOKENS_OF_TENANT] = 401, error
    with pytest.raises(
        StoreError, match=r"^ClientAuthenticationError: .*AADSTS700027: The certificate is not reg"
    ):
        Bucket(Url("az", "models", "r")).objects()


def test_azure_certificates_that_cannot_be_used(application: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    application.write_text("none")
    with pytest.raises(StoreError, match=r"^AZURE_CLIENT_CERTIFICATE_PATH: .*application\.pem: "):
        Bucket(Url("az", "models", "r"))
    application.unlink()
    text = r"^AZURE_CLIENT_CERTIFICATE_PATH: .*application\.pem: No such file or directory$"
    with pytest.raises(StoreError, match=text):
        Bucket(Url("az", "models", "r"))
    monkeypatch.delenv("AZURE_TENANT_ID")
    with pytest.raises(StoreError, match=r"^AZURE_CLIENT_CERTIFICATE_PATH needs AZURE_TENANT_ID, too$"):
        Bucket(Url("az", "models", "r"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
    Bucket(Url("az", "models", "r"))


@pytest.mark.usefixtures("application")
def test_without_azure_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    missing = "azure-identity, which is not installed; run: pip install azure-identity"
    with pytest.raises(StoreError, match=f"^AZURE_CLIENT_CERTIFICATE_PATH needs {missing}$"):
        Bucket(Url("az", "models", "r"))
