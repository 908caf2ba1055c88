"""OpenTelemetry spans of calls: sampling, encoding, and export by OTLP.

The OpenTelemetry SDK for Python is not used: docs/observability.md, "What spans cost", says why.
"""
