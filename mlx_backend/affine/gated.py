"""Twin of reference/affine/gated.py as a graph: tokens that nobody sees, or that see nothing, are put out before the gate is made."""

import mlx.core as mx

from attnspec.mlx_backend.activations import ns_sigmoid, silu
from attnspec.mlx_backend.graph import any_to_shape, select, turned, visible_keys
from attnspec.mlx_backend.softmax.tiles import attention
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, one_of

ACTIVATIONS = {"sigmoid": mx.sigmoid, "silu": silu, "identity": lambda x: x, "ns_sigmoid": ns_sigmoid}
MODES = ("multiplicative", "additive")
POSITIONS = ("G1", "G2", "G3", "G4", "G5")


@twin
def gated_attention(
    q, k, v, x, w_gate, *, position="G1", activation="sigmoid", mode="multiplicative", b_gate=None, x_keys=None, w_o=None, b_o=None,
    scale=None, mask=None, causal=False, enable_gqa=False, return_weights=False,
):
    """Gated attention of q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e); the parameters are those of the reference."""
    one_of("position", position, POSITIONS)
    one_of("activation", activation, tuple(ACTIVATIONS))
    one_of("mode", mode, MODES)
    of_keys = position in ("G2", "G3")
    check_projection(position, w_o, b_o)
    check_key_tokens(position, x_keys, x, k)
    check_gate(position, w_gate, q, k, v, w_o)

    visible = visible_keys(q.shape[-2], k.shape[-2], mask, causal)
    tokens = x_keys if of_keys and x_keys is not None else x
    if visible is not None and position != "G5":
        met = mx.any(visible, axis=-2)[..., None] if of_keys else mx.any(visible, axis=-1, keepdims=True)         # (..., n or m, 1)
        tokens = select(mx.any(met, axis=-3) if met.ndim > 2 else met, tokens, 0.0)
        q = select(met, q, 0.0) if position == "G4" else q
    logits = tokens[..., None, :, :] @ turned(w_gate)                  # (..., hg, n or m, g)
    gate = ACTIVATIONS[activation](logits if b_gate is None else logits + b_gate[:, None, :])

    def gated(Y):
        return Y * gate if mode == "multiplicative" else Y + gate

    def seen(Y):
        """Keys or values without what no query sees."""
        heads = Y.shape[-3] if Y.shape[-3] == q.shape[-3] else 1       # by any head where heads are grouped
        return Y if visible is None else select(any_to_shape(met, (heads, Y.shape[-2], 1)), Y, 0.0)

    q = gated(q) if position == "G4" else q
    k = gated(seen(k)) if position == "G3" else k
    v = gated(seen(v)) if position == "G2" else v
    out, P, _ = attention(
        q, k, v, return_weights=return_weights, own=position in ("G1", "G5"), scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa,
    )
    if position == "G1":
        out = gated(out) if visible is None else select(met, gated(out), 0.0)
    if w_o is not None:
        out = projected_heads(out, w_o)
        out = out if b_o is None else out + b_o
    if position == "G5":
        gate = gate[..., 0, :, :]                                      # the heads are gone
        out = gated(out)
    return AttentionResult(out, P) if return_weights else out


def projected_heads(out, w_o):
    """(..., n, o) of the heads' outputs (..., h, n, e) and w_o (o, h, e)."""
    out = out.swapaxes(-2, -3)                                         # (..., n, h, e)
    o, h, e = w_o.shape
    return out.reshape(*out.shape[:-2], h * e) @ turned(w_o.reshape(o, h * e))


def check_projection(position, w_o, b_o):
    if position == "G5" and w_o is None:
        raise ValueError("w_o: expected an array of shape (o, h, e) at position 'G5', which gates what w_o returns, got None")
    if b_o is not None and w_o is None:
        raise ValueError("b_o: expected only together with w_o, whose bias it is")


def check_key_tokens(position, x_keys, x, k):
    if position not in ("G2", "G3"):
        if x_keys is not None:
            raise ValueError(f"x_keys: expected only at positions 'G2' and 'G3', which gate values or keys, got position {position!r}")
    elif x_keys is None and x.shape[-2] != k.shape[-2]:
        raise ValueError(f"x_keys: expected the hidden states of the {k.shape[-2]} keys, as x has those of {x.shape[-2]} queries, got None")


def check_gate(position, w_gate, q, k, v, w_o):
    if position == "G5":
        heads, width = 1, w_o.shape[0]
    else:
        heads = {"G1": q, "G2": v, "G3": k, "G4": q}[position].shape[-3]
        width = {"G1": v, "G2": v, "G3": k, "G4": q}[position].shape[-1]
    if w_gate.shape[0] not in (1, heads) or w_gate.shape[1] not in (1, width):
        h, g = (f"{size} or 1" if size != 1 else "1" for size in (heads, width))
        raise ValueError(f"w_gate: expected shape ({h}, {g}, c) at position {position!r}, got {w_gate.shape}")
