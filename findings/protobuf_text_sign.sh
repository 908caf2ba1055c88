#!/bin/bash
# protobuf 6.33.5 for Python: text_format does not read a minus that stands apart from its number.
#
# In the text format's specification (protobuf.dev, "Text Format Language Specification") `-` is a token of its own, and
# blanks and comments may follow it; C++'s parser reads `dims: [ - 1 ]`. Files that a C++ program reads may so fail here.
#
# Output seen:
#   negative_int_value: -1    -1
#   negative_int_value: - 1   Couldn't parse integer: -
# Exits 0 while that is so, and 1 when both are read.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check protobuf==6.33.5
"$work/venv/bin/python" - <<'PY'
import sys

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import UninterpretedOption

seen = []
for text in ("negative_int_value: -1", "negative_int_value: - 1"):
    try:
        seen.append(text_format.Parse(text, UninterpretedOption()).negative_int_value)
    except text_format.ParseError as error:
        seen.append(str(error).split(": ")[-2] + ": " + str(error).split(": ")[-1])
    print(f"{text:25} {seen[-1]}")
sys.exit(seen[0] != -1 or "parse integer" not in str(seen[1]))
PY
