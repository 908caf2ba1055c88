"""Makes the requests for lines with small calls: calls that differ as those of users do, or one repeated call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from uuid import UUID

import numpy as np

from bench.headers import Metadata
from bench.httpclient import request_bytes
from bench.payloads import REST, Exchange, Floats
from bench.tally import Request

Making = Callable[[str, Floats, str], Exchange]
"""Makes the exchange for a model, an input and a request's id."""
COUNT = 4096
"""Number of different calls of a bench, made beforehand and sent in turn; each round begins at a different one."""
TIMEOUT = 900, 1100
"""Least and greatest deadline, in milliseconds."""
FRACTIONS = 0.25, 0.5, 0.75
"""Fractional parts of values, which all JSON encoders format in the same way."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How calls differ: each has its own values, number of rows, id, deadline and traceparent."""

    varied: bool = True
    rows: int = 8
    """Most rows of a call."""
    indexed: bool = False
    """Whether HPACK is encoded as by grpc-go and grpc-java."""
    sampled: bool = True
    """Sampled flag of the clients' traces."""
    count: int = COUNT
    """Number of different calls."""


VARIED, ONE_ROW, INDEXED = Traffic(), Traffic(rows=1), Traffic(indexed=True)
IDENTICAL = Traffic(varied=False, rows=1)


@cache
def exchanges(making: Making, models: tuple[str, ...], elements: int, traffic: Traffic) -> Sequence[Exchange]:
    """Return the exchanges to send in turn, to one model after another. The first has the mean number of rows."""
    random, numbers = Random(elements), np.random.default_rng(elements)
    made = []
    for number in range(traffic.count if traffic.varied else 1):
        shape = random.randint(1, traffic.rows) if number else (traffic.rows + 1) // 2, elements
        values = numbers.integers(1, 1000, shape) + numbers.choice(FRACTIONS, shape)
        uuid = str(UUID(int=random.getrandbits(128), version=4)) if traffic.varied else ""
        made.append(making(models[number % len(models)], values.astype(np.float32), uuid))
    return made


def requests(made: Sequence[Exchange], traffic: Traffic, port: int, canned: bytes = b"") -> Sequence[Request]:
    """Return the exchanges as requests to send; `canned`: the reply of a server that sends the same to each."""
    random, prepared = Random(len(made)), []
    for exchange in made:
        trace = {"traceparent": _traceparent(random, sampled=traffic.sampled)} if traffic.varied else {}
        headers, holds = exchange.headers | trace, (canned,) if canned else exchange.holds
        if exchange.kind == REST:
            prepared.append(Request(request_bytes(port, exchange.path, headers, exchange.body), holds))
            continue
        metadata = Metadata([(name.encode(), value.encode()) for name, value in headers.items()])
        timeout = random.randint(*TIMEOUT) if traffic.varied else None
        prepared.append(Request(exchange.body, holds, metadata, timeout))
    return prepared


def _traceparent(random: Random, *, sampled: bool) -> str:
    """Return a random traceparent (W3C Trace Context)."""
    return f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-{sampled:02d}"
