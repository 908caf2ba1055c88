"""Checks models' signatures (OpenSSF Model Signing) before anything of a model is loaded or imported.

A signature is a file `model.sig` in the model's folder, or in that of the version, or NAME.sig beside a model of
one file. It covers every file of what it signs: one that is changed, missing or more is an error. What decides how
a model is loaded, its configuration, has to be covered, too.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from triglot import parts
from triglot.core.errors import Code, MissingDependency, ModelLoadError
from triglot.repository.scan.source import ModelFiles

log = logging.getLogger(__name__)

OFF, WARN, REQUIRE = "off", "warn", "require"
SIGNATURE: Final = "model.sig"
SUFFIX: Final = ".sig"
_DIFFERENCES: Final = {
    "changed": re.compile(r"Hash mismatch for \\?'(.+?)\\?':"),
    "not signed": re.compile(r"Extra files found in model '.*?': ([^\"]+?)[\"\]]"),
    "missing": re.compile(r"Missing files in model '.*?': ([^\"]+?)[\"\]]"),
}
"""What model-signing 1.1 says of files that differ."""


@dataclass(frozen=True, slots=True)
class Signers:
    """Whose signatures count: holders of private keys, of certificates of an authority, or a Sigstore identity.

    `keys` are files with public keys, `authorities` files with certificates, each in PEM. `identity` is the
    signer, and `issuer` the address of the OpenID provider that vouches for it.
    """

    keys: Sequence[Path] = ()
    authorities: Sequence[Path] = ()
    identity: str = ""
    issuer: str = ""


class Signatures:
    """Verifies the signature of each version; with `warn`, what is wrong is only logged."""

    def __init__(self, signers: Signers, *, warn: bool = False) -> None:
        self._signers = signers
        self._warn = warn

    def verify(self, files: ModelFiles) -> None:
        """Check a version before it is loaded. Blocks: it reads all files.

        Raise `ModelLoadError`, which names the file that is wrong, and `MissingDependency`.
        """
        if files.make is not None:
            return  # An object of the caller's own.
        try:
            self._verify(files)
        except MissingDependency:
            raise
        except ModelLoadError as error:
            if not self._warn:
                raise
            log.warning("%s", error)

    def _verify(self, files: ModelFiles) -> None:
        signed, signature = _found(files)
        _check_covered(files, signed)
        problems = []
        for make in _configs(self._signers):
            try:
                # A configuration keeps what it read of the first model.
                make().verify(Path(signed), Path(signature))
            except Exception as error:  # Not only ValueError: the libraries below it raise errors of their own.
                problems.append(_differences(str(error)) or f"{type(error).__name__}: {error}")
            else:
                log.info("%s: the signature in %s is valid", files, signature)
                return
        raise _refused(f"{signed}: the signature in {signature} is not valid: {'; '.join(problems)}")


def _refused(text: str) -> ModelLoadError:
    return ModelLoadError(text, Code.FAILED_PRECONDITION)


def _found(files: ModelFiles) -> tuple[Path, Path]:
    """Return what is signed, a folder or a file, and its signature. Raise `ModelLoadError` without one."""
    if files.single_file:
        signature = files.file.with_name(files.file.name + SUFFIX)
        if signature.is_file():
            return files.file, signature
        raise _refused(f"{files.file}: expected a signature in {signature.name} beside it, got none")
    version = files.folder or (files.file if files.file.is_dir() else files.file.parent)
    for folder in (version, version.parent):
        if (folder / SIGNATURE).is_file():
            return folder, folder / SIGNATURE
    raise _refused(f"{version}: expected a signature in {SIGNATURE}, here or in the folder above, got none")


def _differences(text: str) -> str:
    """Return which files differ, without their digests, of model-signing's error; "" for another error."""
    found = {kind: pattern.findall(text) for kind, pattern in _DIFFERENCES.items()}
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in found.items() if names)


def _check_covered(files: ModelFiles, signed: Path) -> None:
    """Raise `ModelLoadError` if a file of its configuration is next to what is signed, or its Python elsewhere."""
    environment = files.config.environment
    if environment is not None and not environment.is_relative_to(signed):
        raise _refused(f"{environment}: the model's Python is not covered by the signature of {signed}")
    folder = signed.parent
    labels = [tensor.label_file for tensor in files.config.outputs if tensor.label_file is not None]
    for path in (Path(files.config.source), *labels):
        if path.is_file() and path.is_relative_to(folder) and path != signed and not path.is_relative_to(signed):
            raise _refused(f"{path}: not covered by the signature of {signed}; sign the folder {folder}")


def _configs(signers: Signers) -> list[Callable[[], Any]]:
    """Return what makes the configuration of a verification, for each signer."""
    try:
        verifying = importlib.import_module("model_signing.verifying")
    except ModuleNotFoundError as error:
        raise MissingDependency(parts.missing_text("model_signatures", error)) from error

    def by_key(key: Path) -> Any:
        return verifying.Config().use_elliptic_key_verifier(public_key=key)

    def by_certificate() -> Any:
        return verifying.Config().use_certificate_verifier(certificate_chain=list(signers.authorities))

    def by_identity() -> Any:
        return verifying.Config().use_sigstore_verifier(identity=signers.identity, oidc_issuer=signers.issuer)

    made: list[Callable[[], Any]] = [partial(by_key, key) for key in signers.keys]
    if signers.authorities:
        made.append(by_certificate)
    if signers.identity:
        made.append(by_identity)
    return made
