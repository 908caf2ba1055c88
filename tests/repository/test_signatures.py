"""Signed models: each is served as it was signed, and not at all once a file is another one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import triglot
from tests.process import IDENTITY, write_model
from triglot.config.options import Config, ConfigError
from triglot.core.errors import InvalidArgument

signing = pytest.importorskip("model_signing.signing", reason="the signatures environment has it")
hashing = pytest.importorskip("model_signing.hashing", reason="the signatures environment has it")

import trustme  # noqa: E402 - as above.
from cryptography import x509  # noqa: E402 - as above.
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402 - in that environment.
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402 - as above.
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: E402 - as above.

IMPORTED = "import pathlib\npathlib.Path(__file__).parent.parent.parent.parent.joinpath('imported').touch()\n"


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


class Keys:
    """A private key, and the file with its public one."""

    def __init__(self, folder: Path, name: str) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        self.private, self.public = folder / f"{name}.key", folder / f"{name}.pub"
        self.private.write_bytes(pem(key))
        self.public.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def sign(self, what: Path, signature: Path) -> None:
        """Sign a folder or a file, without the signature itself."""
        ignored = hashing.Config().set_ignored_paths(paths=[signature])
        made = signing.Config().use_elliptic_key_signer(private_key=self.private).set_hashing_config(ignored)
        made.sign(what, signature)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path, "ours")


def write(folder: Path) -> Path:
    """Write a model of several files; returns its folder."""
    model = folder / "models" / "m"
    write_model(model / "1", f"{IMPORTED}from . import helper\n{IDENTITY}")
    (model / "1" / "helper.py").write_text("ONE = 1\n")
    (model / "1" / "weights").mkdir()
    (model / "1" / "weights" / "a.bin").write_bytes(bytes(range(256)))
    (model / "config.pbtxt").write_text('max_batch_size: 0\nparameters { key: "a" value { string_value: "b" } }\n')
    return model


async def served(path: Path, keys: Keys, mode: str = "require", **options: Any) -> triglot.Server:
    """A server of the models at the path. Raise its errors of loading."""
    config = Config(
        grpc_port=0, rest_port=0, model_signatures=mode, model_signing_keys=str(keys.public), **options
    )
    server = triglot.Server([str(path)], config)
    await server.start()
    return server


def reasons(server: triglot.Server) -> dict[str, str]:
    """Why each model failed, or its state."""
    versions = server.manager.registry.versions()
    return {each.files.name: each.state.name if each.error is None else each.error.message for each in versions}


async def states(path: Path, keys: Keys, **options: Any) -> dict[str, str]:
    """Each model's state, or why it failed."""
    server = await served(path, keys, exit_on_load_error=False, **options)
    try:
        return reasons(server)
    finally:
        await server.stop()


async def test_a_bit_of_any_file(tmp_path: Path, keys: Keys) -> None:
    model = write(tmp_path)
    keys.sign(model, model / "model.sig")
    assert await states(tmp_path / "models", keys) == {"m": "READY"}
    (tmp_path / "imported").unlink()
    assert await states(tmp_path / "models", keys) == {"m": "READY"}  # Nothing was left in the folder.
    (tmp_path / "imported").unlink()
    signed = [path for path in sorted(model.rglob("*")) if path.is_file()]
    assert len(signed) == 5
    for path in signed:
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        (reason,) = (await states(tmp_path / "models", keys)).values() or ("no version",)
        assert reason != "READY", path
        assert path.name == "config.pbtxt" or f"{model}: the signature in" in reason, reason
        if path.name not in ("config.pbtxt", "model.sig"):
            assert str(path.relative_to(model)) in reason
        assert not (tmp_path / "imported").exists(), path
        path.write_bytes(content)
    assert await states(tmp_path / "models", keys) == {"m": "READY"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: (model / "1" / "more.py").write_text(""), "not signed: 1/more.py"),
        (lambda model: (model / "1" / "helper.py").unlink(), "missing: 1/helper.py"),
        (
            lambda model: (model / "model.sig").unlink(),
            "expected a signature in model.sig, here or in the folder above",
        ),
        (lambda model: (model / "model.sig").write_text("{"), "the signature in"),
        (lambda model: (model / "1" / "link.py").symlink_to(model / "1" / "helper.py"), "link.py"),
    ],
)
async def test_other_files(tmp_path: Path, keys: Keys, change: Any, reason: str) -> None:
    model = write(tmp_path)
    keys.sign(model, model / "model.sig")
    change(model)
    assert reason in (await states(tmp_path / "models", keys))["m"]
    assert not (tmp_path / "imported").exists()


