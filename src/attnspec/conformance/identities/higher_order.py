"""Identities of the higher_order family."""
