"""The command `triglot`, and `python -m triglot`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def run(spec: str = "") -> NoReturn:
    """Run the command line, and end as Python does, but for taking itself apart. `spec`: see `main`.

    A native thread that asks for the interpreter's lock meanwhile, gRPC's or a model's, would abort the process.
    """
    gc.disable()  # What is imported is no garbage, and to look through it again and again takes its time.
    from triglot.cli.main import main  # noqa: PLC0415

    gc.enable()
    arguments = sys.argv[1:]
    del sys.argv[1:]  # They are not the models': code of theirs may look for arguments of its own, unittest does.
    status = main(arguments, spec=spec)
    threading._shutdown()  # type: ignore[attr-defined]  # Waits for threads, executors' too; there is no other way.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # Nobody reads it any more.
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
