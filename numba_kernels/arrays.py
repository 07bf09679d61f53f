"""Arrays of any leading axes as the kernels take them: heads flattened to one axis, and for each array which of its entries a head uses.

Nothing is copied that is contiguous already, and what is broadcast or shared by grouped heads is never multiplied.
"""

import math

import numpy as np

from attnspec.reference.inputs import sum_groups, sum_to_shape


def leading_axes(q, k, v, *others, enable_gqa=False) -> tuple[int, ...]:
    """The leading axes that all arrays broadcast to; grouped keys and values count as many heads as the queries."""
    fronts = [q.shape[:-2]] + [x.shape[:-2] for x in others if x is not None]
    for x in (k, v):
        front = x.shape[:-2]
        fronts.append((*front[:-1], q.shape[-3]) if enable_gqa else front)
    return np.broadcast_shapes(*fronts)


def heads_of(x: np.ndarray, lead: tuple[int, ...], tail: int = 2, *, grouped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """x as a contiguous (b, ...) with `tail` more axes, and the index (heads,) into b of each of the flattened heads of `lead`.

    grouped: the last leading axis of x is shared by groups of neighbouring heads.
    """
    if x.ndim < tail:
        x = x.reshape((1,) * (tail - x.ndim) + x.shape)
    for axis in range(x.ndim):
        if x.strides[axis] == 0 and x.shape[axis] > 1 and axis < x.ndim - tail:
            x = x.take([0], axis)                        # a broadcast axis: one copy is enough
    front = x.shape[: x.ndim - tail]
    index = np.arange(math.prod(front)).reshape(front)
    if grouped:
        index = np.repeat(index, lead[-1] // max(front[-1], 1), axis=-1)
    flat = np.ascontiguousarray(x).reshape(math.prod(front), *x.shape[x.ndim - tail :])
    return flat, np.ascontiguousarray(np.broadcast_to(index, lead)).reshape(-1)


def without_axes(x: np.ndarray, lead: tuple[int, ...], tail: int = 2) -> np.ndarray:
    """x (..., `tail` axes) without its repetitions along leading axes that `lead` lacks or has only one of."""
    x = x[(0,) * (x.ndim - tail - len(lead))]
    return x[tuple(slice(1) if size == 1 else slice(None) for size in lead)]


def summed_like(gradient: np.ndarray, lead: tuple[int, ...], like: np.ndarray, *, grouped: bool = False) -> np.ndarray:
    """The gradient (heads, ...) by one array, whose heads were those of `lead`: summed over the axes along which it was broadcast.

    grouped: the last leading axis of `like` is shared by groups of neighbouring heads.
    """
    gradient = gradient.reshape(*lead, *gradient.shape[1:])
    summed = sum_to_shape(sum_groups(gradient, like.shape[-3]) if grouped else gradient, like.shape)
    return np.asarray(summed, dtype=like.dtype, order="C")
