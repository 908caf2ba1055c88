"""MLServer's helpers for models."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from triglot.backends.mlserver.stand_in.absent import missing
from triglot.backends.mlserver.stand_in.errors import InvalidModelURI


async def get_model_uri(settings: Any, wellknown_filenames: Sequence[str] = ()) -> str:
    """Return where a model's files are: the first file of these names in its folder, or what `uri` names itself.

    Raise `InvalidModelURI` if nothing is there.
    """
    uri = None if settings.parameters is None else settings.parameters.uri
    if not uri:
        raise InvalidModelURI(settings.name)
    parts = urlsplit(uri, "file")
    if parts.scheme != "file":
        return str(uri)
    return _found(settings.name, Path(to_absolute_path(settings, parts.path)), wellknown_filenames)


def _found(name: str, place: Path, wellknown_filenames: Sequence[str]) -> str:
    if not place.exists():
        raise InvalidModelURI(name, str(place))
    named = [place / file for file in wellknown_filenames if (place / file).is_file()]
    return str(named[0] if named else place)


def to_absolute_path(model_settings: Any, uri: str) -> str:
    """Return a path relative to the file of the settings, if they have one."""
    source = model_settings._source
    return uri if source is None else str((Path(source).parent / uri).absolute().resolve())


def generate_uuid() -> str:
    """Return a new id for a request."""
    return str(uuid.uuid4())


def __getattr__(name: str) -> Any:
    missing("mlserver.utils", name)