async def test_another_key(tmp_path: Path, keys: Keys) -> None:
    model = write(tmp_path)
    Keys(tmp_path, "theirs").sign(model, model / "model.sig")
    assert "the signature in" in (await states(tmp_path / "models", keys))["m"]
    assert not (tmp_path / "imported").exists()
    both = f"{tmp_path / 'ours.pub'},{tmp_path / 'theirs.pub'}"
    config = Config(grpc_port=0, rest_port=0, model_signatures="require", model_signing_keys=both)
    async with triglot.Server([str(tmp_path / "models")], config) as server:
        assert reasons(server) == {"m": "READY"}


async def test_a_certificate(tmp_path: Path) -> None:
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    model, own, trusted = write(tmp_path), tmp_path / "own.pem", tmp_path / "ca.pem"
    certificate = _signers_certificate(authority, own)
    authority.cert_pem.write_to_path(trusted)
    signature = model / "model.sig"
    made = signing.Config().use_certificate_signer(
        private_key=own, signing_certificate=certificate, certificate_chain=[trusted]
    )
    made.set_hashing_config(hashing.Config().set_ignored_paths(paths=[signature])).sign(model, signature)
    for trusts, served_as in ((authority, "READY"), (trustme.CA(key_type=trustme.KeyType.ECDSA), "not valid")):
        trusts.cert_pem.write_to_path(trusted)
        config = Config(
            grpc_port=0,
            rest_port=0,
            model_signatures="require",
            model_signing_ca=str(trusted),
            exit_on_load_error=False,
        )
        async with triglot.Server([str(tmp_path / "models")], config) as server:
            assert served_as in reasons(server)["m"]


def _authority(key: Any) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _signers_certificate(authority: trustme.CA, key: Path) -> Path:
    """Write a private key, and a certificate for it that may sign; returns the certificate's file."""
    private = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(pem(private))
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    signer = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "signer")]))
        .issuer_name(issuer.subject)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(True, *[False] * 8), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .add_extension(_authority(issuer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())  # type: ignore[arg-type]  # An EC key.
    )
    file = key.with_suffix(".crt")
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return file


async def test_a_configuration_next_to_a_signed_version(tmp_path: Path, keys: Keys) -> None:
    model = write(tmp_path)
    keys.sign(model / "1", model / "1" / "model.sig")
    reason = (await states(tmp_path / "models", keys))["m"]
    assert reason.endswith(f"config.pbtxt: not covered by the signature of {model / '1'}; sign the folder {model}")
    (model / "config.pbtxt").unlink()
    assert await states(tmp_path / "models", keys) == {"m": "READY"}


async def test_an_environment_outside(tmp_path: Path, keys: Keys) -> None:
    model, outside = write(tmp_path), tmp_path / "env.tar.gz"
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{outside}" }} }}\n'
    (model / "config.pbtxt").write_text(f'backend: "python"\n{parameter}')
    outside.write_bytes(b"")
    keys.sign(model, model / "model.sig")
    (reason,) = (await states(tmp_path / "models", keys)).values()
    assert reason.endswith(f"{outside}: the model's Python is not covered by the signature of {model}")


async def test_a_model_of_one_file(tmp_path: Path, keys: Keys) -> None:
    file = tmp_path / "models.py"
    file.write_text(IDENTITY)
    reason = (await states(file, keys))["models"]
    assert reason == f"{file}: expected a signature in models.py.sig beside it, got none"
    keys.sign(file, tmp_path / "models.py.sig")
    assert await states(file, keys) == {"models": "READY"}
    file.write_text(f"{IDENTITY}\n")
    assert "models.py.sig is not valid" in (await states(file, keys))["models"]


async def test_only_a_warning(tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    model = write(tmp_path)
    assert await states(tmp_path / "models", keys, mode="warn") == {"m": "READY"}
    assert f"{model / '1'}: expected a signature in model.sig" in caplog.text


async def test_a_changed_version_is_not_loaded_again(tmp_path: Path, keys: Keys) -> None:
    model = write(tmp_path)
    keys.sign(model, model / "model.sig")
    server = await served(tmp_path / "models", keys, model_control_mode="explicit", load_model="m")
    try:
        (model / "1" / "helper.py").write_text("ONE = 2\n")
        with pytest.raises(InvalidArgument, match=r"changed: 1/helper\.py"):
            await server.manager.load_model("m")
        (version,) = server.manager.registry.versions()
        assert version.state.name == "READY"  # What was signed serves on.
        upload = {"1/model.py": IDENTITY.encode()}
        with pytest.raises(InvalidArgument, match=r"expected a signature in model\.sig"):
            await server.manager.load_model("m", '{"backend": "python"}', upload)
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "model_signatures require: expected model_signing_keys, model_signing_ca or model_signing_identity"),
        ({"model_signing_keys": "/none.pub"}, "model_signing_keys: /none.pub: no such file"),
        ({"model_signing_identity": "me"}, "model_signing_identity: expected IDENTITY,ISSUER, got 'me'"),
    ],
)
def test_options(options: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Config(model_signatures="require", **options)
