"""Twin of reference/higher_order/tensor_blocked.py: its tiles have a size of their own, `block` is checked and changes nothing."""

from attnspec.numba_kernels.higher_order.pairs import attend_pairs, seen_by, tensor_scale
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, whole


@twin
def tensor_attention_blocked(q, k1, k2, v1, v2, *, block=32, scale=None, mask=None, causal=False, return_lse=False):
    """Tensor attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    The parameters are those of the reference.
    """
    whole("block", block, least=1)
    seen = seen_by(q.shape[-2], (k1.shape[-2], k2.shape[-2]), mask, causal)
    sums = attend_pairs(q, k1, k2, v1, v2, seen, tensor_scale(scale, q.shape[-1]))
    return AttentionResult(sums.out, lse=sums.lse) if return_lse else sums.out
