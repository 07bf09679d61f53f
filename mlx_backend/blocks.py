"""The running maximum, normaliser and sum of values of a softmax whose keys come block by block.

Maxima are constants for derivatives: whatever is subtracted from the logits cancels in the result.
"""

import mlx.core as mx

from attnspec.mlx_backend.graph import INF, row_maximum, select, total, weighted_values


def chunks(size, length):
    """Slices of `length`, the last one maybe shorter, that cover `size`; one empty slice of nothing."""
    return [slice(start, min(start + length, size)) for start in range(0, max(size, 1), length)]


def fold_block(state, s, v, visible):
    """The running (m, l, o) after one more block of keys with logits s (..., n, b) and values v (..., b, e)."""
    m, l, o = state
    alive = s != -INF if visible is None else mx.logical_and(visible, s != -INF)
    top = row_maximum(s, alive)[..., 0]
    m_new = mx.where(m >= top, m, top)
    shift = mx.where(m_new == -INF, 0.0, m_new)[..., None]
    e = select(alive, mx.exp(select(alive, s, shift) - shift), 0.0)
    a = mx.exp(m - shift[..., 0])
    return m_new, l * a + total(e), o * a[..., None] + weighted_values(e, v, visible)


def finished(m, l, o):
    """Output and log-sum-exp of the last (m, l, o): zeros and -inf where nothing was seen."""
    empty = l == 0
    sums = mx.where(empty, 1.0, l)
    return o / sums[..., None], mx.where(empty, -INF, m + mx.log(sums))
