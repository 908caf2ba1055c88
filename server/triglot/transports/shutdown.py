"""What every transport tells a call that it ends or refuses because the server stops."""

SHUTTING_DOWN = "the server is shutting down"
