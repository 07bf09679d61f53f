from attnspec.reference.softmax.scaled_dot_product import (
    AttentionGradients,
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
)
from attnspec.reference.softmax.weights import attention_weights

__all__ = ["AttentionGradients", "attention_weights", "scaled_dot_product_attention", "scaled_dot_product_attention_backward"]
