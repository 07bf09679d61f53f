"""Dense associative memory: bits of +1 and -1 that lower an energy in which the overlaps with the patterns stand to a high power.

    E(s) = - sum_mu F(<x_mu, s>)                F(z) = z^p,  z^p where z > 0 and else 0 (rectified),  or exp(z)
    s_i <- sgn[ E(s with s_i = -1) - E(s with s_i = +1) ]
         = sgn[ sum_mu F(x_mu,i + h_mu,i) - F(-x_mu,i + h_mu,i) ],   h_mu,i = sum_{k != i} x_mu,k s_k

where patterns x (..., m, d) and state s (..., d) have entries -1 and +1.

Source: Krotov and Hopfield, "Dense Associative Memory for Pattern Recognition", arXiv:1606.01164 (polynomial, rectified); Demircigil et
al., "On a model of associative memory with huge storage capacity", arXiv:1702.01929 (exponential). The formulas are as the authors of
arXiv:2008.02217 restate them in their blog, eqs. (9) to (17), the rectified one from memory; not checked against the two papers or code.

Conventions. One sweep visits every bit once, in the order 0 .. d-1 unless another is given; by default there is one. A bit for which both
energies are equal stays. Signs are exact: powers are taken in whole numbers, and exponentials are counted per overlap, with the largest
taken out, so that neither rounding nor overflow decides. An energy beyond float64 is infinite; for the logarithm of the exponential one
use `hopfield_energy`.

Identities. Asynchronous updates never raise the energy. p = 2 is the classical network with Hebbian weights and zero diagonal, and
E = -d m - sum_{i != j} (sum_mu x_mu,i x_mu,j) s_i s_j. For odd p the energy is odd in s, for even p even. The exponential energy is
-exp(lse(1, X s)), that is -m exp(d - E') with E' the energy of the continuous network at β = 1. A single pattern is a fixed point for odd p
and the exponential, for even p with its negative too.
Capacity: of the order d^(p-1) patterns, d^(p-1) / (2 (2p-3)!! log d) free of errors; 2^(d/2) with the exponential.

Wrong versions met elsewhere: the field sum_mu x_mu,i F'(<x_mu, s>), a gradient step with the bit's own part left in, which differs from
the energy difference; F of the overlap divided by d, which changes the exponential; exponentials summed without taking out the largest.
"""

from typing import Any

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import one_of, whole
from attnspec.reference.memory.binary import SIZES, BinaryRetrieval, settle, visits

INTERACTIONS = ("polynomial", "exponential")
FACTS: dict[str, Any] = {
    "family": "memory",
    "source": "arXiv:1606.01164; arXiv:1702.01929",
    "status": "secondary",
    "discrete": True,
    "sizes": SIZES,
}


def interaction_options(degree, rectified, interaction):
    whole("degree", degree, least=1)
    one_of("rectified", rectified, (True, False))
    if one_of("interaction", interaction, INTERACTIONS) == "exponential" and rectified:
        raise ValueError("rectified: expected False where interaction is 'exponential', got True")


def power(z, degree, rectified):
    """F(z) for whole z, as Python's integers, which do not overflow."""
    F = np.asarray(z).astype(object) ** int(degree)
    return np.where(z > 0, F, 0) if rectified else F


def sign(total):
    return np.asarray(total > 0).astype(int) - np.asarray(total < 0).astype(int)


def as_float(total):
    """Whole numbers of any size as float64, infinite beyond its range."""

    def convert(whole_number):
        try:
            return float(whole_number)
        except OverflowError:
            return np.inf if whole_number > 0 else -np.inf

    return np.vectorize(convert, otypes=[float])(total)


