#!/bin/bash
# orjson 3.13.0: `loads` reads an integer beyond 64 bits as the nearest float, without an error.
#
# Python's `json` reads it exactly, and orjson's own `dumps` raises TypeError for it, so one expects either of the two.
# An id such as 18446744073709551617 comes back as another number, and the reader cannot see that it was an integer. Of
# a repeated key `loads` keeps the last value, without an error, too.
#
# Output seen:
#   json    18446744073709551617 -9223372036854775809
#   orjson  1.8446744073709552e+19 -9.223372036854776e+18
#   orjson.dumps: Integer exceeds 64-bit range
# Exits 0 while that is so, and 1 when it differs.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check orjson==3.13.0
"$work/venv/bin/python" - <<'PY'
import json
import sys

import orjson

TEXT = "[18446744073709551617, -9223372036854775809]"
exact, read = json.loads(TEXT), orjson.loads(TEXT)
print("json   ", *exact)
print("orjson ", *read)
refused = ""
try:
    orjson.dumps(exact)
except TypeError as error:
    refused = str(error)
print(f"orjson.dumps: {refused}")
sys.exit([type(value) for value in read] != [float, float] or not refused)
PY
