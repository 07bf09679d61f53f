"""The functions that turn a gate's logit into its value."""

import mlx.core as mx


def silu(x):
    """x sigmoid(x)."""
    return x * mx.sigmoid(x)


def ns_sigmoid(x):
    """(1 + sigmoid(x)) / 2, a gate that closes by half at most ("non-sparse")."""
    return 0.5 + 0.5 * mx.sigmoid(x)


def softplus(x):
    """log(1 + exp(x)), without overflow."""
    return mx.logaddexp(x, mx.zeros_like(x))


def linear_clipping(x):
    """A straight line from 0 at -5 to 1 at 5, constant beyond, and so its derivative at both."""
    return mx.where(x <= -5, 0.0, mx.where(x >= 5, 1.0, 0.1 * x + 0.5))
