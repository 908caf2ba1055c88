"""The message of calls that are ended or rejected because the server stops."""

SHUTTING_DOWN = "the server is shutting down"
