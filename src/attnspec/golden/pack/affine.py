"""Golden vectors of the affine family."""
