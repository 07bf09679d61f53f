"""Classical Hopfield network: bits of +1 and -1 that align with their local fields until nothing flips.

    W = (1/d) sum_mu x_mu x_mu^T,  W_ii = 0                          Hebbian weights
    h_i = sum_j W_ij s_j - b_i                                       local field of bit i, b its threshold
    s_i <- sgn(h_i)                                                  one bit after the other, or all at once
    E(s) = -1/2 sum_ij W_ij s_i s_j + sum_i b_i s_i                  energy

where patterns x (..., m, d) and state s (..., d) have entries -1 and +1, weights W (..., d, d), threshold b (..., d).

Source: Hopfield, "Neural networks and physical systems with emergent collective computational abilities", PNAS 79 (1982); with threshold:
Ramsauer et al., arXiv:2008.02217, section on binary networks, and the authors' blog, eqs. (1) to (3). Asynchronous recall agrees visit by
visit with the independent package hopfieldkit 0.1.0.

Conventions. A sweep visits every bit once, in the order 0 .. d-1 unless another is given; recall repeats sweeps until one flips nothing, or
max_sweeps are done. ties="keep" leaves a bit whose field is exactly 0 as it is (textbooks), "plus" sets it to +1 (hopfieldkit).
`hopfield_binary` sums its fields in whole numbers, so that a tie is a tie; `hopfield_binary_update` takes any weights, as they are, and a
field that is 0 only up to rounding is no tie. The factor 1/d changes nothing but the energies and what a threshold means;
normalise=False leaves it out, as the blog does. The blog keeps W_ii, which only adds the constant -m/2 to the normalised energy.
Energies are traced before the first and after every visit of a bit, or after every sweep where all bits change at once.

Identities. Under asynchronous updates with symmetric weights and W_ii >= 0 the energy never rises. Without threshold E(-s) = E(s).
A single stored pattern, and its negative, are fixed points. Synchronous updates end in a fixed point or in a cycle of length 2.
Capacity: about 0.138 d random patterns with few wrong bits, d / (2 log d) of which one, d / (4 log d) all, are free of errors.

Wrong versions met elsewhere: W_ii kept in the dynamics, which freezes bits; sgn(0) = 0, which leaves the states -1 and +1; synchronous
updates called asynchronous; bits 0 and 1 put into a rule made for -1 and +1; ties decided by the rounding of W.
"""

from typing import Any, NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import one_of, whole

MODES = ("asynchronous", "synchronous")
TIES = ("keep", "plus")
SIZES = {"m": 3, "d": 16}
FACTS: dict[str, Any] = {
    "family": "memory",
    "source": "Hopfield, PNAS 79 (1982); arXiv:2008.02217, section on binary networks",
    "discrete": True,
    "sizes": SIZES,
}


def visits(order, d, mode):
    """The bits in the order of their visits."""
    one_of("mode", mode, MODES)
    if order is None:
        return range(d)
    if mode == "synchronous":
        raise ValueError("order: expected None where mode is 'synchronous', which has no order")
    if np.any((order < 0) | (order >= d)):
        raise ValueError(f"order: expected numbers of bits from 0 to {d - 1}, got {order[(order < 0) | (order >= d)][0]}")
    return order


def check_field(weights, threshold):
    """Refuse what leaves a bit without a field: NaN, and infinite weights, which may cancel; an infinite threshold pins its bit."""
    if not np.all(np.isfinite(weights)):
        raise ValueError(f"weights: expected finite numbers, got {weights[~np.isfinite(weights)][0]}")
    if threshold is not None and np.any(np.isnan(threshold)):
        raise ValueError("threshold: expected numbers, got nan")


def sweep(s, field, mode, ties, order):
    """States of one sweep: after every visit, or one state where all bits change at once. field(s, i) is the field of bit i."""
    one_of("ties", ties, TIES)

    def aligned(i):
        h = field(s, i)
        return np.where(h == 0, 1 if ties == "plus" else s[..., i], np.where(h > 0, 1, -1))

    if mode == "synchronous":
        return [np.stack([aligned(i) for i in order], axis=-1) if order else s]
    states = []
    for i in order:
        s = s.copy()
        s[..., i] = aligned(i)
        states.append(s)
    return states


