from attnspec.reference.softmax.blockwise_backward import blockwise_attention_backward
from attnspec.reference.softmax.multi_query import multi_query_attention
from attnspec.reference.softmax.online import (
    AttentionPartial,
    attention_partial,
    finish_attention_partial,
    merge_attention_partials,
    online_softmax_attention,
)
from attnspec.reference.softmax.ring import ring_attention
from attnspec.reference.softmax.scaled_dot_product import (
    AttentionGradients,
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
)
from attnspec.reference.softmax.sink import attention_with_sink
from attnspec.reference.softmax.softmax_one import softmax_one_attention
from attnspec.reference.softmax.weights import attention_weights

__all__ = [
    "AttentionGradients",
    "AttentionPartial",
    "attention_partial",
    "attention_weights",
    "attention_with_sink",
    "blockwise_attention_backward",
    "finish_attention_partial",
    "merge_attention_partials",
    "multi_query_attention",
    "online_softmax_attention",
    "ring_attention",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "softmax_one_attention",
]
