"""Which public functions of a tritonclient module its user has called: each notes its name and works as before."""

import functools
import inspect
import sys

CLASSES = ("InferenceServerClient", "InferInput", "InferRequestedOutput", "InferResult")


def _public(one):
    """Name → function as it stands in the class or one of its bases, `staticmethod` and the like around it."""
    names = {name for name in dir(one) if not name.startswith("_")}
    found = {name: inspect.getattr_static(one, name) for name in sorted(names)}
    return {name: value for name, value in found.items() if callable(getattr(one, name))}


def _by_its_user(frame):
    return not frame.f_globals["__name__"].startswith("tritonclient.")


class Calls:
    """What a user has called of the classes of a client module, and of the functions of others."""

    def __init__(self, module, *functions_of):
        self.missing = set()
        for one in [getattr(module, name) for name in CLASSES]:
            for name, value in _public(one).items():
                setattr(one, name, self._noting(f"{one.__name__}.{name}", value))
        for other in functions_of:
            for name, value in inspect.getmembers(other, inspect.isfunction):
                if not name.startswith("_") and value.__module__ == other.__name__:
                    setattr(other, name, self._noting(f"{other.__name__}.{name}", value))

    def _noting(self, name, value):
        self.missing.add(name)
        kept = type(value) if isinstance(value, (staticmethod, classmethod)) else None
        function = value.__func__ if kept else value

        @functools.wraps(function)
        def noting(*arguments, **named):
            if _by_its_user(sys._getframe(1)):
                self.missing.discard(name)
            return function(*arguments, **named)

        return kept(noting) if kept else noting
