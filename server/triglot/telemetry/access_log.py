"""One line of the log for each call, while somebody wants them."""

from __future__ import annotations

import logging

from triglot.core.call import Call
from triglot.core.errors import Code

LOGGER = "triglot.access"
LONGEST_NAME = 128
log = logging.getLogger(LOGGER)


class AccessLog:
    """`on`: whether there are such lines."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def line(self, protocol: str, entrypoint: str, method: str, call: Call, code: Code, seconds: float) -> None:
        """A call has ended: who was asked, what came of it, and how many milliseconds it took."""
        model = f" model={_printable(call.model_name)}" if call.model_name else ""
        if call.model_version:
            model += f" version={call.model_version}"
        client = f" client={_printable(call.client)}" if call.client else ""
        what = protocol or "-", entrypoint, method, model, client
        log.info("%s %s %s%s%s code=%s ms=%.3f", *what, code.name, seconds * 1e3)


def _printable(name: str) -> str:
    """A client's text, which is to stay in its place."""
    cut = name[:LONGEST_NAME]
    return cut if cut.isprintable() and " " not in cut else ascii(cut)
