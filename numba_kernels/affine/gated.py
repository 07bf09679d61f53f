"""Twin of reference/affine/gated.py: a gate is made and applied panel by panel, in one pass over the rows of what it gates."""

import math

import numpy as np

from attnspec.numba_kernels.affine.projections import BLOCK, project, project_rows
from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.exponential import LOG2_E, exp2_any
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import packed_rows
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import absolute, lanes, load, splat, store, zero_below
from attnspec.numba_kernels.softmax.tiles import band as band_of
from attnspec.numba_kernels.softmax.tiles import copy_rows, sees, tiled_attention
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, one_of

POSITIONS = ("G1", "G2", "G3", "G4", "G5")
ACTIVATIONS = ("sigmoid", "silu", "identity", "ns_sigmoid")
MODES = ("multiplicative", "additive")
SIGMOID, SILU, IDENTITY, NS_SIGMOID = range(4)


@twin
def gated_attention(
    q, k, v, x, w_gate, *, position="G1", activation="sigmoid", mode="multiplicative", b_gate=None, x_keys=None, w_o=None, b_o=None,
    scale=None, mask=None, causal=False, enable_gqa=False, return_weights=False,
):
    """Gated attention of q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e); the parameters are those of the reference."""
    one_of("position", position, POSITIONS)
    one_of("activation", activation, ACTIVATIONS)
    one_of("mode", mode, MODES)
    check(position, q, k, v, x, w_gate, x_keys, w_o, b_o)
    tokens = x_keys if position in ("G2", "G3") and x_keys is not None else x
    bias = np.zeros(w_gate.shape[:2], q.dtype) if b_gate is None else b_gate

    def gated(y, seen=None, *, ours=False):
        return gate_rows(y, tokens[..., None, :, :], w_gate, bias, activation, mode, seen, ours)

    q = gated(q) if position == "G4" else q
    k = gated(k) if position == "G3" else k
    v = gated(v) if position == "G2" else v
    out, weights, _ = tiled_attention(q, k, v, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa, return_weights=return_weights)
    if position == "G1":
        out = gated(out, visible_rows(q.shape[-2], k.shape[-2], mask, causal), ours=True)
    if w_o is not None:
        h, e = w_o.shape[1:]
        rows = np.ascontiguousarray(np.moveaxis(out, -3, -2)).reshape(*out.shape[:-3], out.shape[-2], h * e)
        out = project(rows, w_o.reshape(len(w_o), h * e))
        out = out if b_o is None else out + b_o
    if position == "G5":
        out = gated(out[..., None, :, :], ours=True)[..., 0, :, :]            # one gate for the joined heads
    return AttentionResult(out, weights) if return_weights else out


def check(position, q, k, v, x, w_gate, x_keys, w_o, b_o):
    """Refuse, in the reference's words, what does not go together."""
    if position == "G5" and w_o is None:
        raise ValueError("w_o: expected an array of shape (o, h, e) at position 'G5', which gates what w_o returns, got None")
    if b_o is not None and w_o is None:
        raise ValueError("b_o: expected only together with w_o, whose bias it is")
    if position not in ("G2", "G3"):
        if x_keys is not None:
            raise ValueError(f"x_keys: expected only at positions 'G2' and 'G3', which gate values or keys, got position {position!r}")
    elif x_keys is None and x.shape[-2] != k.shape[-2]:
        raise ValueError(f"x_keys: expected the hidden states of the {k.shape[-2]} keys, as x has those of {x.shape[-2]} queries, got None")
    if position == "G5":
        heads, width = 1, w_o.shape[0]
    else:
        heads = {"G1": q, "G2": v, "G3": k, "G4": q}[position].shape[-3]
        width = {"G1": v, "G2": v, "G3": k, "G4": q}[position].shape[-1]
    if w_gate.shape[0] not in (1, heads) or w_gate.shape[1] not in (1, width):
        h, g = (f"{size} or 1" if size != 1 else "1" for size in (heads, width))
        raise ValueError(f"w_gate: expected shape ({h}, {g}, c) at position {position!r}, got {w_gate.shape}")


def visible_rows(n, m, mask, causal):
    """Which queries see a key: bool (..., n)."""
    masks = np.zeros((0, 1, 1), np.bool_) if mask is None else mask.reshape((1,) * (2 - mask.ndim) + mask.shape)
    front = () if mask is None else masks.shape[:-2]
    flat = masks if mask is None else masks.reshape(math.prod(front), *masks.shape[-2:])
    seen = np.empty((math.prod(front), n), np.bool_)
    low, high = band_of(n, m, causal, None)
    in_parallel(rows_that_see, len(seen), flat, m, low, high, seen, work=seen.size)
    return seen.reshape(*front, n)


