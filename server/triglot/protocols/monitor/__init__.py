"""What the server says of itself: metrics and a page for people."""
