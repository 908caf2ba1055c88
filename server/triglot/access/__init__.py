"""Who may make a call. Only `control` knows all of it, and is imported where access is restricted."""

GRPC, REST = "gRPC", "REST"
"""The kinds of transports."""
