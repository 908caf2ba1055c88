"""`triglot check`: loads, warms up and calls what `triglot serve` would serve, without opening a port."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from triglot.cli import serve
from triglot.config.option_fields import groups
from triglot.config.options import LOGS, MODELS, OPTIONS, SCHEDULING
from triglot.core.errors import ModelLoadError
from triglot.repository.manager.summary import VersionSummary, table
from triglot.run import Start


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "check",
        help="load models and call each once, and say what would be served",
        usage="triglot check [--json] [--no-calls] [OPTION ...] [PATH ...]",
        description="Loads and warms up the models at the paths as `triglot serve` does, calls each that has no "
        "example of its own with made inputs, prints a table of them, and unloads them. No port is opened. The "
        "exit status is 1 if a model cannot be loaded, or its call fails.",
        epilog="All options of `triglot serve` are accepted, so that its command line can be checked as it is.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--no-calls", action="store_true", help="call no model with made inputs")
    sections = groups(OPTIONS.values())
    serve.add_arguments(parser, shown=[name for title in (MODELS, SCHEDULING, LOGS) for name in sections[title]])


def start(flags: Mapping[str, Any], others: Iterable[str], environment: Mapping[str, str]) -> Start:
    """Return the start configuration. Raise `ConfigError`."""
    serving = serve.start(flags, others, environment)
    # Reports every error once, without retries or waiting.
    config = replace(serving.config, exit_on_load_error=False, wait_for_models=False, load_retries=0, workers=1)
    shown = partial(report, as_json=flags["json"])
    return replace(serving, config=config, try_calls=not flags["no_calls"], report=shown)


def report(summaries: Sequence[VersionSummary], errors: Sequence[ModelLoadError], *, as_json: bool) -> None:
    """Print each version, and the errors."""
    known = {summary.error for summary in summaries}
    others = [text for text in map(str, errors) if text not in known]
    if as_json:
        print(json.dumps({"models": list(map(asdict, summaries)), "errors": others}, indent=2))
        return
    for line in table(summaries) or ([] if others else ["no models"]):
        print(line)
    for summary in summaries:
        if summary.error:
            print(f"\n{summary.model}{f' version {summary.version}' if summary.version else ''}: {summary.error}")
    for text in others:
        print(f"\n{text}")
