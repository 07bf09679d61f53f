"""Golden vectors of the transport family."""
