"""Gated attention: a learned gate, made from the token's own hidden state, on one of five places of an attention layer.

    Y' = Y * act(x W_g)          multiplicative        Y' = Y + act(x W_g)          additive

    G1  Y_hi = sum_j P_hij v_hj   the output of each head, before W_O        G4  Y_hi = q_hi   queries
    G2  Y_hj = v_hj               values                                     G5  Y_i = W_O [o_1i; ...; o_Hi] + b_O   the layer's output
    G3  Y_hj = k_hj               keys                                       P = softmax(scale q k^T) over visible keys

    act(x) = sigmoid(x) | silu(x) = x sigmoid(x) | x | ns_sigmoid(x) = (1 + sigmoid(x)) / 2

where q (..., h, n, d), k (..., hk, m, d), v (..., hk, m, e), x (..., n, c) the hidden states that the queries were projected from,
x_keys (..., m, c) those of the keys, w_gate (hg, g, c), w_o (o, h, e) and b_o (o,); scale is 1/sqrt(d) unless given; hk = h unless
`enable_gqa`. The shape of w_gate says the rest: hg is the number of heads where every head has a gate of its own and 1 where all share
one; g is the width of Y where the gate is elementwise, and 1 where it is headwise, one number for a head.

The paper's best: G1, elementwise, a gate per head, sigmoid, multiplicative: o_hi * sigmoid(W_g[h] x_i).

Source: Qiu et al., "Gated Attention for Large Language Models", NeurIPS 2025, arXiv:2505.06708, eq. (5) and tables 1, 3, 4; the authors'
code has G1, headwise and elementwise. The other positions are as independent accounts of the paper describe them, not checked against code.

Conventions. x is the normalised input of the layer, what W_Q sees too; the gate bypasses rotary embedding and the normalisation of
queries and keys. Gates at G2 and G3 come from the keys' own tokens, x_keys, which are x in self-attention; with grouped heads they have a
gate per key head. No bias b_gate unless the layer's projections have one. An input-independent gate is w_gate = 0 with a b_gate.
A query that may see no key has zeros at G1, after the gate too, whichever mode; W_O then maps zeros. Where w_o is given the layer's output
(..., n, o) is returned, at whatever position the gate stands.

In the authors' code one projection holds queries and gates: for each key head, the d lanes of each of its h/hk query heads, then the
gate's lanes of these heads in the same order.

Identities. A gate that is open (logits towards +inf under sigmoid) leaves softmax attention. W_g = 0 halves it at G1, G2 and G5 under
sigmoid and takes 3/4 of it under ns_sigmoid; at G3 and G4 it does so to the logits. Headwise = elementwise with equal lanes, head-shared =
equal heads. A sink z is the headwise G1 gate sigmoid(L_i - z), L_i the log-sum-exp of the logits. A G2 gate that does not depend on the
input could be absorbed into W_V, and equals the same gate at G1.

Wrong versions met elsewhere: the gate's lanes split off as one block at the end of the projection instead of group by group; values
gated by the query's token; the gate computed from the output of attention or from rotated queries; heads taken as (h, g) where the
projection is (g, h).
"""

import numpy as np

from attnspec.reference.activations import ns_sigmoid, sigmoid, silu
from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, one_of, visible_keys
from attnspec.reference.softmax.scaled_dot_product import scaled_dot_product_attention

ACTIVATIONS = {"sigmoid": sigmoid, "silu": silu, "identity": lambda x: x, "ns_sigmoid": ns_sigmoid}
MODES = ("multiplicative", "additive")
POSITIONS = ("G1", "G2", "G3", "G4", "G5")


@formula(
    family="affine",
    shapes={
        "q": "... h n d", "k": "... hk m d", "v": "... hk m e", "x": "... n c", "w_gate": "hg g c", "b_gate": "hg g", "x_keys": "... m c",
        "w_o": "o h e", "b_o": "o", "mask": "bool ... #h #n #m", "out": "... h n e",
    },
    equation="out = softmax(scale q k^T) v * sigmoid(x W_g)",
    latex=r"o_{hi}=\sigma(W_{g,h}\,x_i)\circ\sum_j\operatorname{softmax}_j(\mathrm{scale}\,\langle q_{hi},k_{hj}\rangle)\,v_{hj}",
    source="arXiv:2505.06708, eq. (5)",
    bound="gate",
    sizes={"c": 6, "h": 4, "hk": "h", "hg": "h", "g": "e", "o": 6},
    workspace="... h n m",
)
def gated_attention(
    q, k, v, x, w_gate, *, position="G1", activation="sigmoid", mode="multiplicative", b_gate=None, x_keys=None, w_o=None, b_o=None,
    scale=None, mask=None, causal=False, enable_gqa=False, return_weights=False,
):
    """Gated attention of q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e); returns (..., h, n, e), or (..., n, o) with w_o.

    x: (..., n, c) hidden states of the queries' tokens.  w_gate: (hg, g, c) with hg = the heads of what is gated (key heads at G2 and G3)
    or 1 (shared), g = its width (elementwise) or 1 (headwise); at G5 hg = 1 and g = o or 1.
    position: "G1" (output of each head), "G2" (values), "G3" (keys), "G4" (queries) or "G5" (after w_o).
    activation: "sigmoid", "silu", "identity" or "ns_sigmoid".  mode: "multiplicative" or "additive".
    b_gate: (hg, g) added to the gate's logits.  x_keys: (..., m, c) hidden states of the keys' tokens, only at G2 and G3, default x.
    w_o: (o, h, e) the output projection, required at G5.  b_o: (o,) its bias.
    scale: multiplies the logits, default 1/sqrt(d).  mask: bool, broadcastable to (..., h, n, m), True = may attend.
    causal: False, "bottom-right" (or True) or "top-left".  enable_gqa: key heads may be fewer than query heads and are shared by
    neighbouring ones.  return_weights: also return P (..., h, n, m).
    Raises ValueError where shapes do not match, heads differ without enable_gqa, or an option is unknown, naming the argument.

    >>> gated_attention([[[1.0]]], [[[0.0]]], [[[8.0]]], [[np.log(3.0)]], [[[1.0]]])         # one key, gate 3/4
    array([[[6.]]])
    """
    one_of("position", position, POSITIONS)
    one_of("activation", activation, tuple(ACTIVATIONS))
    one_of("mode", mode, MODES)
    of_keys = position in ("G2", "G3")
    check_projection(position, w_o, b_o)
    check_key_tokens(position, x_keys, x, k)
    check_gate(position, w_gate, q, k, v, w_o)

    tokens = x_keys if of_keys and x_keys is not None else x
    logits = tokens[..., None, :, :] @ np.swapaxes(w_gate, -1, -2)               # (..., hg, n or m, g)
    gate = ACTIVATIONS[activation](logits if b_gate is None else logits + b_gate[:, None, :])

    def gated(Y):
        return Y * gate if mode == "multiplicative" else Y + gate

    q = gated(q) if position == "G4" else q
    k = gated(k) if position == "G3" else k
    v = gated(v) if position == "G2" else v
    out, P, _ = scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa, return_weights=True)
    if position == "G1":
        sees = np.any(visible_keys(q.shape[-2], k.shape[-2], mask, causal), axis=-1, keepdims=True)
        out = np.where(sees, gated(out), 0.0)
    if w_o is not None:
        out = np.einsum("...hne,ohe->...no", out, w_o)
        out = out if b_o is None else out + b_o
    if position == "G5":
        gate = gate[..., 0, :, :]                                      # the heads are gone
        out = gated(out)
    return AttentionResult(out, P) if return_weights else out


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
