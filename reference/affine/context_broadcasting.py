"""Context broadcasting: half of every token is replaced by the mean of all tokens, a uniform attention without a parameter.

    CB(x)_i   = (x_i + mean_j x_j) / 2
    CB_S(x)_i = x_i + lam * mean_j x_j                lam one number per channel

where x (..., n, c) are the tokens of a sequence, the class token among them, lam (c,).

Source: Hyeon-Woo et al., "Scratching Visual Transformer's Back with Uniform Attention", ICCV 2023, arXiv:2210.08457. CB is the formula as
several independent re-implementations have it, not checked against the authors' code; CB_S is from memory only.

Conventions. It stands at the end of the MLP: after its second linear map and dropout, before the residual is added. No mask: every token
counts in the mean. No tokens: an empty result.

Identities. CB is the matrix (I + 11^T/n)/2, uniform attention averaged with the identity, with eigenvalues 1 on constant sequences and
1/2 on those of mean 0. It keeps the mean of the tokens. A single token is left alone. lam = 0 leaves everything alone in CB_S. CB = CB_S
with lam = 1, halved.

Wrong versions met elsewhere: the mean over channels instead of tokens; x + mean without the half; the residual added before.
"""


from attnspec.reference.formula import formula


@formula(
    family="affine",
    shapes={"x": "... n c", "lam": "c", "out": "... n c"},
    equation="out_i = (x_i + mean_j x_j) / 2;  with lam: out_i = x_i + lam * mean_j x_j",
    latex=r"\mathrm{CB}(x)_i=\tfrac12\Big(x_i+\tfrac1n\sum_j x_j\Big)",
    source="arXiv:2210.08457, by its re-implementations",
    status="secondary",
    bound="broadcasting",
)
def context_broadcasting(x, *, lam=None):
    """Context broadcasting of the tokens x (..., n, c); returns (..., n, c).

    lam: (c,) weights of the mean, one per channel, for the scaled form CB_S; without it CB, the average of x and its mean.
    Raises ValueError where shapes do not match, naming the argument.

    >>> context_broadcasting([[1.0], [2.0], [6.0]])
    array([[2. ],
           [2.5],
           [4.5]])
    """
    mean = x.sum(axis=-2, keepdims=True) / max(x.shape[-2], 1)
    return (x + mean) / 2 if lam is None else x + lam * mean
