"""MLX twins of the signed formulas."""
