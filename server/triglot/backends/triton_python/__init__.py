"""Triton's Python models: a `model.py` with a `TritonPythonModel`, and the utility module for it (spec 5)."""
