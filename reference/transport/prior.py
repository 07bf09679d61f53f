"""Attention with a prior: each query weighs the keys by their scores, at a cost for leaving a prior distribution.

    s_ij = scale <q_i, k_j>
    p_i  = argmin over distributions p of  -<p, s_i> + tau KL(p | pi_i)
    p_ij = pi_ij exp(s_ij / tau) / sum_l pi_il exp(s_il / tau) = softmax_j(s_ij / tau + log pi_ij)
    o_i  = sum_j p_ij v_j

where q (..., n, d), k (..., m, d), v (..., m, e), log pi (..., n, m), o (..., n, e); scale is 1/sqrt(d) unless given. The least value of
the objective is -tau log sum_j exp(s_ij / tau + log pi_ij).

This is entropic transport with one marginal only: rows are fixed, columns are free, and nothing has to be iterated.

Source: Litman, Guo, "You Need Better Attention Priors", arXiv:2601.15380, section 3, as reported by others; the closed form was derived
again and tried against direct minimisation. The authors' package (goat-attention) has tau = 1.

Conventions. The prior is not divided by tau: as tau grows, p tends to the prior, not to the uniform distribution. log_prior need not be
normalised, a constant per row changes nothing; -inf is a prior of 0, a key that the query cannot attend to, exactly as where mask is False.
The grouped heads, causal alignments and queries without keys (zeros) are those of `scaled_dot_product_attention`.

Identities. A constant log_prior is softmax attention with scale / tau. Where tau -> infinity the weights are the normalised prior. Adding
a constant to a row of log_prior changes nothing. No other distribution has a smaller objective.

Wrong versions met elsewhere: softmax((s + log pi) / tau), which weakens the prior with the scores; log(pi + 1e-9), which lets keys of
prior 0 in.
"""

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, grouped_heads, number, visible_keys
from attnspec.reference.softmax.weights import attention_logits, row_maximum, softmax_weights, weighted_values


@formula(
    family="transport",
    shapes={"q": "... n d", "k": "... m d", "v": "... m e", "log_prior": "... #n #m", "mask": "bool ... #n #m", "out": "... n e"},
    equation="out = softmax(scale q k^T / tau + log_prior) v",
    latex=r"o_i=\sum_j p_{ij}v_j,\quad p_{ij}=\frac{\pi_{ij}\,e^{s_{ij}/\tau}}{\sum_l\pi_{il}\,e^{s_{il}/\tau}}",
    source="arXiv:2601.15380, section 3",
    status="secondary",
    bound="softmax",
    grouped=("k", "v"),
    workspace="... n m",
)
def prior_attention(
    q, k, v, log_prior, *, tau=1.0, scale=None, mask=None, causal=False, enable_gqa=False, return_weights=False,
):
    """Attention of q (..., n, d) over k (..., m, d), v (..., m, e) with a prior over the keys; returns (..., n, e).

    log_prior: logarithm of the prior, broadcastable to (..., n, m), up to a constant per query; -inf for a key of prior 0.
    tau: > 0, the price of leaving the prior; divides the scores, not log_prior.  scale: multiplies the scores, default 1/sqrt(d).
    mask: bool, broadcastable to (..., n, m), True = may attend.  causal: False, "bottom-right" (or True) or "top-left".
    enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.
    return_weights: return an AttentionResult with weights (..., n, m).
    Raises ValueError where shapes do not match, heads differ without enable_gqa, or an option is out of range, naming the argument.

    >>> prior_attention([[0.0]], [[1.0], [1.0]], [[0.0], [4.0]], np.log([0.25, 0.75]))
    array([[3.]])
    """
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    tau = number("tau", tau, above=0)
    s = attention_logits(q, k, scale)
    visible = visible_keys(q.shape[-2], k.shape[-2], mask, causal) & (log_prior.real != -np.inf)
    s = (s - row_maximum(s, visible)[..., None]) / tau             # the largest is 0 whatever tau is
    p, _ = softmax_weights(s + np.where(log_prior.real == -np.inf, 0.0, log_prior), visible)
    out = weighted_values(p, v, visible)
    return AttentionResult(out, p) if return_weights else out
