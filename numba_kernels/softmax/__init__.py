"""Numba twins of the softmax formulas."""

from attnspec.numba_kernels.softmax.online import merge_attention_partials
from attnspec.numba_kernels.softmax.scaled_dot_product import scaled_dot_product_attention
from attnspec.numba_kernels.softmax.sink import attention_with_sink
from attnspec.numba_kernels.softmax.softmax_one import softmax_one_attention

__all__ = ["attention_with_sink", "merge_attention_partials", "scaled_dot_product_attention", "softmax_one_attention"]
