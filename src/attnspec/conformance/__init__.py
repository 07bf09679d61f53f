"""Conformance: golden vectors, identities and error bounds that a formula or its twin must satisfy."""

from attnspec.conformance.verify import Check, verify

__all__ = ["Check", "verify"]
