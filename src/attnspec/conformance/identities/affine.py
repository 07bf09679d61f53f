"""Identities of the affine family."""
