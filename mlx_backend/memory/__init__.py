"""MLX twins of the memory formulas."""
