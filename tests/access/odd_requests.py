"""Requests that are odd in their path, their header fields or their framing, none of which has a right credential.

Where a request has `PLACE` among its fields, a credential can be put there: then it may be answered.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence

from tests.transports.h2_peers import Client, data, frame, message
from triglot.pb.kserve import inference_pb2 as pb
from triglot.transports.http2.core import frames

RIGHT = "right-token"
BEARER = ("authorization", f"Bearer {RIGHT}")
PLACE = ("x-place", "credential")
Fields = Sequence[tuple[str, str] | tuple[bytes, bytes]]
INFER, UNLOAD, LIVE = "/v2/models/half/infer", "/v2/repository/models/half/unload", "/v2/health/live"
SERVICE = "/inference.GRPCInferenceService/"
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [8642.0]}]}).encode()
OTHER = INFER.replace("half", "other")


def grpc_body(model: str = "half") -> bytes:
    """What ModelInfer is sent."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(8642.0)
    return message(request.SerializeToString())


GRPC_UNLOAD = message(pb.RepositoryModelUnloadRequest(model_name="half").SerializeToString())


def odd_paths(path: str, allowed: str) -> dict[str, str]:
    """`path` in other forms, and with what may be called by everybody before it."""
    begin, _, end = path.rpartition("/")
    return {
        "as it is": path,
        "no slash before": path[1:],
        "two slashes before": f"/{path}",
        "two slashes in it": f"{begin}//{end}",
        "a slash after": f"{path}/",
        "an escaped slash": f"{begin}%2F{end}",
        "an escaped slash in lower case": f"{begin}%2f{end}",
        "only escaped slashes": path.replace("/", "%2F"),
        "escaped slashes but the first": "/" + path[1:].replace("/", "%2F"),
        "a slash escaped twice": f"{begin}%252F{end}",
        "an escaped letter": f"{begin}/%{ord(end[0]):02x}{end[1:]}",
        "a letter escaped twice": f"{begin}/%25{ord(end[0]):02x}{end[1:]}",
        "a dot": f"{begin}/./{end}",
        "two dots": f"{begin}/x/../{end}",
        "two dots after another path": f"{allowed}/../..{path}",
        "escaped dots": f"{begin}/x/%2e%2e/{end}",
        "escaped dots after another path": f"{allowed}/%2e%2e/%2E%2E{path}",
        "dots and a back slash": f"{allowed}\\..\\..{path}",
        "a back slash": f"{begin}\\{end}",
        "an escaped back slash": f"{begin}%5C{end}",
        "absolute": f"http://localhost{path}",
        "absolute, of another host": f"https://other.example:444{path}",
        "absolute, with a user": f"http://all:{RIGHT}@localhost{path}",
        "a host without a scheme": f"//localhost{path}",
        "parameters": f"{path};a=b",
        "parameters in it": f"{begin};a=b/{end}",
        "a query": f"{path}?a=b",
        "the token in the query": f"{path}?access_token={RIGHT}&x-api-key={RIGHT}&authorization=Bearer%20{RIGHT}",
        "a query of another path": f"{allowed}?{path}",
        "an escaped question mark": f"{path}%3F",
        "an escaped question mark and dots": f"{allowed}%3f/../../..{path}",
        "a fragment": f"{path}#{allowed}",
        "a fragment of another path": f"{allowed}#{path}",
        "an escaped fragment": f"{path}%23{allowed}",
        "upper case": path.upper(),
        "the end in upper case": f"{begin}/{end.upper()}",
        "NUL": f"{path}\0",
        "an escaped NUL": f"{path}%00",
        "another path after NUL": f"{path}%00{allowed}",
        "CR": f"{begin}/\r{end}",
        "LF": f"{begin}/\n{end}",
        "an escaped field": f"{path}%20HTTP/1.1%0d%0aAuthorization:%20Bearer%20{RIGHT}",
        "a space before": f" {path}",
        "a space after": f"{path} ",
        "an escaped space": f"{path}%20",
        "a tab": f"{path}\t",
        "no ASCII": f"{path}\u00e9",
        "no UTF-8": f"{begin}%c0%af{end}",
        "a wide slash": f"{begin}\uff0f{end}",
        "half an escape": f"{path}%2",
        "a star": "*",
        "nothing but a slash": "/",
        "very long": f"{path}?{'a' * 20_000}",
    }


