"""Signed models where the library for signatures is not installed, and their tests where it is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import triglot
from tests.environment_tests import check_tests
from tests.process import write_model
from triglot.config.options import Config
from triglot.core.errors import ModelLoadError

pytestmark = pytest.mark.skipif(find_spec("model_signing") is not None, reason="this environment has it")


async def test_the_error_says_what_to_install(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "models" / "m" / "1")
    (tmp_path / "models" / "m" / "model.sig").touch()
    (tmp_path / "key.pub").touch()
    config = Config(
        grpc_port=0, rest_port=0, model_signatures="require", model_signing_keys=str(tmp_path / "key.pub")
    )
    with pytest.raises(ModelLoadError):
        await triglot.Server([str(tmp_path / "models")], config).start()
    text = "model_signatures needs model_signing, which is not installed; run: pip install model-signing pyOpenSSL"
    assert text in caplog.text


@pytest.mark.long
@pytest.mark.newest
def test_they_hold_with_the_library() -> None:
    check_tests("signatures", Path(__file__).with_name("test_signatures.py"))
