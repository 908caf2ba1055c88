"""Imported by processes that a model's code starts, to find that model's modules."""

from triglot.backends.child_modules import ChildFinder

ChildFinder()
