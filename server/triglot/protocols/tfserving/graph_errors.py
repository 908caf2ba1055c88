"""Error texts of TensorFlow's graphs."""

from __future__ import annotations

import re

_PLACE = re.compile(r"\s*\n\t ?\[\[.*", re.DOTALL)
_SEVERAL = re.compile(
    r"\d+ root error\(s\) found\.\n *\(0\) [A-Za-z_ ]+: (.*?)(?=\n *\(1\) |\n\d+ successful|\Z)", re.DOTALL
)


def without_node(text: str) -> str:
    """Returns a graph's error text without the operation's place, and of several errors the first; other texts
    unchanged.

    TensorFlow appends "\\n\\t [[{{node NAME}}]]", and a line for each function around it.
    """
    several = _SEVERAL.match(text)
    return _PLACE.sub("", several[1] if several else text)
