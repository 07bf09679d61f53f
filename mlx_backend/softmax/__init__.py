"""MLX twins of the softmax formulas."""
