from attnspec.reference.higher_order.tensor import (
    TensorAttentionGradients,
    tensor_attention,
    tensor_attention_backward,
    tensor_attention_general,
)
from attnspec.reference.higher_order.tensor_blocked import tensor_attention_blocked
from attnspec.reference.higher_order.tensor_poly import (
    PolynomialFactors,
    tensor_attention_poly,
    tensor_attention_poly_error,
    tensor_poly_features,
)
from attnspec.reference.higher_order.two_simplicial import two_simplicial_attention

__all__ = [
    "PolynomialFactors",
    "TensorAttentionGradients",
    "tensor_attention",
    "tensor_attention_backward",
    "tensor_attention_blocked",
    "tensor_attention_general",
    "tensor_attention_poly",
    "tensor_attention_poly_error",
    "tensor_poly_features",
    "two_simplicial_attention",
]
