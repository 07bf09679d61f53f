"""Twin of reference/affine/gated.py: the gate is applied to queries, keys, values or outputs in one pass over the rows."""

import math

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.exponential import LOG2_E, exp2_row
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.softmax.tiles import band as band_of
from attnspec.numba_kernels.softmax.tiles import sees, tiled_attention, whole_registers
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, one_of

POSITIONS = ("G1", "G2", "G3", "G4", "G5")
ACTIVATIONS = ("sigmoid", "silu", "identity", "ns_sigmoid")
MODES = ("multiplicative", "additive")
ROWS = 128      # of a task


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
    logits = np.matmul(tokens[..., None, :, :], np.swapaxes(w_gate, -1, -2))                  # (..., hg, n or m, g)
    bias = np.zeros((len(w_gate), w_gate.shape[1]), q.dtype) if b_gate is None else b_gate

    def gated(y, seen=None):
        return gate_rows(y, logits, bias, activation, mode, seen)

    q = gated(q) if position == "G4" else q
    k = gated(k) if position == "G3" else k
    v = gated(v) if position == "G2" else v
    out, weights, _ = tiled_attention(q, k, v, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa, return_weights=return_weights)
    if position == "G1":
        out = gated(out, visible_rows(q.shape[-2], k.shape[-2], mask, causal))
    if w_o is not None:
        h, e = w_o.shape[1:]
        rows = np.ascontiguousarray(np.moveaxis(out, -3, -2)).reshape(*out.shape[:-3], out.shape[-2], h * e)
        out = rows @ w_o.reshape(len(w_o), h * e).T
        out = out if b_o is None else out + b_o
    if position == "G5":
        out = gated(out[..., None, :, :])[..., 0, :, :]            # one gate for the joined heads
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


def gate_rows(y, logits, bias, activation, mode, seen=None):
    """y * gate or y + gate for the gate of logits (..., hg, n, g) + bias (hg, g); 0 where a row of `seen` (..., n) is not."""
    lead = np.broadcast_shapes(y.shape[:-2], logits.shape[:-2], () if seen is None else seen.shape[:-1])
    values, y_of = heads_of(y, lead)
    gates, gate_of = heads_of(logits, lead)
    biases, bias_of = heads_of(bias, lead, 1)
    rows, seen_of = heads_of(np.ones((1, 1), np.bool_) if seen is None else seen, lead, 1)
    out = np.empty((math.prod(lead), *y.shape[-2:]), y.dtype)
    blocks = -(-y.shape[-2] // ROWS)
    in_parallel(gate_blocks, len(out) * blocks, values, y_of, gates, gate_of, biases, bias_of, rows, seen_of,
                ACTIVATIONS.index(activation), MODES.index(mode), out, work=20 * out.size)
    return out.reshape(*lead, *y.shape[-2:])


@helper
def activate_row(logits, shift, gate, activation):
    """gate = sigmoid, silu, identity or ns_sigmoid, by number, of logits + shift, each of one entry or as many as the other."""
    kind, count = gate.dtype.type, max(logits.size, shift.size)
    one, half = kind(1), kind(0.5)
    stop = whole_registers(count, gate)
    for c in range(count):
        gate[c] = -abs(logits[c if logits.size > 1 else 0] + shift[c if shift.size > 1 else 0]) * kind(LOG2_E)
    for c in range(count, stop):
        gate[c] = kind(0)
    exp2_row(gate, 0, stop, kind(0), kind(-np.inf))
    for c in range(count):
        x, e = logits[c if logits.size > 1 else 0] + shift[c if shift.size > 1 else 0], gate[c]
        sigmoid = (e if x < 0 else one) / (one + e)
        if activation == 0:
            gate[c] = sigmoid
        elif activation == 1:
            gate[c] = x * sigmoid
        elif activation == 2:
            gate[c] = x
        else:
            gate[c] = half + half * sigmoid


@kernel
def gate_blocks(y, y_of, gates, gate_of, bias, bias_of, seen, seen_of, activation, mode, out, first, step):
    """out (h, n, e)."""
    heads, n, e = out.shape
    blocks = (n + ROWS - 1) // ROWS
    gate = np.empty(whole_registers(max(gates.shape[2], bias.shape[1]), out), out.dtype)
    several, zero = max(gates.shape[2], bias.shape[1]) > 1, out.dtype.type(0)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * ROWS
        for i in range(i0, min(n, i0 + ROWS)):
            activate_row(gates[gate_of[h], i], bias[bias_of[h]], gate, activation)
            shows = seen[seen_of[h], i if seen.shape[1] > 1 else 0]
            for c in range(e):
                g = gate[c if several else 0]
                x = y[y_of[h], i, c] * g if mode == 0 else y[y_of[h], i, c] + g
                out[h, i, c] = x if shows else zero
