"""Elementary functions that neither overflow nor cancel on the way, and keep the derivative of a complex number."""

import numpy as np

LARGEST_LOG = float(np.log(np.finfo(float).max))


def log1p(z):
    """log(1 + z) for z > -1, to the last digits for complex z too, where NumPy's takes the logarithm of 1 + z.

    >>> log1p(np.array([1e-20 + 0j])).real
    array([1.e-20])
    """
    return 2 * np.arctanh(z / (2 + z))


def exp_or_inf(x):
    """exp(x), infinite beyond float64."""
    beyond = x.real > LARGEST_LOG
    return np.where(beyond, np.inf, np.exp(np.where(beyond, 0.0, x)))


def reciprocal(x):
    """1 / x, infinite where x is 0 or 1/x beyond float64, and 0 for an infinite x."""
    size = np.where(x.real < 0, -x.real, x.real)
    special = np.where(x.real < 0, -1.0, 1.0) * np.where(size < 1.0, np.inf, 0.0)
    tiny_or_infinite = (size < 2.0**-1023) | (size == np.inf)          # 1 / 2^-1023 is the last power of 2 in range
    return np.where(tiny_or_infinite, special, 1 / np.where(tiny_or_infinite, 1.0, x))


def largest_entry(x):
    """max_c |x_c| along the last axis, which is kept; 0 where there is none."""
    return np.max(np.where(x.real < 0, -x.real, x.real), axis=-1, keepdims=True, initial=0.0)


def shares(x):
    """x divided by its sum along the last axis, and x where that is 0; a power of 2, which rounds nothing, keeps the sum in range."""
    top = largest_entry(x)
    _, exponent = np.frexp(np.where(np.isfinite(top), top, 1.0))
    scaled = x * np.exp2(-np.maximum(exponent, 0))
    total = np.sum(scaled, axis=-1, keepdims=True)
    return np.where(total == 0, x, scaled / np.where(total == 0, 1.0, total))


def norm(x):
    """|x| along the last axis, which is kept; no square overflows or vanishes. 0, and no derivative, for zeros."""
    top = largest_entry(x)
    plain = (top == 0) | (top == np.inf)
    x = np.where(plain, 1.0, x / np.where(plain, 1.0, top))
    return np.where(plain, top, top * np.sqrt(np.sum(x * x, axis=-1, keepdims=True)))


def unit(x):
    """x divided by its norm; zeros, without derivative, where that is 0, and NaN where it is infinite."""
    top = largest_entry(x)
    plain = (top == 0) | (top == np.inf)
    x = np.where(plain, 1.0, x / np.where(plain, 1.0, top))
    return np.where(plain, np.where(top == 0, 0.0, np.nan), x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True)))