def settle(s, field, mode, ties, order, max_sweeps):
    """States visited in sweeps until one flips nothing, the number of sweeps and whether that happened, for each state of the batch."""
    trace, n_sweeps, going = [s], np.zeros(s.shape[:-1], int), np.ones(s.shape[:-1], bool)
    for _ in range(whole("max_sweeps", max_sweeps)):
        if not np.any(going):
            break
        before = trace[-1]
        trace += sweep(before, field, mode, ties, order)
        n_sweeps = n_sweeps + going
        going = np.any(trace[-1] != before, axis=-1)
    return trace, n_sweeps, ~going


class BinaryRetrieval(NamedTuple):
    """What a recall ended in and how it got there."""

    out: np.ndarray                  # (..., d) the last state
    energies: np.ndarray             # (..., 1 + visits) energy at the start and after every visit (of every sweep, if synchronous)
    n_sweeps: np.ndarray             # (...) sweeps made, the last one included, which flips nothing
    converged: np.ndarray            # bool (...): whether there was such a last one


def hebbian(patterns):
    """d W in whole numbers: sum_mu x_mu x_mu^T without its diagonal."""
    return np.swapaxes(patterns, -1, -2) @ patterns * (1 - np.eye(patterns.shape[-1], dtype=int))


@formula(
    shapes={"patterns": "spins ... m d", "weights": "... d d"},
    equation="W = (1/d) sum_mu x_mu x_mu^T,  W_ii = 0",
    latex=r"W_{ij}=\frac1d\sum_\mu x^\mu_ix^\mu_j,\quad W_{ii}=0",
    **FACTS,
)
def hopfield_binary_weights(patterns, *, normalise=True):
    """Hebbian weights W (..., d, d) of patterns (..., m, d) with entries -1 and +1; their diagonal is 0.

    normalise: divide by the number d of bits.
    Raises ValueError where an entry is neither -1 nor +1, naming the argument.

    >>> hopfield_binary_weights([[1, 1], [1, -1], [1, 1]])
    array([[0. , 0.5],
           [0.5, 0. ]])
    """
    d = patterns.shape[-1] if one_of("normalise", normalise, (True, False)) else 1
    return hebbian(patterns) / max(d, 1)


def draw_weights(sizes, rng):
    lead = tuple(sizes[axis] for axis in ("b", "h") if axis in sizes)
    d = sizes["d"]
    spins = 2 * rng.integers(0, 2, (*lead, 4, d)) - 1
    return {"state": spins[..., 0, :], "weights": hebbian(spins[..., 1:, :]) / d}


def spin_energy(s, W, b):
    """E (...) of states s under weights W and threshold b."""
    return -np.sum((W @ s[..., None])[..., 0] * s, axis=-1) / 2 + np.sum(b * s, axis=-1)


@formula(
    shapes={"state": "spins ... d", "weights": "... d d", "threshold": "... #d", "energy": "..."},
    equation="E(s) = -1/2 sum_ij W_ij s_i s_j + sum_i b_i s_i",
    latex=r"E(s)=-\tfrac12\sum_{ij}W_{ij}s_is_j+\sum_ib_is_i",
    draw=draw_weights,
    **FACTS,
)
def hopfield_binary_energy(state, weights, threshold=None):
    """Energy E (...) of states (..., d) with entries -1 and +1 under weights (..., d, d).

    threshold: b, broadcastable to (..., d), default 0.
    Raises ValueError where shapes do not match or an entry is neither -1 nor +1, naming the argument.

    >>> hopfield_binary_energy([1, -1], [[0.0, 0.5], [0.5, 0.0]])
    np.float64(0.5)
    """
    return spin_energy(state, weights, 0.0 if threshold is None else threshold)


