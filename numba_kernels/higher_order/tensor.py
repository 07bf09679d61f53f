"""Twin of reference/higher_order/tensor.py, over tiles of pairs: memory of order n + m1 + m2 unless the weights are asked for.

A third set is folded into the first one: its products of keys and of values take m1 m2 (d + e) numbers.
"""

from attnspec.numba_kernels.higher_order.pairs import attend_pairs, seen_by, tensor_scale
from attnspec.numba_kernels.higher_order.pairs_backward import pairs_gradients
from attnspec.numba_kernels.twin import twin
from attnspec.reference.higher_order.tensor import TensorAttentionGradients
from attnspec.reference.inputs import AttentionResult


def khatri_rao(x, y):
    """The products x_j1 ∘ y_j2 (..., m1 m2, d) of the rows of x (..., m1, d) and y (..., m2, d), j2 running fastest."""
    product = x[..., :, None, :] * y[..., None, :, :]
    return product.reshape(*product.shape[:-3], x.shape[-2] * y.shape[-2], x.shape[-1])


@twin
def tensor_attention(q, k1, k2, v1, v2, *, k3=None, v3=None, scale=None, mask=None, causal=False, return_weights=False):
    """Tensor attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    The parameters are those of the reference.
    """
    for given, missing, name, shape in ((k3, v3, "v3", "(..., m3, e)"), (v3, k3, "k3", "(..., m3, d)")):
        if given is not None and missing is None:
            raise ValueError(f"{name}: expected an array of shape {shape} to go with the third set, got None")
    sizes = [k.shape[-2] for k in (k1, k2, k3) if k is not None]
    if k3 is not None:
        if mask is not None:
            raise ValueError("mask: expected None with a third set, got an array; tensor_attention_general takes masks of any order")
        k1, k2, v1, v2 = khatri_rao(k1, k2), k3, khatri_rao(v1, v2), v3
    seen = seen_by(q.shape[-2], sizes, mask, causal)
    sums = attend_pairs(q, k1, k2, v1, v2, seen, tensor_scale(scale, q.shape[-1]), return_weights=return_weights)
    if sums.weights is None:
        return sums.out
    return AttentionResult(sums.out, sums.weights.reshape(*sums.weights.shape[:-2], *sizes))


@twin
def tensor_attention_backward(q, k1, k2, v1, v2, do, *, scale=None, mask=None, causal=False):
    """Gradients of `tensor_attention` over pairs for the cotangent do (..., n, e); the parameters are those of the reference."""
    return TensorAttentionGradients(*pairs_gradients(q, k1, k2, v1, v2, do, mask, causal, tensor_scale(scale, q.shape[-1])))
