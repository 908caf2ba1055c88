"""Benchmarks of the server: `python -m bench` runs them."""
