"""Clients of other languages and libraries: a table of cases, and a small program a client that makes its calls.

A program gets the connection as JSON in its argument (`clients.Connection`), reads calls from stdin, a JSON object
a line, and prints what became of each, a JSON object a line, in that order. A call has:

- `method`: its path; `kind`: unary, server_stream or bidi
- `requests`: each is base64 in `head`, followed by `fill` bytes of a pattern (65,521 bytes of x ← x · 1664525 +
  1013904223 mod 2³², of which each gives its highest byte, from x = 1, again and again)
- and maybe `metadata` (pairs; the values of -bin names are base64), `timeout_ms`, `compression` (gzip, deflate);
  `turns`: each request but the first is sent after a response, and only then the half-close;
  `cancel_after`, `leave_after`: after as many responses the call is cancelled, or its iteration is left as the
  language does that (`break`); `tail`: bytes at the end of each response of which only the CRC-32 is reported;
  `repeat_seconds`: the call is made repeatedly, the result is that of the first that failed, or of the last, and
  `codes` counts all of them

A result has `code` and `message`, `trailers`, and `responses`, each with `head` (base64) and `crc32` of the tail.
The code UNSUPPORTED says that the client's interface has no way to make such a call.
"""