def basic(text: str) -> str:
    """As the scheme has it."""
    return "Basic " + base64.b64encode(text.encode()).decode()


BARE = base64.b64encode(RIGHT.encode()).decode()
FIELDS: dict[str, list[tuple[str, str]]] = {
    "two of the same": [BEARER, BEARER],
    "right, then wrong": [BEARER, ("authorization", "Bearer wrong")],
    "wrong, then right": [("authorization", "Bearer wrong"), BEARER],
    "two names": [BEARER, ("x-api-key", RIGHT)],
    "two keys": [("x-api-key", RIGHT), ("x-api-key", RIGHT)],
    "an empty one before": [("authorization", ""), ("x-api-key", RIGHT)],
    "an empty one after": [("x-api-key", RIGHT), ("authorization", "")],
    "an empty one": [("authorization", "")],
    "an empty key": [("x-api-key", "")],
    "joined by a comma": [("authorization", f"Bearer {RIGHT}, Bearer {RIGHT}")],
    "joined by a comma, wrong": [("authorization", f"Bearer wrong,Bearer {RIGHT}")],
    "keys joined by a comma": [("x-api-key", f"{RIGHT},{RIGHT}")],
    "no token": [("authorization", "Bearer")],
    "no scheme": [("authorization", RIGHT)],
    "another scheme": [("authorization", f"Token {RIGHT}")],
    "two schemes": [("authorization", f"Bearer Bearer {RIGHT}")],
    "a tab for a space": [("authorization", f"Bearer\t{RIGHT}")],
    "no space": [("authorization", f"Bearer{RIGHT}")],
    "a colon": [("authorization", f"Bearer: {RIGHT}")],
    "quotes": [("authorization", f'Bearer "{RIGHT}"')],
    "a parameter": [("authorization", f"Bearer {RIGHT};a=b")],
    "more after it": [("authorization", f"Bearer {RIGHT} more")],
    "named": [("authorization", f"Bearer token={RIGHT}")],
    "upper case": [("authorization", f"Bearer {RIGHT.upper()}")],
    "cut": [("authorization", f"Bearer {RIGHT[:-1]}")],
    "one letter more": [("authorization", f"Bearer {RIGHT}x")],
    "its hash": [("x-api-key", hashlib.sha256(RIGHT.encode()).hexdigest())],
    "escaped": [("x-api-key", RIGHT.replace("-", "%2D"))],
    "in base64": [("authorization", f"Bearer {BARE}")],
    "the name of the client": [("authorization", "Bearer all")],
    "a pattern": [("x-api-key", "*")],
    "very long": [("x-api-key", "a" * 20_000)],
    "long, and right at its end": [("authorization", f"Bearer {'a' * 7000} {RIGHT}")],
    "no ASCII": [("x-api-key", "\u00e9\uff0d")],
    "a JWT without a signature": [("authorization", "Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbGwifQ.")],
    "Basic of another name": [("authorization", basic(f"other:{RIGHT}"))],
    "Basic of no name": [("authorization", basic(f":{RIGHT}"))],
    "Basic without a colon": [("authorization", basic(RIGHT))],
    "Basic with the name alone": [("authorization", basic("all:"))],
    "Basic not in base64": [("authorization", f"Basic all:{RIGHT}")],
    "for a proxy": [("proxy-authorization", BEARER[1])],
    "a cookie": [("cookie", f"authorization=Bearer {RIGHT}; x-api-key={RIGHT}; token={RIGHT}")],
    "another name": [("x-authorization", BEARER[1]), ("x-auth-token", RIGHT), ("api-key", RIGHT)],
    "underscores": [("x_api_key", RIGHT), ("http_authorization", BEARER[1])],
    "binary": [("authorization-bin", BARE), ("x-api-key-bin", BARE)],
    "of a restricted group": [("triton-grpc-protocol-authorization", BEARER[1])],
    "a proxy's word": [
        *(("x-forwarded-user", "all"), ("x-remote-user", "all"), ("x-forwarded-for", "127.0.0.1")),
        *(("forwarded", "for=127.0.0.1;proto=https"), ("x-real-ip", "127.0.0.1"), ("x-forwarded-proto", "https")),
    ],
    "a certificate by a proxy": [
        *(("x-forwarded-client-cert", 'Subject="CN=all"'), ("x-ssl-client-s-dn", "CN=all")),
        ("ssl-client-verify", "SUCCESS"),
    ],
}
"""In place of the one field that says who it is."""
REWRITES: dict[str, list[tuple[str, str]]] = {
    "the original URL": [("x-original-url", INFER), ("x-rewrite-url", INFER), ("x-forwarded-uri", INFER)],
    "the URL of a health check": [("x-original-url", LIVE), ("x-rewrite-url", LIVE), ("x-forwarded-path", LIVE)],
    "another verb": [
        *(("x-http-method-override", "GET"), ("x-http-method", "GET"), ("x-method-override", "GET")),
        ("x-original-method", "GET"),
    ],
}
VERBS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PRI", "post", "INFER")
PREFLIGHT = [("origin", "http://localhost"), ("access-control-request-method", "POST")]
TYPES = (
    *("application/grpc", "application/grpc+json", "application/grpc+proto", "application/grpc-web"),
    *("application/grpc-web+proto", "application/grpc-web-text", "application/GRPC", "application/grpc;a=b"),
    *("application/json", "application/octet-stream", "text/plain", ""),
)


