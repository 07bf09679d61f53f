"""Positions of GOAT's queries and keys, and their waves: known before any array, so in NumPy's float64 and rounded once."""

import mlx.core as mx
import numpy as np

from attnspec.reference.inputs import CAUSAL, MOST, number, one_of, whole


def sequence_positions(n, m, causal, query_offset, key_offset):
    """Positions (n,) of the queries and (m,) of the keys."""
    one_of("causal", causal, CAUSAL)
    key_offset = whole("key_offset", key_offset, least=-MOST)
    if query_offset is None:
        query_offset = key_offset + (m - n if causal in (True, "bottom-right") else 0)
    else:
        query_offset = whole("query_offset", query_offset, least=-MOST)
    return query_offset + np.arange(n), key_offset + np.arange(m)


def at_positions(i, j, mask, causal):
    """What is visible by the mask, and under a causal one not beyond the queries' positions; None where everything is."""
    ordered = None if causal is False else mx.array(j <= i[:, None])
    if mask is None:
        return ordered
    visible = mask if ordered is None else mx.logical_and(mask, ordered)
    return mx.broadcast_to(visible, np.broadcast_shapes(visible.shape, (len(i), len(j))))


def frequencies(count, base):
    """w_r = base^(-r / (count - 1)), r = 0 .. count - 1: from 1 down to 1/base."""
    return base ** (-np.arange(count) / max(count - 1, 1))


def waves(positions, count, base, grid, cls, name="position_base"):
    """cos and sin (n, count) of the phases at positions (n,), 0 for what has no coordinates: on a grid the class token.

    Raises ValueError where the grid is no pair of sizes, or a position lies outside of it.
    """
    w = frequencies(count, float(number(name, base, above=0)))
    phase, placed = phases(positions, w, grid, cls)
    return placed * np.cos(phase), placed * np.sin(phase)


def phases(positions, w, grid, cls):
    if grid is None:
        if cls:
            raise ValueError("cls: expected a grid with the class token, got grid=None")
        return positions[:, None] * w, np.ones((len(positions), 1), bool)
    try:
        H, W = grid
    except (TypeError, ValueError):
        raise ValueError(f"grid: expected a pair (height, width), got {grid!r}") from None
    H, W = whole("grid", H, least=1), whole("grid", W, least=1)
    patch = positions - cls
    if np.any((positions < 0) | (patch >= H * W)):
        raise ValueError(f"grid: expected positions 0..{H * W + cls - 1} on {H} x {W} patches, got {positions.min()}..{positions.max()}")
    y, x = np.divmod(patch, W)
    rows = len(w) - len(w) // 2
    phase = np.concatenate([y[:, None] * w[:rows], x[:, None] * w[rows:]], axis=-1)
    return phase, (patch >= 0)[:, None]


def constant(x):
    return mx.array(np.asarray(x, np.float32))
