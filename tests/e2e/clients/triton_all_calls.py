"""Which public functions of a tritonclient module its user has called with success: each notes its name then."""

import functools
import inspect
import sys

NOT_CALLED = {
    "InferenceServerClientBase": "what the client derives from: its functions are the client's",
    "InferenceServerClientPlugin": "what a user's own class derives from",
    "Request": "what a plug-in is given, with a dict of headers",
    "raise_error": "only raises",
    "raise_error_grpc": "only raises",
}
MADE = ("KeepAliveOptions",)
"""Classes whose use is to be made."""
REFUSED = ("InferenceServerClient.register_cuda_shared_memory",)
"""Functions that a server without a GPU refuses."""


def _public(kind):
    """Name → function as it stands in the class or one of its bases, `staticmethod` and the like around it."""
    names = {name for name in dir(kind) if not name.startswith("_")} - set(dir(Exception))
    found = {name: inspect.getattr_static(kind, name) for name in sorted(names)}
    return {name: value for name, value in found.items() if callable(getattr(kind, name))}


def _is_own(value):
    return value.__module__.startswith("tritonclient.")


def _by_its_user(frame):
    return not frame.f_globals["__name__"].startswith("tritonclient.")


class Calls:
    """What a user has called of a client module's classes, of those in `more`, and of other modules' functions.

    `but`: names of classes that the module has and does nothing with.
    """

    def __init__(self, module, *functions_of, more=(), but=()):
        self.missing = set()
        classes = {
            member
            for name, member in inspect.getmembers(module, inspect.isclass)
            if name[0] != "_" and _is_own(member)
        }
        for kind in {*classes, *more}:
            if kind.__name__ in NOT_CALLED or kind.__name__ in but:
                continue
            if kind.__name__ in MADE:
                kind.__init__ = self._noting(kind.__name__, kind.__init__)
            for name, value in _public(kind).items():
                setattr(kind, name, self._noting(f"{kind.__name__}.{name}", value))
        for other in functions_of:
            for name, value in inspect.getmembers(other, inspect.isfunction):
                if not name.startswith("_") and name not in NOT_CALLED and value.__module__ == other.__name__:
                    setattr(other, name, self._noting(f"{other.__name__}.{name}", value))

    def _noting(self, name, value):
        self.missing.add(name)
        kept = type(value) if isinstance(value, (staticmethod, classmethod)) else None
        function = value.__func__ if kept else value

        @functools.wraps(function)
        def noting(*arguments, **named):
            called = _by_its_user(sys._getframe(1))
            if called and name in REFUSED:
                self.missing.discard(name)
            answer = function(*arguments, **named)
            if called and not inspect.iscoroutine(answer):
                self.missing.discard(name)
            return self._awaiting(name, answer) if called and inspect.iscoroutine(answer) else answer

        return kept(noting) if kept else noting

    async def _awaiting(self, name, coroutine):
        answer = await coroutine
        self.missing.discard(name)
        return answer