# --- HTTP/1.1 ---


def http1(
    target: str,
    *lines: str,
    verb: str = "POST",
    version: str = " HTTP/1.1",
    host: str = "Host: localhost\r\n",
    body: bytes = BODY,
) -> bytes:
    """A request; `lines`: of its head."""
    head = "".join(f"{line}\r\n" for line in (*lines, f"Content-Length: {len(body)}"))
    return f"{verb} {target}{version}\r\n{host}{head}\r\n".encode() + body


def line_of(field: tuple[str, str]) -> str:
    """A field of a head."""
    return f"{field[0].title()}: {field[1]}"


MARK = line_of(PLACE)
TOKEN = line_of(BEARER)
HIDDEN = http1(INFER, TOKEN)
"""A rightful request, where it is none but part of another one."""
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
CHUNKED = CHUNK + b"0\r\n\r\n"
H2_SETTINGS = "HTTP2-Settings: AAMAAABkAAQAAP__"


def framed(*lines: str, sent: bytes, target: str = INFER, version: str = " HTTP/1.1") -> bytes:
    """A request whose length is said by `lines`, and what is sent after its head."""
    head = "".join(f"{line}\r\n" for line in lines)
    return f"POST {target}{version}\r\nHost: localhost\r\n{head}\r\n".encode() + sent


def http1_requests() -> dict[str, bytes]:
    """All, by their names."""
    found = {f"path: {name}": http1(path, MARK) for name, path in odd_paths(INFER, LIVE).items()}
    found |= {f"unload: {name}": http1(path, body=b"{}") for name, path in odd_paths(UNLOAD, LIVE).items()}
    found |= {f"fields: {name}": http1(INFER, *map(line_of, fields)) for name, fields in FIELDS.items()}
    found |= {
        f"rewrite: {name}": http1(INFER, *map(line_of, [*fields, PLACE])) for name, fields in REWRITES.items()
    }
    found |= {
        f"rewrite of a health check: {name}": http1(LIVE, *map(line_of, fields), verb="GET")
        for name, fields in REWRITES.items()
    }
    found |= {f"verb: {verb}": http1(INFER, MARK, verb=verb) for verb in VERBS}
    found |= {f"type: {kind}": http1(INFER, MARK, f"Content-Type: {kind}") for kind in TYPES}
    found |= {
        f"gRPC's path, {kind}": http1(f"{SERVICE}ModelInfer", f"Content-Type: {kind}", MARK, body=grpc_body())
        for kind in TYPES
    }
    return found | _HEADS | _FRAMINGS | _UPGRADES


