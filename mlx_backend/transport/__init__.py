"""MLX twins of the transport formulas."""
