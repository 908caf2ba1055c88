"""Runs the checks of client scripts, and prints one JSON object per check: its name, whether it held, and why not.

A check is a top-level `async def check_NAME(subject)` of a script. With a second parameter it runs once for each
of the parameter's values below. The tests read the names from the scripts' source, so a check that never ran is
noticed.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback

INTEGERS = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
PARAMETERS = {
    "datatype": ("BOOL", *INTEGERS, "FP16", "BF16", "FP32", "FP64", "BYTES"),
    # FP16 and BF16 have no form in JSON, nor a typed field over gRPC.
    "text_datatype": ("BOOL", *INTEGERS, "FP32", "FP64", "BYTES"),
    # The kserve client does not know BF16.
    "kserve_datatype": ("BOOL", *INTEGERS, "FP16", "FP32", "FP64", "BYTES"),
}


class Raises:
    """Asserts that the block raises an error of a kind, and keeps it."""

    def __init__(self, kind):
        self.kind = kind

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert error is not None, "no error"
        self.error = error
        return isinstance(error, self.kind)


def _values(parameter=None):
    """What stands in the name of each run, and its further arguments."""
    if parameter is None:
        return [("", ())]
    return [(f"[{value}]", (value,)) for value in PARAMETERS[parameter]]


def collect(modules):
    """The checks of the modules as (name, function, further arguments)."""
    for module in modules:
        for name, function in vars(module).items():
            if not name.startswith("check_") or function.__module__ != module.__name__:
                continue
            _, *further = inspect.signature(function).parameters
            for suffix, arguments in _values(*further):
                yield name.removeprefix("check_") + suffix, function, arguments


async def _run(modules, open_subject, report):
    async with open_subject() as subject:
        for name, function, arguments in collect(modules):
            detail = ""
            try:
                await function(subject, *arguments)
            except Exception:
                detail = traceback.format_exc()
            print(json.dumps({"name": name, "ok": not detail, "detail": detail}), file=report, flush=True)


def run(modules, open_subject):
    """Run every check of the modules with the subject that `open_subject()`, an async context manager, gives."""
    # What the client libraries print must not come between the results.
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asyncio.run(_run(modules, open_subject, report))
