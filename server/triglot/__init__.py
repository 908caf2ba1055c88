"""Triglot."""
