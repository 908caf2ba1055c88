"""Which paths are URLs, and which of these a client may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from triglot.repository.scan.urls import Url, is_allowed, spelled, url_of
from triglot.repository.storage.store import StoreError, without_secrets
from triglot.repository.storage.update import open_store


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/some/key/", Url("s3", "bucket", "some/key")),
        ("gs://bucket", Url("gs", "bucket", "")),
        ("hf://owner/model@v1/sub/dir", Url("hf", "owner", "model@v1/sub/dir")),
        ("https://host:8443/m.tar.gz?sig=a%2Fb", Url("https", "host:8443", "m.tar.gz", "sig=a%2Fb")),
        ("s3://bucket/odd?key", Url("s3", "bucket", "odd?key")),
        *((text, None) for text in ("models", "/s3:/bucket", "./s3", "s3", "file:///m", "C:/models", "s3:")),
    ],
)
def test_paths_that_are_urls(text: str, url: Url | None) -> None:
    assert url_of(Path(text)) == url


def test_a_signature_is_no_part_of_the_text() -> None:
    url = "https://host/m.tar?X-Amz-Signature=abc"
    assert spelled(Path(url)) == str(url_of(Path(url))) == "https://host/m.tar"
    assert spelled(Path("https://me:secret@host/m.tar")) == "https://host/m.tar"
    assert without_secrets(f"cannot get '{url}', tried {url} twice") == (
        "cannot get 'https://host/m.tar?…', tried https://host/m.tar?… twice"
    )


def test_what_is_allowed(tmp_path: Path) -> None:
    allowed = [tmp_path, Path("s3://bucket/models"), Path("https://host/a.tar.gz")]
    for path in ("s3://bucket/models", "s3://bucket/models/m/1", "https://host/a.tar.gz", tmp_path / "m"):
        assert is_allowed(Path(path), allowed), path
    for path in ("s3://bucket", "s3://bucket/models2", "s3://bucket/models/../x", "gs://bucket/models", "/etc"):
        assert not is_allowed(Path(path), allowed), path
    assert not is_allowed(Path("s3://bucket/m"), [Path("/"), Path.cwd()])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("as://account/container/m", "expected az://CONTAINER/PATH"),
        ("http://host/m.tar", "expected https://"),
        ("s3://minio:9000/bucket/m", "expected s3://BUCKET/PATH, and the server's address in AWS_ENDPOINT_URL"),
        (
            "s3://https://minio:9000/bucket",
            "expected s3://BUCKET/PATH, and the server's address in AWS_ENDPOINT_URL",
        ),
        ("s3://bucket/a/../b", "expected s3://HOST/PATH without .."),
        ("https://host/model.onnx", "expected an archive, .tar.gz, .tgz, .tar, .zip"),
        ("https://me:pass@host/m.tar", "expected a URL without a user and a password"),
        ("hf://owner", "expected hf://OWNER/REPOSITORY[@REVISION][/PATH] of a model"),
        ("hf://datasets/owner/m", "expected hf://OWNER/REPOSITORY[@REVISION][/PATH] of a model"),
    ],
)
def test_urls_that_no_store_has(text: str, reason: str) -> None:
    url = url_of(Path(text))
    assert url is not None
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert str(caught.value).startswith(reason)
