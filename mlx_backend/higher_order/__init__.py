"""MLX twins of the higher-order formulas."""