@kernel
def rows_that_see(mask, m, low, high, seen, first, step):
    """seen (b, n)."""
    for one in range(first, seen.shape[0], step):
        for i in range(seen.shape[1]):
            j = 0
            while j < m and not sees(i, j, low, high, mask, one):
                j += 1
            seen[one, i] = j < m


def gate_rows(y, tokens, w_gate, b_gate, activation, mode, seen, ours):
    """y * gate or y + gate, y (..., h, n, e), for the gate of tokens (..., 1, n, c); 0 where a row of `seen` (..., n) is not.

    ours: y may be written into.
    """
    lead = np.broadcast_shapes(y.shape[:-2], tokens.shape[:-2], w_gate.shape[:-2], () if seen is None else seen.shape[:-1])
    n, e = y.shape[-2:]
    values, y_of = heads_of(y, lead)
    x, x_of = heads_of(tokens, lead)
    w, w_of = heads_of(w_gate, lead)
    rows, seen_of = heads_of(np.ones((1, 1), np.bool_) if seen is None else seen, lead, 1)
    out = values if ours and lead == y.shape[:-2] else np.empty((math.prod(lead), n, e), y.dtype)
    in_parallel(gate_blocks, len(out) * -(-n // BLOCK), values, y_of, x, x_of, packed_rows(w), np.ascontiguousarray(b_gate), w_of, rows,
                seen_of, ACTIVATIONS.index(activation), MODES.index(mode), out, work=out.size * (x.shape[-1] + 20))
    return out.reshape(*lead, n, e)


@helper
def activate(x, count, activation):
    """Replace the first `count` numbers of x, whole registers, by their sigmoid, silu, themselves or ns_sigmoid."""
    kind = x.dtype.type
    zero, one, half, to_base_two = splat(kind(0), x), splat(kind(1), x), splat(kind(0.5), x), splat(kind(-LOG2_E), x)
    limits = np.finfo(x.dtype)
    least = splat(kind(limits.minexp - limits.nmant - 1), x)
    if activation != IDENTITY:
        for at in range(0, count, lanes(x)):
            z = load(x, at)
            t = exp2_any(absolute(z) * to_base_two, one, least)                      # e^-|z|
            below = t - zero_below(t, z, zero)                                       # t where z < 0, else 0
            gate = (zero_below(one, z, zero) + below) / (one + t)
            if activation == SILU:
                gate = gate * z
            elif activation == NS_SIGMOID:
                gate = half + half * gate
            store(x, at, gate)


@helper
def apply_gate(y, one, acc, r, mode, out, h, i, c, count):
    """out[h, i, c:c + count] = y[one, i, c:c + count] times or plus acc[r, :count], a panel or less."""
    _, n, e = out.shape
    whole = count // lanes(acc) * lanes(acc)
    y_at, out_at = (one * n + i) * e + c, (h * n + i) * e + c
    for w in range(0, whole, lanes(acc)):
        x, gate = load(y, y_at + w), load(acc, r * acc.shape[1] + w)
        store(out, out_at + w, x * gate if mode == 0 else x + gate)
    for w in range(whole, count):
        out[h, i, c + w] = y[one, i, c + w] * acc[r, w] if mode == 0 else y[one, i, c + w] + acc[r, w]


@kernel
def gate_blocks(y, y_of, x, x_of, panels, bias, w_of, seen, seen_of, activation, mode, out, first, step):
    """out (h, n, e); a gate of one column is that of all e."""
    heads, n, e = out.shape
    _, count, terms, width = panels.shape
    g = bias.shape[1]
    blocks = (n + BLOCK - 1) // BLOCK
    block, acc = np.zeros((BLOCK, terms), out.dtype), np.empty((BLOCK, width), out.dtype)
    zero = out.dtype.type(0)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * BLOCK
        rows = min(BLOCK, n - i0)
        if rows < BLOCK:
            copy_rows(x, x_of[h], i0, rows, block)
        for p in range(count):
            filled = min(width, g - p * width)
            acc[:] = zero
            for r in range(rows):
                for w in range(filled):
                    acc[r, w] = bias[w_of[h], p * width + w]
            project_rows(x, x_of[h], i0, rows, block, panels, w_of[h], p, acc)
            activate(acc, rows * width, activation)
            for r in range(rows):
                i, start, stop = i0 + r, p * width, (e if g == 1 else p * width + filled)
                if not seen[seen_of[h], i if seen.shape[1] > 1 else 0]:
                    out[h, i, start:stop] = zero
                    continue
                if g == 1:
                    acc[r] = acc[r, 0]
                for c in range(start, stop, width):
                    apply_gate(y, y_of[h], acc, r, mode, out, h, i, c, min(width, stop - c))
