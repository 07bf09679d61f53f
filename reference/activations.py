"""The functions that turn a gate's logit into its value, written so that they neither overflow nor lose an imaginary part."""

import numpy as np


def sigmoid(x):
    """1 / (1 + exp(-x)).

    >>> sigmoid(np.array([-1000.0, 0.0, np.log(3.0)]))
    array([0.  , 0.5 , 0.75])
    """
    e = np.exp(np.where(x.real < 0, x, -x))                            # of -|x|: cannot overflow
    return np.where(x.real < 0, e, 1.0) / (1 + e)


def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


def ns_sigmoid(x):
    """(1 + sigmoid(x)) / 2, a gate that closes by half at most ("non-sparse")."""
    return 0.5 + 0.5 * sigmoid(x)
