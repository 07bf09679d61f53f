"""Identities of the memory family."""
