"""Marks for mypyc, the compiler of the modules on the path of a call; they do nothing in plain Python.

`trait`: a class of which others inherit besides their base. `mypyc_attr(allow_interpreted_subclasses=True)`: a
class with subclasses in modules that are not compiled. `mypyc_attr(native_class=False)`: an exception, which has a
`__dict__` then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr, trait
else:

    def trait(marked):
        """Return the class."""
        return marked

    def mypyc_attr(*_, **__):
        """Return a function that returns the class."""
        return trait


__all__ = ["mypyc_attr", "trait"]
