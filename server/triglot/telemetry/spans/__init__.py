"""OpenTelemetry spans of calls: sampled, encoded and exported by OTLP.

The OpenTelemetry SDK for Python is not used: a call with three spans took it 300 microseconds, more than twice the
call itself.
"""