_HEADS = {
    "a preflight": http1(INFER, *map(line_of, PREFLIGHT), verb="OPTIONS"),
    "HTTP/1.0": http1(INFER, MARK, version=" HTTP/1.0"),
    "HTTP/1.0, without Host": http1(INFER, MARK, version=" HTTP/1.0", host=""),
    "HTTP/0.9": http1(INFER, verb="GET", version="", host=""),
    "HTTP/0.9 with fields": http1(INFER, MARK, version=""),
    "HTTP/1.2": http1(INFER, MARK, version=" HTTP/1.2"),
    "HTTP/2.0": http1(INFER, MARK, version=" HTTP/2.0"),
    "http in lower case": http1(INFER, MARK, version=" http/1.1"),
    "no Host": http1(INFER, MARK, host=""),
    "two Hosts": http1(INFER, MARK, host="Host: localhost\r\nHost: localhost\r\n"),
    "two different Hosts": http1(INFER, MARK, host="Host: localhost\r\nHost: other.example\r\n"),
    "an empty Host": http1(INFER, MARK, host="Host:\r\n"),
    "a Host with a user": http1(INFER, host=f"Host: all:{RIGHT}@localhost\r\n"),
    "a folded field": http1(INFER, f"X-A: b\r\n {TOKEN}"),
    "a folded field, with a tab": http1(INFER, f"X-A: b\r\n\t{TOKEN}"),
    "a field before the first": http1(INFER, host=f" {TOKEN}\r\nHost: localhost\r\n"),
    "a space before the colon": http1(INFER, TOKEN.replace(":", " :")),
    "a tab before the colon": http1(INFER, TOKEN.replace(":", "\t:")),
    "NUL in a name": http1(INFER, TOKEN.replace(":", "\0:")),
    "NUL in a value": http1(INFER, f"{TOKEN}\0"),
    "NUL before a field": http1(INFER, f"X-A: b\0{TOKEN}"),
    "CR in a value": http1(INFER, f"X-A: b\r{TOKEN}"),
    "no colon": http1(INFER, TOKEN.replace(":", "")),
    "names in two cases": http1(INFER, TOKEN, TOKEN.lower()),
    "names in upper and lower case": http1(INFER, TOKEN.upper(), f"authorization: Bearer {RIGHT}"),
    "a field in place of the head's end": framed(sent=TOKEN.encode()),
    "Expect": http1(INFER, "Expect: 100-continue"),
    "Connection names the field": http1(INFER, "Connection: authorization"),
}
_SIZED = f"Content-Length: {len(CHUNKED)}"
_EMPTY = b"0\r\n\r\n"
_FRAMINGS = {
    "hidden in a body that is refused": framed(f"Content-Length: {len(HIDDEN)}", sent=HIDDEN),
    "hidden in a chunked body": framed(
        "Transfer-Encoding: chunked", sent=b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
    ),
    "hidden in a body of GET": http1(LIVE, verb="GET", body=HIDDEN),
    "hidden in a body of what there is not": http1("/none", body=HIDDEN),
    "hidden in a body of OPTIONS": http1(INFER, *map(line_of, PREFLIGHT), verb="OPTIONS", body=HIDDEN),
    "hidden in a body that waits": http1(LIVE, "Expect: 100-continue", verb="GET", body=HIDDEN),
    "length and chunks": framed(_SIZED, "Transfer-Encoding: chunked", sent=_EMPTY + HIDDEN),
    "chunks and length": framed("Transfer-Encoding: chunked", "Content-Length: 5", sent=_EMPTY + HIDDEN),
    "two lengths": framed("Content-Length: 0", f"Content-Length: {len(HIDDEN)}", sent=HIDDEN),
    "two lengths, the other way": framed(f"Content-Length: {len(HIDDEN)}", "Content-Length: 0", sent=HIDDEN),
    "a list of lengths": framed(f"Content-Length: 0, {len(HIDDEN)}", sent=HIDDEN),
    "a length with a sign": framed("Content-Length: +0", sent=HIDDEN),
    "a negative length": framed("Content-Length: -1", sent=HIDDEN),
    "a length in hexadecimal": framed(f"Content-Length: {len(HIDDEN):#x}", sent=HIDDEN),
    "an empty length": framed("Content-Length:", sent=HIDDEN),
    "a huge length": framed(f"Content-Length: {2**64}", sent=HIDDEN),
    "a folded length": framed(f"Content-Length:\r\n {len(HIDDEN)}", sent=HIDDEN),
    "a coding that is not chunked": framed("Transfer-Encoding: xchunked", sent=_EMPTY + HIDDEN),
    "chunked, then another": framed("Transfer-Encoding: chunked, identity", sent=_EMPTY + HIDDEN),
    "chunked twice": framed("Transfer-Encoding: chunked, chunked", sent=_EMPTY + HIDDEN),
    "two codings": framed("Transfer-Encoding: chunked", "Transfer-Encoding: cow", sent=_EMPTY + HIDDEN),
    "a coding with a quote": framed('Transfer-Encoding: "chunked"', sent=_EMPTY + HIDDEN),
    "a space before the coding's colon": framed("Transfer-Encoding : chunked", sent=_EMPTY + HIDDEN),
    "a folded coding": framed("Transfer-Encoding:\r\n chunked", sent=_EMPTY + HIDDEN),
    "a form feed before the coding": framed("Transfer-Encoding: \fchunked", sent=_EMPTY + HIDDEN),
    "chunks of HTTP/1.0": framed("Transfer-Encoding: chunked", sent=_EMPTY + HIDDEN, version=" HTTP/1.0"),
    "a chunk's size with a sign": framed("Transfer-Encoding: chunked", sent=b"+0\r\n\r\n" + HIDDEN),
    "a chunk's size with 0x": framed("Transfer-Encoding: chunked", sent=b"0x0\r\n\r\n" + HIDDEN),
    "a chunk's size with an underscore": framed("Transfer-Encoding: chunked", sent=b"0_0\r\n\r\n" + HIDDEN),
    "a chunk of 2**64": framed("Transfer-Encoding: chunked", sent=b"10000000000000000\r\n\r\n" + HIDDEN),
    "chunks that end with LF": framed("Transfer-Encoding: chunked", sent=b"0\n\n" + HIDDEN),
    "a chunk that is longer": framed("Transfer-Encoding: chunked", sent=b"1\r\nab\r\n0\r\n\r\n" + HIDDEN),
    "LF in a chunk's extension": framed("Transfer-Encoding: chunked", sent=b"2;\n{}\r\n0\r\n\r\n" + HIDDEN),
    "a chunk's extension": framed(
        "Transfer-Encoding: chunked", MARK, sent=CHUNKED.replace(b"\r\n", f";{TOKEN}\r\n".encode(), 1)
    ),
    "in trailers": framed(
        "Transfer-Encoding: chunked", "Trailer: authorization", sent=CHUNK + f"0\r\n{TOKEN}\r\n\r\n".encode()
    ),
    "in trailers of what has no body": framed(
        "Transfer-Encoding: chunked", sent=f"0\r\n{TOKEN}\r\nX-Api-Key: {RIGHT}\r\n\r\n".encode()
    ),
    "after one with a token": http1(OTHER, TOKEN) + http1(INFER),
    "before one with a token": http1(INFER) + http1(OTHER, TOKEN),
    "between two with a token": http1(OTHER, TOKEN) + http1(INFER) + http1(OTHER, TOKEN),
    "after one with chunks and a token": framed("Transfer-Encoding: chunked", TOKEN, sent=CHUNKED, target=OTHER)
    + http1(INFER),
    "after a health check": http1(LIVE, verb="GET", body=b"") + http1(INFER),
    "after blank lines": b"\r\n\r\n" + http1(INFER, MARK),
    "rubbish, then a request": b"rubbish\r\n\r\n" + HIDDEN,
}
_UPGRADE = ("Connection: Upgrade, HTTP2-Settings", H2_SETTINGS)
_UPGRADES = {
    "h2c": http1(INFER, "Upgrade: h2c", *_UPGRADE, MARK),
    "h2c, then HTTP/2": http1(LIVE, "Upgrade: h2c", *_UPGRADE, verb="GET", body=b"") + frames.PREFACE + HIDDEN,
    "a web socket": http1(
        INFER, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: YQ=="
    ),
    "HTTP/2's first bytes": frames.PREFACE + HIDDEN,
    "CONNECT, then a request": http1("localhost:80", verb="CONNECT", body=b"") + http1(INFER),
    "a proxy's line": b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n" + HIDDEN,
    "TLS's first bytes": b"\x16\x03\x01\x00\x05" + HIDDEN,
}


