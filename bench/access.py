"""Measures what access control costs an authorised client, and what one client's flood does to another.

From the repository's root: `python -m bench.access --help`. Small, different ModelInfer calls over gRPC: first the
same load on servers that require nothing, a token, a JWT, or a client certificate, in turn, round by round; then a
client within its rate limit, alone and beside one that sends ten times its rate, or beside clients without
credentials that send large bodies; then tokens and certificates that are changed under load.
"""

import argparse
import asyncio
import hashlib
import json
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import jwt
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa

from bench import changes, measure, openclient, payloads, report, rounds, servers, strangers, traffic
from bench.headers import Metadata
from bench.measure import Subject
from bench.payloads import Exchange, framed
from bench.rounds import Measured, Plan
from bench.scenarios import SCENARIOS
from bench.tally import BenchError, Request, close

MODEL = "identity_fp32"
SCENARIO = next(scenario for scenario in SCENARIOS if scenario.name == "infer-c64")
TOKEN, JWT, CERTIFICATE = "a token", "a JWT, verified before", "a certificate"
IGNORED = ", ignored"
"""Ends the name of a line whose server has no access control, but gets the credential."""
RATE = 200
"""Rate limit in requests per second of the flooding client, which sends `TIMES` as many."""
TIMES = 10
QUIET_RATE = 500
"""Calls per second of the client beside a flood, or beside clients without credentials."""
COLUMNS = (
    *("credential", "calls/s", "x none", "(min-max)", "p50 ms", "p99 ms", "CPU µs", "x none", "client"),
    *("x ignored", "CPU x ignored"),
)
GOALS = """\
goals: x 0.98 for a token and a JWT, x 0.99 for a certificate; p99 x 1.20 beside a flood, which gets its rate
within 5%, and beside strangers"""
LEGEND = """\
Medians over rounds, in turn, one at a time; "x none" is the median of the rounds' own ratios to the first line,
over TLS to the one where the certificate is ignored; "x ignored" to the line before it, whose calls have the same
bytes. "!": the client was the limit."""
STRANGE_PLAN = Plan(9, 1.0)
"""The rounds beside other clients: a rate per second takes a second to see."""


class Issuer:
    """Signs JWTs, and writes the JWKS file with its public key."""

    def __init__(self, folder: Path) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        algorithm = jwt.algorithms.RSAAlgorithm(jwt.algorithms.RSAAlgorithm.SHA256)
        key = algorithm.to_jwk(self._key.public_key(), as_dict=True) | {
            "kid": "bench",
            "use": "sig",
            "alg": "RS256",
        }
        self.file = folder / "jwks.json"
        self.file.write_text(json.dumps({"keys": [key]}))

    def token(self, subject: str = "client") -> str:
        """Return a JWT that is valid for an hour."""
        claims = {"iss": "bench", "aud": "triglot", "sub": subject, "exp": int(time.time()) + 3600}
        return jwt.encode(claims, self._key, "RS256", headers={"kid": "bench"})


