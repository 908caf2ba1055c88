"""What happened, in numbers: kept on the event loop, read by whoever prints it."""
