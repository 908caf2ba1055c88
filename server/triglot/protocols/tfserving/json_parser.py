"""JSON text → values, as RapidJSON in TensorFlow Serving parses it (tfs 4.3). Pure functions.

Strategy: a NUL is appended to the text as its end, as in RapidJSON, so that there is always a byte to read. Open
containers are kept in a list, so that deep nesting needs no recursion.
"""

from __future__ import annotations

import math
import re
from typing import NoReturn

from triglot.core.errors import InvalidArgument
from triglot.core.fast_json import loads
from triglot.protocols.json.limits import CONTAINER_COST, DEFAULT_LIMITS, MAX_DEPTH, JsonLimits
from triglot.protocols.json.pieces import check_values
from triglot.protocols.tfserving.json_values import Object, Value, debug_text, text_of

# _SPACE and _PLAIN match the empty text as well: for them `match` never returns None.
_SPACE = re.compile(rb"[ \t\n\r]*")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_TOKEN = re.compile(rb"-?(?:NaN|Inf(?:inity)?)")
MAX_RUN = 64 * 1024
"""Most bytes of a string that are matched at once."""
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]{0,%d}' % MAX_RUN)
_ESCAPED = re.compile(rb'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})){1,%d}' % (MAX_RUN // 4))
_HEX = re.compile(rb"[0-9A-Fa-f]{4}")
_WORDS: dict[int, tuple[bytes, Value]] = {
    ord("n"): (b"null", None),
    ord("t"): (b"true", True),
    ord("f"): (b"false", False),
}
_ESCAPES = {
    ord(name): char
    for name, char in zip('"\\/bfnrt', (b'"', b"\\", b"/", b"\b", b"\f", b"\n", b"\r", b"\t"), strict=True)
}
_MAX_INTEGER = len(str(2**64))

BAD_VALUE = "Invalid value."
MISSING_NAME = "Missing a name for object member."
MISSING_COLON = "Missing a colon after a name of object member."
MISSING_COMMA_IN_OBJECT = "Missing a comma or '}' after an object member."
MISSING_COMMA_IN_ARRAY = "Missing a comma or ']' after an array element."
BAD_HEX = "Incorrect hex digit after \\u escape in string."
BAD_SURROGATE = "The surrogate pair in string is invalid."
BAD_ESCAPE = "Invalid escape character in string."
MISSING_QUOTE = "Missing a closing quotation mark in string."
TOO_BIG = "Number too big to be stored in double."
MISSING_FRACTION = "Miss fraction part in number."
TOO_DEEP = f"Lists are nested too deep: {MAX_DEPTH} levels is the limit, objects among them,"
MISSING_EXPONENT = "Miss exponent in number."


def parse_object(text: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> Object:
    """Returns the object at the beginning of a body; the rest is ignored.

    Raises `InvalidArgument` for invalid JSON, with the offset in bytes, and for another type of value;
    `PayloadTooLarge` for text beyond `limits`.
    """
    value = parse(text, limits)
    if not isinstance(value, Object):
        raise InvalidArgument(f"JSON Value: {debug_text(value)} Is not object")
    return value


def parse(text: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> Value:
    """Returns the value at the start of a text. Raises `InvalidArgument`, `PayloadTooLarge` beyond `limits`."""
    if not text:
        raise InvalidArgument("JSON Parse error: The document is empty")
    limits.check_size(len(text))
    if len(text) * CONTAINER_COST > limits.values:
        check_values(text, limits)
    return _Parser(text).document()


def signature_name_of(body: Object) -> str:
    """Returns a request's `signature_name`, "" if it has none. Raises `InvalidArgument` if it is not a string."""
    name = body.first().get(b"signature_name")
    if name is None:
        return ""
    if not isinstance(name, bytes):
        raise InvalidArgument(
            f"JSON Value: {debug_text(body)} not formatted correctly. 'signature_name' key must be a string value."
        )
    return text_of(name)


class _Parser:
    """Parses one text; `_at` is the offset of the next byte."""

    __slots__ = ("_at", "_text")

    def __init__(self, text: bytes) -> None:
        self._text = text + b"\0"
        self._at = 0
        for byte in b"\xef\xbb\xbf":
            self._at += self._text[self._at] == byte

    def document(self) -> Value:
        self._skip_space()
        if self._text[self._at] in b"\0],}:":
            self._fail("The document is empty.", self._at)
        containers: list[list[Value] | Object] = []
        names: list[bytes] = []
        while True:
            value, is_open = self._value(names)
            if is_open:
                if len(containers) == MAX_DEPTH:
                    self._fail(TOO_DEEP, self._at)
                containers.append(value)  # type: ignore[arg-type]  # Only containers are open.
                continue
            while True:
                if not containers:
                    return value
                container = containers[-1]
                if isinstance(container, list):
                    container.append(value)
                    if self._has_next(b"]", MISSING_COMMA_IN_ARRAY):
                        break
                else:
                    container.members.append((names.pop(), value))
                    if self._has_next(b"}", MISSING_COMMA_IN_OBJECT):
                        names.append(self._name())
                        break
                value = containers.pop()

    def _value(self, names: list[bytes]) -> tuple[Value, bool]:
        """Read a value.

        Returns it, and whether it is a container with items, whose first name is put on `names`.
        """
        text, at = self._text, self._at
        byte = text[at]
        if byte == 0x22:
            return self._string(), False
        if byte == 0x5B:
            self._at = at + 1
            self._skip_space()
            return [], not self._take(b"]")
        if byte == 0x7B:
            self._at = at + 1
            self._skip_space()
            if self._take(b"}"):
                return Object([]), False
            names.append(self._name())
            return Object([]), True
        if byte in _WORDS:
            return self._word(*_WORDS[byte]), False
        return self._number(), False

    def _has_next(self, closing: bytes, missing: str) -> bool:
        """Returns whether another item follows; otherwise the container was closed."""
        self._skip_space()
        if self._take(b","):
            self._skip_space()
            return True
        if not self._take(closing):
            self._fail(missing, self._at)
        return False

    def _name(self) -> bytes:
        if self._text[self._at] != 0x22:
            self._fail(MISSING_NAME, self._at)
        name = self._string()
        self._skip_space()
        if not self._take(b":"):
            self._fail(MISSING_COLON, self._at)
        self._skip_space()
        return name

    def _word(self, word: bytes, value: Value) -> Value:
        self._expect(word)
        return value

    def _expect(self, word: bytes) -> None:
        """Consume the bytes of `word`; an error is at the first byte that differs."""
        for byte in word:
            if self._text[self._at] != byte:
                self._fail(BAD_VALUE, self._at)
            self._at += 1

    def _number(self) -> Value:
        start = self._at
        match = _NUMBER.match(self._text, start)
        if match is None:
            return self._bare_token()
        digits, fraction, exponent = match.group(0, 1, 2)
        self._at = match.end()
        value: int | float
        if fraction is None and exponent is None and len(digits) <= _MAX_INTEGER:
            value = int(digits)
            if not -(2**63) <= value < 2**64:
                value = float(value)
        else:
            value = float(digits)
            if math.isinf(value):
                self._fail(TOO_BIG, start)
        byte = self._text[self._at]
        if byte == 0x2E and fraction is None and exponent is None:
            self._fail(MISSING_FRACTION, self._at + 1)
        if byte in b"eE" and exponent is None:
            self._fail(MISSING_EXPONENT, self._at + 1 + (self._text[self._at + 1] in b"+-"))
        return value

    def _bare_token(self) -> float:
        start = self._at
        match = _TOKEN.match(self._text, start)
        if match is None:
            self._take(b"-")
            if self._text[self._at] in b"NI":
                self._expect(b"NaN" if self._text[self._at] == 0x4E else b"Inf")
            self._fail(BAD_VALUE, self._at)
        self._at = match.end()
        if match[0].endswith(b"Inf") and self._text[self._at] == 0x69:
            self._expect(b"inity")
        return float(match[0])

    def _string(self) -> bytes:
        start = self._at + 1
        text = self._text
        end = _PLAIN.match(text, start).end()  # type: ignore[union-attr]  # Matches the empty text, too.
        if text[end] == 0x22:
            self._at = end + 1
            return text[start:end]
        pieces = [text[start:end]]
        while text[end] != 0x22:
            self._at = end
            if text[end] == 0x5C:
                pieces.append(self._escaped())
            elif end - start < MAX_RUN:
                self._fail(BAD_ESCAPE if text[end] else MISSING_QUOTE, end)
            start = self._at
            end = _PLAIN.match(text, start).end()  # type: ignore[union-attr]  # Matches the empty text, too.
            pieces.append(text[start:end])
        self._at = end + 1
        return b"".join(pieces)

    def _escaped(self) -> bytes:
        """Returns the decoded text from an escape on; as a whole run if the run is valid."""
        run = _ESCAPED.match(self._text, self._at)
        if run is not None:
            try:
                decoded: str = loads(b'"%b"' % run[0])
            except ValueError:
                pass  # A lone surrogate, or bytes that are not UTF-8.
            else:
                self._at = run.end()
                return decoded.encode()
        return self._escape()

    def _escape(self) -> bytes:
        """Returns a single decoded escape. All errors are reported at its backslash."""
        start = self._at
        byte = self._text[start + 1]
        if byte in _ESCAPES:
            self._at = start + 2
            return _ESCAPES[byte]
        if byte != 0x75:
            self._fail(BAD_ESCAPE, start)
        code = self._hex(start + 2, start)
        if 0xD800 <= code < 0xDC00:
            if self._text[self._at : self._at + 2] != b"\\u":
                self._fail(BAD_SURROGATE, start)
            low = self._hex(self._at + 2, start)
            if not 0xDC00 <= low < 0xE000:
                self._fail(BAD_SURROGATE, start)
            code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00))
        # A lone low surrogate is accepted.
        return chr(code).encode(errors="surrogatepass")

    def _hex(self, at: int, start: int) -> int:
        match = _HEX.match(self._text, at)
        if match is None:
            self._fail(BAD_HEX, start)
        self._at = at + 4
        return int(match[0], 16)

    def _take(self, char: bytes) -> bool:
        if self._text.startswith(char, self._at):
            self._at += 1
            return True
        return False

    def _skip_space(self) -> None:
        if self._text[self._at] <= 0x20:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # Matches the empty text, too.

    def _fail(self, what: str, at: int) -> NoReturn:
        raise InvalidArgument(f"JSON Parse error: {what} at offset: {at}")
