"""The backward pass of attention by blocks: weights are computed again from the saved log-sum-exp, one block of them at a time.

    saved by the forward pass: out and L, L_i = log sum_l exp(s_il)          with exp(z_h) in the sum, where there is a sink z
    D_i = <dO_i, out_i>
    for every block of queries I and every block of keys J:
        P_IJ  = exp(s_IJ - L_I)
        dV_J += P_IJ^T dO_I
        dS_IJ = P_IJ * (dO_I V_J^T - D_I)
        dQ_I += scale dS_IJ K_J
        dK_J += scale dS_IJ^T Q_I

where q (..., n, d), k (..., m, d), v (..., m, e), dO (..., n, e); scale is 1/sqrt(d) unless given. Besides, dbias_IJ += dS_IJ, the sink
has dz_h = -sum_i exp(z_h - L_i) D_i, and under a softcap dQ and dK take dS * (1 - (cap(x)/c)^2).

Source: Rabe and Staats, arXiv:2112.05682 (weights of a chunk computed again in the backward pass); with D in place of a sum over weights:
Dao et al., FlashAttention, arXiv:2205.14135, algorithm 4, and haoliuhl/ringattention, which save m and l; with L alone: Dao,
FlashAttention-2, arXiv:2307.08691, algorithm 2. The papers from memory, the equations derived.

Conventions. The forward pass is run first, by `online_softmax_attention`, and only its out and L are used. Options as in
`scaled_dot_product_attention_backward`, with the same results; block sizes change nothing but rounding. Gradients have the shapes of
their arrays, those of shared heads and broadcast axes being summed. In ring attention dK_J and dV_J travel around the ring with K_J and
V_J.

Identities. The result is that of `scaled_dot_product_attention_backward` for any block sizes. sum_j dv_j = sum_i dO_i without a sink.

Wrong versions met elsewhere: L rebuilt from one block instead of from all; D computed from the block's own output; P recomputed without
the mask, so that exp(s - L) of a masked key is not 0; L = -inf of a query that sees nothing, which gives exp(inf) or NaN; dbias added up
over the batch twice.
"""

import functools

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import default_scale, grouped_heads, sum_groups, sum_to_shape, whole
from attnspec.reference.softmax.online import block_of, chunks, finite_shift, online_softmax_attention, visible_block
from attnspec.reference.softmax.scaled_dot_product import SHAPES, AttentionGradients
from attnspec.reference.softmax.weights import attention_logits, weighted_values


def sees_a_key(i, keys, n, m, mask=None, causal=False, window=None):
    """Which of the queries in the slice i see any key at all, a block of keys at a time."""
    return functools.reduce(np.logical_or, (np.any(visible_block(i, j, n, m, mask, causal, window), axis=-1) for j in keys))


def add_block(total, i, j, block):
    """Add `block` to the part [i, j] of a `total` that broadcasts to (..., n, m), summing over the axes along which it is repeated."""
    total = total.reshape((1,) * (2 - total.ndim) + total.shape)       # a view
    part = total[..., i if total.shape[-2] > 1 else slice(None), j if total.shape[-1] > 1 else slice(None)]
    part += sum_to_shape(block, part.shape)


