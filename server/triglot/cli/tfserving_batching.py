"""Configures the batching of models as `tensorflow_model_server`'s flags say (tfs 6.4, 6.5)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from triglot.core.errors import Code, InvalidArgument, ModelLoadError
from triglot.model.model import Model
from triglot.pb.tfserving.option_files_pb2 import BatchingParameters
from triglot.protocols.tfserving.batching import PER_MODEL_FILE, Parameters, batch, parameters_of
from triglot.repository.config.proto_text import parse_text
from triglot.repository.scan.source import ModelFiles

log = logging.getLogger(__name__)


def read_parameters(file: Path) -> Parameters:
    """Returns the parameters in a file. Raises `InvalidArgument`, which names the file, and `OSError`."""
    message = parse_text(file.read_bytes(), str(file), BatchingParameters)
    if message.HasField("thread_pool_name"):
        log.warning("%s: thread_pool_name: not supported, ignored", file)
    return parameters_of(message, str(file))


class Batching:
    """Configures a model's batching with the `common` parameters, before it serves. An `Adapt` of the loader.

    `per_model`: uses those in the version's own folder, with the common number of threads; a version without any
    is not batched.
    """

    def __init__(self, common: Parameters, *, per_model: bool) -> None:
        self._common = common
        self._per_model = per_model

    def __call__(self, model: Model, files: ModelFiles) -> None:
        """Configures a model. Raises `ModelLoadError` for invalid parameters of its own."""
        folder = files.folder or files.file.parent
        parameters = self._own(folder / PER_MODEL_FILE) if self._per_model else self._common
        if parameters is not None:
            for note in batch(model, parameters):
                log.warning("%s: requests run one by one: %s", files, note)

    def _own(self, file: Path) -> Parameters | None:
        try:
            return replace(read_parameters(file), threads=self._common.threads)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ModelLoadError(f"{file}: {error.strerror}") from None
        except InvalidArgument as error:
            raise ModelLoadError(error.message, Code.INVALID_ARGUMENT) from None
