"""What the server costs: `python -m bench.load` over the wire, `python -m bench.micro` in the codecs."""