def with_credential(request: bytes) -> bytes | None:
    """A rightful request in the same form, if there can be one."""
    mark = f"{MARK}\r\n".encode()
    return request.replace(mark, f"{TOKEN}\r\n".encode()) if mark in request else None


# --- HTTP/2 ---

Sent = Callable[[Client, Fields], bytes]
"""Makes the frames of a request on stream 1, with these fields added."""
SPLIT_BYTES = 8000


def head(
    client: Client, fields: Fields, *, end: bool = False, at: int = SPLIT_BYTES, flags: int = 0, stream: int = 1
) -> bytes:
    """HEADERS, and CONTINUATION after every `at` bytes."""
    block = client.block(fields)
    parts = [block[begin : begin + at] for begin in range(0, len(block), at)] or [b""]
    last = len(parts) - 1
    flags |= frames.END_STREAM if end else 0
    sent = b""
    for number, part in enumerate(parts):
        kind = frames.CONTINUATION if number else frames.HEADERS
        own = 0 if number else flags
        sent += frame(kind, own | (frames.END_HEADERS if number == last else 0), stream, part)
    return sent


def http2(fields: Fields, body: bytes) -> Sent:
    """An ordinary request with these fields."""
    return lambda client, more: head(client, [*fields, *more]) + data(1, body)


