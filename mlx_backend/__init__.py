"""Twins of the formulas for MLX: graphs of mlx.core operations, which run on Apple silicon, on CUDA and on CPUs.

    from attnspec.mlx_backend import scaled_dot_product_attention

Names, parameters and defaults are those of `attnspec.reference`; results are mx.arrays in the dtype of the arguments (float32, float16,
bfloat16), computed in float32 and rounded once. The functions can be compiled, differentiated and mapped by mx.compile, mx.grad and
mx.vmap. A function's module, and MLX with it, is imported when the function is first asked for.
"""

import importlib
from typing import Any

MODULES = {
    "softmax.scaled_dot_product": ("scaled_dot_product_attention", "scaled_dot_product_attention_backward"),
    "softmax.softmax_one": ("softmax_one_attention",),
    "softmax.sink": ("attention_with_sink",),
    "softmax.online": ("merge_attention_partials", "online_softmax_attention"),
    "softmax.multi_query": ("multi_query_attention",),
    "transport.sinkhorn": ("sinkhorn_attention", "sinkhorn_attention_backward", "sinkhorn_plan", "sinkhorn_plan_backward"),
    "transport.unbalanced": ("sinkhorn_unbalanced_plan",),
    "transport.prior": ("prior_attention",),
    "transport.goat": ("goat_attention", "goat_augmented_qk", "goat_head_attention"),
    "transport.flow": ("flow_attention", "flow_attention_causal"),
    "signed.cog": ("cog_attention", "cog_attention_backward", "cog_weights"),
    "affine.affine_scaled": ("affine_scaled_attention", "affine_scaled_attention_backward"),
    "affine.context_broadcasting": ("context_broadcasting",),
    "affine.gated": ("gated_attention",),
    "affine.energy_gated": ("energy_gated_attention",),
    "higher_order.tensor": ("tensor_attention", "tensor_attention_backward"),
    "higher_order.tensor_blocked": ("tensor_attention_blocked",),
    "higher_order.tensor_poly": ("tensor_attention_poly",),
    "higher_order.two_simplicial": ("two_simplicial_attention",),
    "memory.hopfield": ("hopfield_energy", "hopfield_retrieve", "hopfield_retrieve_backward", "hopfield_update"),
    "memory.binary": ("hopfield_binary",),
    "memory.dense": ("dense_associative_memory",),
    "memory.sdm": ("sdm_read", "sdm_update", "sdm_write"),
    "memory.sdm_circle": ("sdm_circle_intersection",),
    "memory.sdm_attention": ("sdm_attention",),
}
WHERE = {name: module for module, names in MODULES.items() for name in names}

__all__ = list(WHERE)


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"attnspec.mlx_backend has no {name!r}")
    function = getattr(importlib.import_module(f"attnspec.mlx_backend.{WHERE[name]}"), name)
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
