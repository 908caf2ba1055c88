"""Benchmarks of the server: `python -m bench.load` over the network, `python -m bench.micro` of the codecs."""
