"""Whole numbers of any size in a graph: known ones as limbs of 31 bits, whose sums are added in 64 bits and carried at the end."""

import mlx.core as mx
import numpy as np

BITS = 31
MASK = 2**BITS - 1


def limbs(numbers) -> np.ndarray:
    """Python's integers as limbs (count, L) of int64, the lowest first; only the last one may be negative."""
    numbers = [int(x) for x in numbers]
    L = max((x.bit_length() // BITS + 1 for x in numbers), default=1)
    parts = [[(x >> BITS * k) & MASK for k in range(L - 1)] + [x >> BITS * (L - 1)] for x in numbers]
    return np.array(parts, np.int64).reshape(len(numbers), L)


def sign_of_sum(sums: mx.array) -> mx.array:
    """-1, 0 or 1 (...): the sign of the whole numbers whose limbs are sums (..., L) of limbs, of int64 and not carried yet."""
    carry, rest = mx.array(0, mx.int64), mx.array(False)
    for k in range(sums.shape[-1] - 1):
        limb = sums[..., k] + carry
        carry = mx.floor_divide(limb, 2**BITS)
        rest = mx.logical_or(rest, limb - carry * 2**BITS != 0)
    top = sums[..., -1] + carry
    return mx.where(top < 0, -1, mx.where(mx.logical_or(top > 0, rest), 1, 0))


def exact_product(a: mx.array, b: mx.array) -> mx.array:
    """a @ b of whole numbers as int64, exact below 2^53: in float64, which is the CPU's."""
    a, b = (x.astype(mx.float64, stream=mx.cpu) for x in (a, b))
    return mx.matmul(a, b, stream=mx.cpu).astype(mx.int64, stream=mx.cpu)
