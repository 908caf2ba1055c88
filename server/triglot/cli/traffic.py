"""`triglot traffic`: shows, and changes, how a model's calls are divided among its versions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from triglot.cli.grpc_client import CallError, add_connection, connected
from triglot.config.options import ConfigError
from triglot.pb.triglot import traffic_pb2 as pb
from triglot.protocols.traffic.protocol import SERVICE, document_of
from triglot.run import FAILED, print_error

TITLES = ("version", "ready", "percent", "requests", "errors", "p50 ms", "p99 ms")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "traffic",
        help="show or change how a model's calls are divided among its versions",
        usage="triglot traffic [OPTION ...] MODEL",
        description="Shows the versions of a model of a running server, the share of the calls that each gets, "
        "what they did, and how the answers of the shadow differ. With options it changes the shares first. The "
        "exit status is 1 if the server refuses.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="name of the model")
    add(
        "--weight",
        action="append",
        default=[],
        metavar="VERSION=PERCENT",
        help="percent of the calls for a version; the other versions share the rest as before; may be repeated",
    )
    add("--sticky", metavar="NAME", help="parameter or header whose value decides about the version; empty: none")
    add(
        "--shadow",
        metavar="[MODEL/]VERSION=PERCENT",
        help="percent of the calls that are copied to a version, of this or another model; VERSION=0 ends it",
    )
    add(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="how far the shadow's numbers may differ, absolutely and relatively (default: 1e-05)",
    )
    add("--reset", action="store_true", help="return to the configuration first")
    add("--json", action="store_true", help="print JSON instead of a table")
    add_connection(parser, "--url", "the call")


def run(flags: Mapping[str, Any], others: Iterable[str]) -> int:
    """Print the traffic and return the exit status. Raise `ConfigError`."""
    if others := list(others):
        raise ConfigError(f"traffic: expected one MODEL, got {others[0]!r} too")
    method, request = _request(flags)
    try:
        with connected(flags, SERVICE, "Triglot") as client:
            reply = client.call(method, request, pb.TrafficReply)
    except CallError as error:
        print_error(str(error))
        return FAILED
    document = document_of(reply)
    print(json.dumps(document, indent=2) if flags["json"] else "\n".join(_lines(document)))
    return 0


def _request(flags: Mapping[str, Any]) -> tuple[str, Any]:
    request = pb.SetTrafficRequest(model_name=flags["model"], reset=flags["reset"])
    for text in flags["weight"]:
        version, percent = _percent("--weight: expected VERSION=PERCENT", text)
        request.traffic[version] = percent
    if flags["sticky"] is not None:
        request.sticky = flags["sticky"]
    if flags["shadow"] is not None:
        target, request.shadow.percent = _percent("--shadow: expected [MODEL/]VERSION=PERCENT", flags["shadow"])
        request.shadow.model, _, request.shadow.version = target.rpartition("/")
        if flags["tolerance"] is not None:
            request.shadow.tolerance = flags["tolerance"]
    elif flags["tolerance"] is not None:
        raise ConfigError("--tolerance: expected with --shadow")
    if request == pb.SetTrafficRequest(model_name=flags["model"]):
        return "GetTraffic", pb.GetTrafficRequest(model_name=flags["model"])
    return "SetTraffic", request


def _percent(expected: str, text: str) -> tuple[str, float]:
    target, equals, percent = text.rpartition("=")
    try:
        if equals:
            return target, float(percent.removesuffix("%"))
    except ValueError:
        pass
    raise ConfigError(f"{expected}, got {text!r}")


def _lines(document: Mapping[str, Any]) -> Iterable[str]:
    rows = [
        (
            _text(row["version"]),
            "yes" if row["ready"] else "no",
            _text(row["percent"]),
            *(_text(row[key]) for key in ("requests", "errors", "p50_ms", "p99_ms")),
        )
        for row in document["versions"]
    ]
    yield from _table([TITLES, *rows])
    if document["sticky"]:
        yield f"sticky by {document['sticky']}"
    if (shadow := document["shadow"]) is not None:
        yield from _verdict(shadow)
    yield f"set by {document['set_by']}"


def _verdict(shadow: Mapping[str, Any]) -> Iterable[str]:
    target = "/".join(filter(None, (shadow["address"], shadow["model"], shadow["version"])))
    found = shadow["verdict"]
    share = found["different_share"] or 0
    yield (
        f"shadow {target}: {_text(found['compared'])} compared, {_text(found['different'])} differ "
        f"({100 * share:.3g} %), {_text(found['failed'])} failed, "
        f"{_text(sum(found['dropped'].values()))} dropped"
    )
    for output, count in found["differing"].items():
        largest = found["largest"].get(output)
        most = "" if largest is None else f", by up to {largest:.3g}"
        yield f"  output {output}: {_text(count)} differ{most}"
    yield "  p50 {} ms, of the shadow {} ms; p99 {} ms, of the shadow {} ms".format(
        *(_text(found[key]) for key in ("p50_ms_served", "p50_ms_shadow", "p99_ms_served", "p99_ms_shadow"))
    )
    if found["last_error"]:
        yield f"  the last failure: {found['last_error']}"


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _text(value: object) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
