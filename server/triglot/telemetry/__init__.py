"""Metrics, logs and traces: written mostly on the event loop, exported by the protocols."""
