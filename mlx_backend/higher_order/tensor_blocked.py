"""Twin of reference/higher_order/tensor_blocked.py as a graph: a tile holds several of the first keys too, FIRST of them."""

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.blocks import chunks, finished, fold_block
from attnspec.mlx_backend.graph import INF, attention_logits, visible_keys
from attnspec.mlx_backend.higher_order.pairs import khatri_rao, tensor_scale
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, whole

FIRST = 16


@twin
def tensor_attention_blocked(q, k1, k2, v1, v2, *, block=32, scale=None, mask=None, causal=False, return_lse=False):
    """Tensor attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    The parameters are those of the reference.
    """
    whole("block", block, least=1)
    scale = tensor_scale(scale, q)
    n, m1, m2 = q.shape[-2], k1.shape[-2], k2.shape[-2]
    sees1, sees2 = visible_keys(n, m1, None, causal), visible_keys(n, m2, None, causal)
    pairs = None if mask is None else mx.broadcast_to(mask, np.broadcast_shapes(mask.shape, (n, m1, m2)))
    state = mx.array(-INF), mx.array(0.0), mx.array(0.0)
    for i in chunks(m1, FIRST):
        for j in chunks(m2, block):
            visible = None if pairs is None else pairs[..., i, j]
            if sees1 is not None and sees2 is not None:
                members = mx.logical_and(sees1[:, i, None], sees2[:, None, j])       # (n, first, second)
                visible = members if visible is None else mx.logical_and(visible, members)
            K, V = (khatri_rao((x1[..., i, :], x2[..., j, :]), visible) for x1, x2 in ((k1, k2), (v1, v2)))
            flat = None if visible is None else visible.reshape(*visible.shape[:-2], K.shape[-2])
            state = fold_block(state, attention_logits(q, K, flat, scale), V, flat)
    out, lse = finished(*state)
    return AttentionResult(out, lse=mx.broadcast_to(lse, out.shape[:-1])) if return_lse else out