@formula(
    family="softmax",
    shapes={**SHAPES, "do": "... n e", "dq": "... n d", "dk": "... m d", "dv": "... m e"},
    equation="P = exp(s - L),  dS = P * (dO v^T - <dO, out>),  dv += P^T dO,  dq += scale dS k,  dk += scale dS^T q, block by block",
    latex=r"P=e^{s-L},\quad dS=P\circ(dO\,v^\top-\langle dO,\mathrm{out}\rangle),\quad dv\mathrel{+}=P^\top dO,\quad "
          r"dq\mathrel{+}=\mathrm{scale}\,dS\,k,\quad dk\mathrel{+}=\mathrm{scale}\,dS^\top q",
    source="arXiv:2205.14135, algorithm 4; arXiv:2307.08691, algorithm 2",
    status="derived",
    bound="softmax gradients",
    grouped=("k", "v"),
)
def blockwise_attention_backward(
    q, k, v, do, *, query_block=128, key_block=128, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None,
    enable_gqa=False,
):
    """Reverse-mode gradients of `scaled_dot_product_attention` for the cotangent do (..., n, e) of its output, block by block.

    query_block, key_block: how many queries and keys are looked at together; they do not change the result.
    The other parameters are those of the forward function. Returns AttentionGradients (dq, dk, dv, dbias, dsink) with the shapes of the
    arrays they belong to; dbias and dsink are None where no bias or sink was given.
    Raises ValueError as the forward function does, and where a block size is no whole number >= 1.

    >>> q, k, v = np.ones((1, 1)), np.array([[0.0], [0.0], [0.0]]), np.array([[3.0], [0.0], [-3.0]])
    >>> blockwise_attention_backward(q, k, v, [[1.0]], key_block=2).dk
    array([[ 1.],
           [ 0.],
           [-1.]])
    """
    whole("query_block", query_block, least=1)
    whole("key_block", key_block, least=1)
    out, _, L = online_softmax_attention(
        q, k, v, query_chunk=query_block, key_chunk=key_block, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal,
        window=window, sink=sink, enable_gqa=enable_gqa, return_lse=True,
    )
    k_shared, v_shared = grouped_heads(q, k, v) if enable_gqa else (k, v)
    n, m = q.shape[-2], k.shape[-2]
    scale = default_scale(scale, q)
    do = np.broadcast_to(do, np.broadcast_shapes(do.shape, out.shape))
    L = finite_shift(L)                                                # a query that sees nothing: exp(-inf - 0) = 0

    queries, keys = chunks(n, query_block), chunks(m, key_block)
    sees = np.concatenate([sees_a_key(i, keys, n, m, mask, causal, window) for i in queries], axis=-1)
    D = np.where(sees, np.sum(do * out, axis=-1), 0.0)
    dQ, dK, dV = ([0.0] * len(blocks) for blocks in (queries, keys, keys))
    dbias = None if bias is None else np.zeros(bias.shape, np.result_type(D, L))
    for I, i in enumerate(queries):
        for J, j in enumerate(keys):
            q_i, k_j, do_i = q[..., i, :], k_shared[..., j, :], do[..., i, :]
            s = attention_logits(q_i, k_j, scale, softcap)
            visible = visible_block(i, j, n, m, mask, causal, window)
            logits = np.where(visible, s if bias is None else s + block_of(bias, i, j, n, m), -np.inf)
            P = np.where(visible, np.exp(logits - L[..., i, None]), 0.0)
            dP = do_i @ np.swapaxes(v_shared[..., j, :], -1, -2)
            dS = np.where(visible & (P != 0), P * (dP - D[..., i, None]), 0.0)
            dX = dS * np.where(visible, 1 - (s / softcap) ** 2, 0.0) if softcap else dS      # of the logits before the softcap
            dQ[I] = dQ[I] + scale * weighted_values(dX, k_j, visible)
            dK[J] = dK[J] + scale * weighted_values(np.swapaxes(dX, -1, -2), q_i, np.swapaxes(visible, -1, -2))
            dV[J] = dV[J] + weighted_values(np.swapaxes(P, -1, -2), do_i, np.swapaxes(visible, -1, -2))
            if bias is not None:
                add_block(dbias, i, j, dS)

    dq, dk, dv = (np.concatenate(blocks, axis=-2) for blocks in (dQ, dK, dV))
    if enable_gqa:
        dk, dv = sum_groups(dk, k.shape[-3]), sum_groups(dv, v.shape[-3])
    dsink = None if sink is None else sum_to_shape(-np.sum(np.exp(sink[..., None] - L) * D, axis=-1), sink.shape)
    return AttentionGradients(sum_to_shape(dq, q.shape), sum_to_shape(dk, k.shape), sum_to_shape(dv, v.shape), dbias, dsink)
