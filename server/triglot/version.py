"""The version, written once; the first heading of CHANGELOG.md is the same."""

__version__ = "0.1.0"
