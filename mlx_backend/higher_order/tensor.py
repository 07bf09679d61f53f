"""Twin of reference/higher_order/tensor.py: a kernel over pairs, or a graph over all tuples with memory of order n m1 m2."""

import functools

from attnspec.mlx_backend.graph import gradients_of
from attnspec.mlx_backend.higher_order.pairs import attend_pairs, attend_tuples, tensor_scale, visible_tuples
from attnspec.mlx_backend.twin import twin
from attnspec.reference.higher_order.tensor import TensorAttentionGradients
from attnspec.reference.inputs import AttentionResult


@twin
def tensor_attention(q, k1, k2, v1, v2, *, k3=None, v3=None, scale=None, mask=None, causal=False, return_weights=False):
    """Tensor attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    The parameters are those of the reference.
    """
    for given, missing, name, shape in ((k3, v3, "v3", "(..., m3, e)"), (v3, k3, "k3", "(..., m3, d)")):
        if given is not None and missing is None:
            raise ValueError(f"{name}: expected an array of shape {shape} to go with the third set, got None")
    if k3 is not None and mask is not None:
        raise ValueError("mask: expected None with a third set, got an array; tensor_attention_general takes masks of any order")
    if k3 is None and not return_weights:
        return attend_pairs(q, k1, k2, v1, v2, tensor_scale(scale, q), mask, causal)
    keys, values = [k1, k2] + [k3] * (k3 is not None), [v1, v2] + [v3] * (v3 is not None)
    visible = visible_tuples(q.shape[-2], [k.shape[-2] for k in keys], mask, causal)
    out, P = attend_tuples(q, keys, values, tensor_scale(scale, q), visible)
    return AttentionResult(out, P) if return_weights else out


@twin
def tensor_attention_backward(q, k1, k2, v1, v2, do, *, scale=None, mask=None, causal=False):
    """Gradients of `tensor_attention` over pairs for the cotangent do (..., n, e); the parameters are those of the reference."""
    visible = visible_tuples(q.shape[-2], (k1.shape[-2], k2.shape[-2]), mask, causal)
    forward = functools.partial(output_of, tensor_scale(scale, q), visible)
    return TensorAttentionGradients(*gradients_of(forward, do, q=q, k1=k1, k2=k2, v1=v1, v2=v2).values())


def output_of(scale, visible, q, k1, k2, v1, v2):
    return attend_tuples(q, (k1, k2), (v1, v2), scale, visible)[0]
