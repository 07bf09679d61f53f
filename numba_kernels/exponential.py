"""2^x and tanh on registers, to a unit in the last place or two.

    2^x = 2^k (1 + f q(f)),   k = the whole number nearest to x,   f = x - k in [-1/2, 1/2]

q is the polynomial nearest to (2^f - 1) / f in relative error (Remez exchange in 50 digits): 1.1e-8 with 6 coefficients, 1.8e-17 with 11.
"""

import numpy as np
from numba import types
from numba.extending import intrinsic

from attnspec.numba_kernels.jit import helper
from attnspec.numba_kernels.simd import (
    absolute,
    constant,
    lane_max,
    lane_min,
    lane_sum,
    lanes,
    load,
    maximum,
    minimum,
    nearest,
    power_of_two,
    signed_like,
    splat,
    store,
    zero_below,
)

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

COEFFICIENTS = {
    types.float32: (
        0.6931471824645996, 0.24022649228572845, 0.05550357326865196, 0.009618237614631653, 0.0013390735257416964, 0.00015403512225020677,
    ),
    types.float64: (
        0.6931471805599453, 0.24022650695910097, 0.055504108664821236, 0.009618129107607065, 0.0013333558146531633, 0.0001540353044148068,
        1.5252733701214656e-05, 1.3215442724231127e-06, 1.0178121299165704e-07, 7.07256170193032e-09, 4.4455372281544426e-10,
    ),
}


@intrinsic
def fraction(typing, f):
    """f q(f) = 2^f - 1."""
    def generate(context, builder, signature, arguments):
        (f,) = arguments
        *lower, total = (constant(f.type, c) for c in COEFFICIENTS[signature.args[0].dtype])
        for coefficient in reversed(lower):
            total = builder.fadd(builder.fmul(total, f, flags=["contract"]), coefficient, flags=["contract"])
        return builder.fmul(f, total, flags=["contract"])

    return f(f), generate


@helper
def exp2_normal(x, one):
    """2^x where the result is a normal number: x from -126 (float32) or -1022 (float64) to 127 or 1023; `one` is a register of ones."""
    k = nearest(x)
    return (one + fraction(x - k)) * power_of_two(k)


@helper
def exp2_any(x, one, least):
    """2^x for x <= 0, down to the subnormal numbers and -inf; NaN stays. `least`: the x below which the result is 0."""
    inside = maximum(least, x)
    k = nearest(inside)
    half = nearest(k / (one + one))               # 2^k itself may be too small for a normal number
    w = (one + fraction(inside - k)) * power_of_two(half) * power_of_two(k - half)
    return zero_below(w, x, least)


@helper
def tanh(x, one, to_base_two, farthest):
    """tanh of a register: with t = e^(-2|x|) - 1, tanh |x| = -t / (2 + t), accurate relative to the result.

    to_base_two: -2 log2(e) in every lane; farthest: a number below which 2^x - 1 is -1.
    """
    y = maximum(farthest, absolute(x) * to_base_two)
    k = nearest(y)
    power = power_of_two(k)
    t = (power - one) + power * fraction(y - k)
    return signed_like((one - one - t) / (one + one + t), x)


@helper
def exp2_row(row, start, stop, shift, lowest):
    """Replace row[start:stop] by 2^(row - shift), and return the sum. Whole registers; lowest: the smallest row entry."""
    width = lanes(row)
    top, one = splat(shift, row), splat(row.dtype.type(1), row)
    total = one - one
    exponents = np.finfo(row.dtype)
    if lowest - shift >= exponents.minexp:
        for j in range(start, stop, width):
            w = exp2_normal(load(row, j) - top, one)
            store(row, j, w)
            total = total + w
    else:
        least = splat(row.dtype.type(exponents.minexp - exponents.nmant - 1), row)
        for j in range(start, stop, width):
            w = exp2_any(load(row, j) - top, one, least)
            store(row, j, w)
            total = total + w
    return lane_sum(total)


@helper
def range_of_row(row, start, stop):
    """The smallest and the largest entry of row[start:stop], NaN passed over; whole registers."""
    width = lanes(row)
    low, high = splat(row.dtype.type(np.inf), row), splat(row.dtype.type(-np.inf), row)
    low_1, low_2, low_3, high_1, high_2, high_3 = low, low, low, high, high, high
    j = start
    while j + 4 * width <= stop:                     # four chains, as one waits for itself
        x, x_1, x_2, x_3 = load(row, j), load(row, j + width), load(row, j + 2 * width), load(row, j + 3 * width)
        low, low_1, low_2, low_3 = minimum(x, low), minimum(x_1, low_1), minimum(x_2, low_2), minimum(x_3, low_3)
        high, high_1, high_2, high_3 = maximum(x, high), maximum(x_1, high_1), maximum(x_2, high_2), maximum(x_3, high_3)
        j += 4 * width
    low, high = minimum(minimum(low, low_1), minimum(low_2, low_3)), maximum(maximum(high, high_1), maximum(high_2, high_3))
    while j < stop:
        low, high = minimum(load(row, j), low), maximum(load(row, j), high)
        j += width
    return lane_min(low), lane_max(high)
