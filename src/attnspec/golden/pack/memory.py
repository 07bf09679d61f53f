"""Golden vectors of the memory family."""