def pseudo(path: str, verb: str = "POST") -> list[tuple[str, str]]:
    """What a request begins with."""
    return [(":method", verb), (":scheme", "http"), (":path", path), (":authority", "localhost")]


JSON = ("content-type", "application/json")
GRPC = [("content-type", "application/grpc"), ("te", "trailers")]


def rest_requests() -> dict[str, tuple[Sent, bool]]:
    """Over HTTP/2, for REST. Also whether a credential may be added."""
    found = {
        f"path: {name}": (http2([*pseudo(path), JSON], BODY), True)
        for name, path in odd_paths(INFER, LIVE).items()
    }
    found |= {
        f"unload: {name}": (http2([*pseudo(path), JSON], b"{}"), False)
        for name, path in odd_paths(UNLOAD, LIVE).items()
    }
    found |= {f"type: {kind}": (http2([*pseudo(INFER), ("content-type", kind)], BODY), True) for kind in TYPES}
    return found | _any_requests([*pseudo(INFER), JSON], BODY, LIVE)


def grpc_requests() -> dict[str, tuple[Sent, bool]]:
    """Over HTTP/2, for gRPC. Also whether a credential may be added."""
    infer, unload, live = (SERVICE + name for name in ("ModelInfer", "RepositoryModelUnload", "ServerLive"))
    found = {
        f"path: {name}": (http2([*pseudo(path), *GRPC], grpc_body()), True)
        for name, path in odd_paths(infer, live).items()
    }
    found |= {
        f"unload: {name}": (http2([*pseudo(path), *GRPC], GRPC_UNLOAD), False)
        for name, path in odd_paths(unload, live).items()
    }
    found |= {
        f"type: {kind}": (http2([*pseudo(infer), ("content-type", kind), GRPC[1]], grpc_body()), True)
        for kind in TYPES
    }
    found |= {
        f"REST's path: {path}": (http2([*pseudo(path), *GRPC], BODY), True)
        for path in (INFER, f"{INFER}/", "/v1/models/half:predict", "/grps/v1/infer/predict")
    }
    found["streams"] = http2([*pseudo(f"{SERVICE}ModelStreamInfer"), *GRPC], grpc_body()), True
    right = [*pseudo(infer), *GRPC]
    found["an unknown coding"] = http2([*right, ("grpc-encoding", "none-such")], grpc_body()), False
    found["compressed, and it is not"] = http2(right, b"\1" + grpc_body()[1:]), False
    found["a deadline that has passed"] = http2([*right, ("grpc-timeout", "0n")], grpc_body()), False
    return found | _any_requests(right, grpc_body(), live)