@formula(
    shapes={"state": "spins ... d", "weights": "... d d", "threshold": "... #d", "order": "int t", "out": "spins ... d"},
    equation="s_i <- sgn(sum_j W_ij s_j - b_i)",
    latex=r"s_i\leftarrow\operatorname{sgn}\Bigl(\sum_jW_{ij}s_j-b_i\Bigr)",
    draw=draw_weights,
    **FACTS,
)
def hopfield_binary_update(state, weights, *, threshold=None, mode="asynchronous", ties="keep", order=None):
    """One sweep over the bits of states (..., d) with entries -1 and +1 under weights (..., d, d); returns (..., d).

    threshold: b, broadcastable to (..., d), default 0.
    mode: "asynchronous" updates one bit after the other, "synchronous" all at once.
    ties: "keep" leaves a bit whose field is 0, "plus" sets it to +1.  order: (t,) bits in the order of their visits, default 0 .. d-1.
    Raises ValueError where shapes do not match, an entry is neither -1 nor +1, a weight is not finite, a threshold is NaN or an option is
    unknown, naming the argument.

    >>> hopfield_binary_update([1, -1], [[0.0, 0.5], [0.5, 0.0]])
    array([-1, -1])
    >>> hopfield_binary_update([1, -1], [[0.0, 0.5], [0.5, 0.0]], mode="synchronous")
    array([-1,  1])
    """
    check_field(weights, threshold)
    order = visits(order, state.shape[-1], mode)
    b = 0.0 if threshold is None else threshold
    lead = np.broadcast_shapes(state.shape[:-1], weights.shape[:-2], np.shape(b)[:-1])
    s = np.broadcast_to(state, (*lead, state.shape[-1]))
    b = np.broadcast_to(b, s.shape)
    return ([s] + sweep(s, lambda s, i: np.sum(weights[..., i, :] * s, axis=-1) - b[..., i], mode, ties, order))[-1].copy()


@formula(
    shapes={"patterns": "spins ... m d", "state": "spins ... d", "threshold": "... #d", "order": "int t", "out": "spins ... d"},
    equation="s_i <- sgn(sum_j W_ij s_j - b_i) until nothing flips,  W = (1/d) sum_mu x_mu x_mu^T,  W_ii = 0",
    latex=r"s_i\leftarrow\operatorname{sgn}\Bigl(\sum_jW_{ij}s_j-b_i\Bigr),\quad W_{ij}=\frac1d\sum_\mu x^\mu_ix^\mu_j,\quad W_{ii}=0",
    bound="exact",
    **FACTS,
)
def hopfield_binary(
    patterns, state, *, threshold=None, mode="asynchronous", ties="keep", order=None, max_sweeps=100, normalise=True, return_info=False,
):
    """Recall of stored patterns (..., m, d) from states (..., d), all with entries -1 and +1; returns the last states (..., d).

    threshold: b, broadcastable to (..., d), default 0.
    mode: "asynchronous" updates one bit after the other, "synchronous" all at once, which may end in a cycle of two states.
    ties: "keep" leaves a bit whose field is 0, "plus" sets it to +1.  order: (t,) bits in the order of their visits, default 0 .. d-1.
    max_sweeps: stop after so many sweeps, if none before flips nothing.  normalise: whether the weights have the factor 1/d.
    return_info: return a BinaryRetrieval with the energies on the way, the number of sweeps and whether the state settled.
    Raises ValueError where shapes do not match, an entry is neither -1 nor +1, a threshold is NaN or an option is out of range, naming the
    argument.

    >>> hopfield_binary([[1, 1, 1, 1, 1, 1], [1, 1, 1, -1, -1, -1]], [1, 1, -1, 1, 1, 1])
    array([1, 1, 1, 1, 1, 1])
    """
    d = state.shape[-1]
    order = visits(order, d, mode)
    H, scale = hebbian(patterns), max(d, 1) if one_of("normalise", normalise, (True, False)) else 1
    check_field(H, threshold)
    b = 0.0 if threshold is None else threshold
    lead = np.broadcast_shapes(state.shape[:-1], patterns.shape[:-2], np.shape(b)[:-1])
    s = np.broadcast_to(state, (*lead, d)).copy()
    b = np.broadcast_to(b, s.shape)

    # The sum in whole numbers and one division: exactly 0, or exactly b_i, where it should be.
    def field(s, i):
        return np.sum(H[..., i, :] * s, axis=-1) / scale - b[..., i]

    trace, n_sweeps, converged = settle(s, field, mode, ties, order, max_sweeps)
    if not return_info:
        return trace[-1]
    energies = np.stack([spin_energy(s, H / scale, b) for s in trace], axis=-1)
    return BinaryRetrieval(trace[-1], energies, n_sweeps, converged)
