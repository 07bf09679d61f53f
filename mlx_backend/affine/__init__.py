"""MLX twins of the affine formulas."""