def _any_requests(right: list[tuple[str, str]], body: bytes, allowed: str) -> dict[str, tuple[Sent, bool]]:
    """By an ordinary request that lacks only its credential."""
    first, regular = right[:4], right[4:]
    verb, scheme, path, authority = first
    upper: Fields = [(b"Authorization", BEARER[1].encode())]
    found: dict[str, tuple[Sent, bool]] = {
        **{f"fields: {name}": (http2([*right, *fields], body), False) for name, fields in FIELDS.items()},
        **{f"rewrite: {name}": (http2([*right, *fields], body), True) for name, fields in REWRITES.items()},
        **{f"verb: {verb}": (http2([(":method", verb), *right[1:]], body), True) for verb in VERBS},
    }
    wrong: dict[str, Fields] = {
        "a name in upper case": [*right, *upper],
        "a name in upper case after the right one": [*right, *upper, BEARER],
        "a name with a colon": [*right, ("authorization:", BEARER[1])],
        "a name with a space": [*right, ("authorization ", BEARER[1])],
        "a name with NUL": [*right, ("authorization\0", BEARER[1])],
        "a name with a line's end": [*right, ("x\r\nauthorization", BEARER[1])],
        "an empty name": [*right, ("", BEARER[1])],
        "a value with NUL": [*right, ("authorization", f"{BEARER[1]}\0")],
        "a value with a line's end": [*right, ("x-a", f"b\r\nauthorization: {BEARER[1]}")],
        "a pseudo-header": [*first, (":authorization", BEARER[1]), *regular],
        "the status": [*first, (":status", "200"), *regular],
        "the path twice": [verb, scheme, (":path", allowed), path, authority, *regular],
        "the path twice, the other way": [verb, scheme, path, (":path", allowed), authority, *regular],
        "the path after the rest": [verb, scheme, authority, *regular, path],
        "no path": [verb, scheme, authority, *regular],
        "an empty path": [verb, scheme, (":path", ""), authority, *regular],
        "no verb": [*first[1:], *regular],
        "an empty verb": [(":method", ""), *first[1:], *regular],
        "two verbs": [(":method", "GET"), *first, *regular],
        "no scheme": [verb, path, authority, *regular],
        "a user": [verb, scheme, path, (":authority", f"all:{RIGHT}@localhost"), *regular],
        "CONNECT": [(":method", "CONNECT"), authority, *regular],
        "CONNECT with a protocol": [(":method", "CONNECT"), (":protocol", "websocket"), *first[1:], *regular],
        "a connection's field": [*right, ("connection", "authorization")],
        "an upgrade": [*right, ("connection", "upgrade"), ("upgrade", "h2c")],
        "chunks": [*right, ("transfer-encoding", "chunked")],
        "another te": [*right, ("te", "gzip")],
        "two lengths": [*right, ("content-length", "0"), ("content-length", str(len(body)))],
        "a length that is too small": [*right, ("content-length", "1")],
        "a length that is none": [*right, ("content-length", "+1")],
    }
    found |= {name: (http2(fields, body), False) for name, fields in wrong.items()}
    odd: dict[str, Fields] = {
        "no authority": [verb, scheme, path, *regular],
        "an empty authority": [verb, scheme, path, (":authority", ""), *regular],
        "another host": [*right, ("host", "other.example")],
        "another scheme": [verb, (":scheme", "https"), path, authority, *regular],
        "the order": [authority, path, scheme, verb, *regular],
        "a cookie in crumbs": [*right, ("cookie", "a=b"), ("cookie", f"authorization={RIGHT}")],
    }
    found |= {name: (http2(fields, body), True) for name, fields in odd.items()}
    found |= {
        "in pieces": (lambda client, more: head(client, [*right, *more], at=40) + data(1, body), True),
        "each byte by itself": (lambda client, more: head(client, [*right, *more], at=1) + data(1, body), True),
        "in trailers": (
            lambda client, more: head(client, right) + data(1, body, end=False) + head(client, [BEARER], end=True),
            False,
        ),
        "in trailers before the body": (
            lambda client, more: head(client, right) + head(client, [BEARER], end=True) + data(1, body),
            False,
        ),
        "another request in between": (
            lambda client, more: (
                frame(frames.HEADERS, 0, 1, client.block(right))
                + head(client, [*right, BEARER], stream=3)
                + data(1, body)
            ),
            False,
        ),
        "a second head": (
            lambda client, more: head(client, right) + head(client, [*right, BEARER]) + data(1, body),
            False,
        ),
        "a promise": (
            lambda client, more: (
                frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, (2).to_bytes(4) + client.block([*right, BEARER]))
                + head(client, right)
                + data(1, body)
            ),
            False,
        ),
        "on a stream that has ended": (
            lambda client, more: head(client, right, end=True) + head(client, [BEARER], end=True) + data(1, body),
            False,
        ),
        "HTTP/1.1 in the body": (lambda client, more: head(client, right) + data(1, HIDDEN), False),
        "HTTP/1.1 after the greeting": (lambda client, more: HIDDEN, False),
    }
    return found