def client(name: str, more: str = "") -> str:
    """Return the access file's table of a client whose token equals its name; `more` are further lines."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f'[client.{name}]\ntokens_sha256 = ["{digest}"]\noperations = ["infer"]\n{more}\n'


def access_file(file: Path, *tables: str) -> Path:
    """Write an access file with these tables; returns its path."""
    file.write_text("\n".join((*tables, '[anonymous]\noperations = ["health"]\n')))
    return file


def bearer(token: str) -> tuple[bytes, bytes]:
    """Return the `authorization` field that a client adds to each call."""
    return b"authorization", f"Bearer {token}".encode()


class Servers:
    """Starts servers with and without access control, and makes the requests for them.

    Files are written to `folder`; servers are pinned to `core`, and end with `stack`.
    """

    def __init__(self, folder: Path, core: int | None, stack: ExitStack) -> None:
        self._folder, self._core, self._stack = folder, core, stack
        self._issuer = Issuer(folder)
        signed = f'[issuer.bench]\nissuer = "bench"\naudience = "triglot"\njwks = "{self._issuer.file}"\n'
        self.access = access_file(
            folder / "access.toml",
            client("friend"),
            client("flood", f"rate = {RATE}"),
            signed + 'operations = ["infer"]\n',
        )
        certified = '[client.certified]\ncertificates = ["bench.example"]\noperations = ["infer"]\n'
        self._certified = access_file(folder / "certified.toml", certified)
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(folder / "ca.pem")
        own = self._authority.issue_cert("localhost", "127.0.0.1")
        own.private_key_pem.write_to_path(folder / "key.pem")
        own.cert_chain_pems[0].write_to_path(folder / "certificate.pem")

    def start(self, *flags: str) -> tuple[servers.Server, int]:
        """Start a server; returns it and its gRPC port."""
        server, port, _ = self._stack.enter_context(rounds.serving_models(self._core, flags))
        return server, port

    def plain(self) -> list[Subject]:
        """Start the servers without TLS: without a credential, with a token, and with a JWT."""
        subjects = [self._subject("none", (), ())]
        for name, token in ((TOKEN, "friend"), (JWT, self._issuer.token())):
            fields = (bearer(token),)
            subjects.append(self._subject(name + IGNORED, (), fields))
            subjects.append(self._subject(name, ("--access", str(self.access)), fields))
        return subjects

    def secured(self) -> list[Subject]:
        """Start the servers with TLS and client certificates: one ignores these, one authenticates by them."""
        files = {"--tls-certificate": "certificate.pem", "--tls-key": "key.pem", "--tls-client-ca": "ca.pem"}
        flags = [word for flag, name in files.items() for word in (flag, str(self._folder / name))]
        mine = self._authority.issue_cert("bench.example")
        tls = ssl.create_default_context()
        self._authority.configure_trust(tls)
        mine.configure_cert(tls)
        tls.check_hostname = False
        tls.set_alpn_protocols(["h2"])
        lines = (CERTIFICATE + IGNORED, flags), (CERTIFICATE, [*flags, "--access", str(self._certified)])
        return [self._subject(name, words, (), tls) for name, words in lines]

    def _subject(
        self,
        name: str,
        flags: Sequence[str],
        fields: Sequence[tuple[bytes, bytes]],
        tls: ssl.SSLContext | None = None,
    ) -> Subject:
        server, port = self.start(*flags)
        made = traffic.exchanges(payloads.grpc_exchange, (MODEL,), 16, traffic.VARIED)
        subject = Subject(name, server, port, made[0], framed([made[0].reply]), tls=tls)
        subject.requests = [
            replace(request, metadata=Metadata([*request.metadata.fields, *fields]))
            for request in traffic.requests(made, traffic.VARIED, port)
        ]
        return subject


def friend_rows(measured: Sequence[Measured[str]]) -> Iterator[list[str]]:
    """Yield the table's rows."""
    for before, measurement in zip((None, *measured), measured, strict=False):
        ignored = before if before is not None and before.setting == measurement.setting + IGNORED else None
        more = [] if ignored is None else [rounds.ratios(measurement, ignored), rounds.costs(measurement, ignored)]
        yield [*rounds.row(measurement, measured[0]), *(map(rounds.middle, more) if more else ("", ""))]


async def friends(subjects: Sequence[Subject], plan: Plan) -> list[Measured[str]]:
    """Measure all subjects in turn, round by round."""
    return await rounds.interleaved(
        subjects, plan, lambda subject, settle, seconds: measure.load(SCENARIO, subject, settle, seconds)
    )


@dataclass(slots=True)
class Flood:
    """Results of the other client, p99 in seconds for each round, and of the flood."""

    undisturbed: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    """Accepted calls per second, without the burst that a previously idle client may send."""
    refused: list[float] = field(default_factory=list)
    """Latencies of rejected calls in milliseconds."""


async def flood(port: int, plan: Plan) -> Flood:
    """Measure one client within its rate limit, alone and beside one that exceeds its own, round by round.

    Raise `BenchError` when a call of the first one is rejected.
    """
    exchange = payloads.grpc_exchange(MODEL, payloads.tensor(1, 16))
    friend = [Request(exchange.body, metadata=Metadata([bearer("friend")]))]
    measured = Flood()
    for _ in range(plan.rounds):
        measured.undisturbed.append(await _quiet(port, exchange, friend, plan.seconds))
        metadata = Metadata([bearer("flood")])
        connection = await openclient.connect(port, exchange.path, exchange.body, exchange.reply, metadata)
        try:
            p99, offered = await asyncio.gather(
                _quiet(port, exchange, friend, plan.seconds),
                openclient.offer(connection, RATE * TIMES, plan.seconds),
            )
        finally:
            await close(connection)
        measured.disturbed.append(p99)
        measured.accepted.append((len(offered.good) - RATE) / plan.seconds)
        measured.refused += [seconds * 1e3 for seconds in offered.refused]
    return measured


