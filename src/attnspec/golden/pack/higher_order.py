"""Golden vectors of the higher_order family."""
