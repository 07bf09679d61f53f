"""Conformance: golden vectors, identities and error bounds that a formula or its twin must satisfy."""