@dataclass(slots=True)
class Strange:
    """Results of a client, alone and beside clients without credentials: p99 in seconds for each round."""

    undisturbed: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    refused: int = 0
    """Rejected calls of the clients without credentials."""


async def strange(port: int, plan: Plan, cores: frozenset[int]) -> Strange:
    """Measure one client, alone and beside clients without credentials on `cores`, round by round.

    Raise `BenchError` when a call of the first one is rejected.
    """
    exchange = payloads.grpc_exchange(MODEL, payloads.tensor(1, 16))
    friend = [Request(exchange.body, metadata=Metadata([bearer("friend")]))]
    measured = Strange()
    for _ in range(plan.rounds):
        measured.undisturbed.append(await _quiet(port, exchange, friend, plan.seconds))
        async with strangers.strangers(port, exchange.path, cores) as refused:
            measured.disturbed.append(await _quiet(port, exchange, friend, plan.seconds))
        measured.refused += refused.calls
    return measured


def strange_lines(measured: Strange) -> Iterator[str]:
    """Yield the lines to print."""
    mib = strangers.BODY_BYTES // 2**20
    yield f"{strangers.STRANGERS} strangers with {mib} MiB each, again and again: {measured.refused:,} refused"
    yield _ratio_line(measured.undisturbed, measured.disturbed, "the strangers")


def _ratio_line(undisturbed: Sequence[float], disturbed: Sequence[float], whom: str) -> str:
    """Return a line with the p99 of a client's calls, alone and beside others, and the median ratio."""
    ratios = [time / another for time, another in zip(disturbed, undisturbed, strict=True)]
    before, now = (statistics.median(times) * 1e3 for times in (undisturbed, disturbed))
    return f"  p99 {before:.2f} ms alone, {now:.2f} ms beside {whom}: x{statistics.median(ratios):.2f}"


async def _quiet(port: int, exchange: Exchange, requests: Sequence[Request], seconds: float) -> float:
    """Return the p99 in seconds of calls at random instants, at a rate far below the server's capacity."""
    metadata = requests[0].metadata
    connection = await openclient.connect(port, exchange.path, exchange.body, exchange.reply, metadata)
    try:
        offered = await openclient.offer(connection, QUIET_RATE, seconds)
    finally:
        await close(connection)
    if offered.refused:
        raise BenchError(f"{len(offered.refused)} calls of the other client were refused")
    return statistics.quantiles(offered.good, n=100)[98]


def flood_lines(measured: Flood) -> Iterator[str]:
    """Yield the lines to print."""
    accepted = statistics.median(measured.accepted)
    yield f"a client that sends {QUIET_RATE} calls a second: none was refused"
    yield _ratio_line(measured.undisturbed, measured.disturbed, "the flood")
    yield f"a client of {RATE} requests a second sends {RATE * TIMES}: {accepted:.1f} a second after its burst"
    yield f"  that is x{accepted / RATE:.3f} of its rate"
    yield f"  refused {len(measured.refused):,}: p50 {statistics.median(measured.refused):.2f} ms"


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.access", description=__doc__.splitlines()[0])
    rounds.add_arguments(parser, 41, 0.4)
    parser.add_argument(
        "--changes", type=int, default=100, help="changes of token and certificate (default: %(default)s)"
    )
    arguments = parser.parse_args(words)
    plan = Plan(arguments.rounds, arguments.seconds)
    cores = servers.choose_cores()
    servers.pin(cores.client)
    print(*report.machine(), f"{plan.rounds} rounds of {plan.seconds:g} s; {cores.note}", sep="\n", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name, ExitStack() as stack:
            here = Servers(Path(name), cores.server, stack)
            lines: list[list[str]] = []
            for subjects in (here.plain(), here.secured()):
                lines += friend_rows(asyncio.run(friends(subjects, plan)))
            table = report.plain(COLUMNS, lines)
            print(f"\n{SCENARIO.in_flight} in flight; {GOALS}", table, LEGEND, sep="\n", flush=True)
            _, port = here.start("--access", str(here.access))
            print("", *flood_lines(asyncio.run(flood(port, STRANGE_PLAN))), sep="\n", flush=True)
            others = cores.usable - {cores.server}
            print("", *strange_lines(asyncio.run(strange(port, STRANGE_PLAN, others))), sep="\n", flush=True)
            print("", *changes.lines(asyncio.run(changes.measure(arguments.changes, cores.server))), sep="\n")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