@formula(
    shapes={"state": "spins ... d", "patterns": "spins ... m d", "energy": "..."},
    equation="E(s) = -sum_mu F(<x_mu, s>),  F(z) = z^p or exp(z)",
    latex=r"E(s)=-\sum_\mu F(\langle x^\mu,s\rangle),\quad F(z)=z^p\ \text{or}\ e^z",
    **FACTS,
)
def dense_associative_memory_energy(state, patterns, *, degree=3, rectified=False, interaction="polynomial"):
    """Energy E (...) of states (..., d) in the memory of patterns (..., m, d), all with entries -1 and +1.

    degree: p >= 1, whole.  rectified: F = 0 for negative overlaps.  interaction: "polynomial", or "exponential", which has no degree.
    Raises ValueError where shapes do not match, an entry is neither -1 nor +1 or an option is out of range, naming the argument.

    >>> dense_associative_memory_energy([1, 1, 1], [[1, 1, 1], [1, -1, -1]])       # -(3^3 + (-1)^3)
    array(-26.)
    """
    interaction_options(degree, rectified, interaction)
    overlap = np.sum(patterns * state[..., None, :], axis=-1)
    if interaction == "exponential":
        return np.asarray(-np.sum(np.exp(overlap), axis=-1))
    return as_float(-np.sum(power(overlap, degree, rectified), axis=-1))


@formula(
    shapes={"state": "spins ... d", "patterns": "spins ... m d", "order": "int t", "out": "spins ... d"},
    equation="s_i <- sgn[sum_mu F(x_mu,i + h_mu,i) - F(-x_mu,i + h_mu,i)],  h_mu,i = sum_{k != i} x_mu,k s_k",
    latex=r"s_i\leftarrow\operatorname{sgn}\Bigl[\sum_\mu F(x^\mu_i+h_{\mu i})-F(-x^\mu_i+h_{\mu i})\Bigr],"
          r"\quad h_{\mu i}=\sum_{k\ne i}x^\mu_ks_k",
    bound="exact",
    **FACTS,
)
def dense_associative_memory(
    state, patterns, *, degree=3, rectified=False, interaction="polynomial", mode="asynchronous", order=None, max_sweeps=1,
    return_info=False,
):
    """Update of states (..., d) in the memory of patterns (..., m, d), all with entries -1 and +1; returns the last states (..., d).

    degree, rectified, interaction: as in `dense_associative_memory_energy`.
    mode: "asynchronous" updates one bit after the other, "synchronous" all at once.  order: (t,) bits in the order of their visits.
    max_sweeps: stop after so many sweeps, default 1, if none before flips nothing.
    return_info: return a BinaryRetrieval with the energies on the way, the number of sweeps and whether the state settled.
    Raises ValueError where shapes do not match, an entry is neither -1 nor +1 or an option is out of range, naming the argument.

    >>> dense_associative_memory([1, -1, 1, 1], [[1, 1, 1, 1], [1, 1, -1, -1]])
    array([1, 1, 1, 1])
    """
    interaction_options(degree, rectified, interaction)
    d = state.shape[-1]
    order = visits(order, d, mode)
    lead = np.broadcast_shapes(state.shape[:-1], patterns.shape[:-2])
    levels = np.arange(-d, d + 1)

    def field(s, i):
        x = patterns[..., i]
        h = np.sum(patterns * s[..., None, :], axis=-1) - x * s[..., i, None]
        if interaction == "polynomial":
            return sign(np.sum(power(x + h, degree, rectified) - power(-x + h, degree, rectified), axis=-1))
        # exp(x + h) - exp(-x + h) = 2 sinh(1) x exp(h): the sign of sum_level count exp(level), in which equal terms cancel exactly.
        count = np.sum(np.where(h[..., None] == levels, x[..., None], 0), axis=-2)
        top = np.max(np.where(count != 0, levels, -d), axis=-1, keepdims=True)
        return np.sum(count * np.exp(np.minimum(levels - top, 0)), axis=-1)

    s = np.broadcast_to(state, (*lead, d)).copy()
    trace, n_sweeps, converged = settle(s, field, mode, "keep", order, max_sweeps)
    if not return_info:
        return trace[-1]
    options = {"degree": degree, "rectified": rectified, "interaction": interaction}
    energies = np.stack([dense_associative_memory_energy(s, patterns, **options) for s in trace], axis=-1)
    return BinaryRetrieval(trace[-1], energies, n_sweeps, converged)
