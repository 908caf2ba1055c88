"""What a small-call line sends: calls that differ as those of users do, or one call again and again."""

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
"""Makes the exchange of a model, an input and a request's id."""
COUNT = 4096
"""Different calls of a bench, made beforehand and sent in turn, from another one on in each round."""
TIMEOUT = 900, 1100
"""Milliseconds: the least and the greatest."""
FRACTIONS = 0.25, 0.5, 0.75
"""Of values: every JSON writer prints them alike."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How calls differ: each has other values, some rows, and an id, a deadline and a traceparent of its own."""

    varied: bool = True
    rows: int = 8
    """At most."""
    indexed: bool = False
    """HPACK as grpc-go and grpc-java write it."""
    sampled: bool = True
    """Whether its clients have their traces recorded."""
    count: int = COUNT
    """Different calls."""


VARIED, ONE_ROW, INDEXED = Traffic(), Traffic(rows=1), Traffic(indexed=True)
IDENTICAL = Traffic(varied=False, rows=1)


@cache
def exchanges(making: Making, models: tuple[str, ...], elements: int, traffic: Traffic) -> Sequence[Exchange]:
    """What is sent in turn, to one model after the other. The first one has as many rows as the mean."""
    random, numbers = Random(elements), np.random.default_rng(elements)
    made = []
    for number in range(traffic.count if traffic.varied else 1):
        shape = random.randint(1, traffic.rows) if number else (traffic.rows + 1) // 2, elements
        values = numbers.integers(1, 1000, shape) + numbers.choice(FRACTIONS, shape)
        uuid = str(UUID(int=random.getrandbits(128), version=4)) if traffic.varied else ""
        made.append(making(models[number % len(models)], values.astype(np.float32), uuid))
    return made


def requests(made: Sequence[Exchange], traffic: Traffic, port: int, canned: bytes = b"") -> Sequence[Request]:
    """The same as it is sent; a server that does nothing gives the canned reply to each."""
    random, prepared = Random(len(made)), []
    for one in made:
        trace = {"traceparent": _traceparent(random, sampled=traffic.sampled)} if traffic.varied else {}
        headers, holds = one.headers | trace, (canned,) if canned else one.holds
        if one.kind == REST:
            prepared.append(Request(request_bytes(port, one.path, headers, one.body), holds))
            continue
        metadata = Metadata([(name.encode(), value.encode()) for name, value in headers.items()])
        timeout = random.randint(*TIMEOUT) if traffic.varied else None
        prepared.append(Request(one.body, holds, metadata, timeout))
    return prepared


def _traceparent(random: Random, *, sampled: bool) -> str:
    """As W3C's Trace Context has it."""
    return f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-{sampled:02d}"
