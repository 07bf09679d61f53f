"""Identities of the transport family."""
