"""The command `triglot`, and `python -m triglot`."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def run(spec: str = "") -> NoReturn:
    """Run the command line, and end as Python does, except for finalizing the interpreter. `spec`: see `main`.

    A native thread, gRPC's or a model's, that requests the interpreter's lock during finalization would abort the
    process.
    """
    if not spec and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        # A reload during the start ends no server; `main` knows which commands a hangup ends. A worker gets none.
        signal.signal(signal.SIGHUP, lambda *_: None)
    gc.disable()  # Imported modules are no garbage, and collections during the import take time.
    from triglot.cli.main import main  # noqa: PLC0415

    gc.enable()
    arguments = sys.argv[1:]
    del sys.argv[1:]  # Hidden from models, whose code may parse them, as unittest does.
    status = main(arguments, spec=spec)
    threading._shutdown()  # type: ignore[attr-defined]  # Waits for threads, executors' too; has no public API.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # The reader is gone.
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
