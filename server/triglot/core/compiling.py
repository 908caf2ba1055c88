"""The mark for mypyc, the compiler of the modules on the path of a call; it does nothing in plain Python.

`mypyc_attr(allow_interpreted_subclasses=True)`: a class with subclasses in modules that are not compiled.
`mypyc_attr(native_class=False)`: an exception, which has a `__dict__` then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(*_, **__):
        """Return a function that returns the class."""
        return lambda marked: marked


__all__ = ["mypyc_attr"]
