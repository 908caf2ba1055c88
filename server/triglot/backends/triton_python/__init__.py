"""Triton's Python models: a `model.py` with a `TritonPythonModel`, and the utilities that it imports (spec 5)."""
