"""The duality of entropic transport: potentials, and the two values that meet where Sinkhorn's iterations converge.

    primal(P)  = -sum_ij P_ij S_ij + eps sum_ij P_ij log P_ij                       0 log 0 = 0
    dual(u, v) = sum_i mu_i u_i + sum_j nu_j v_j + eps (1 - sum_ij K_ij)            K_ij = exp((S_ij + u_i + v_j) / eps)

where S, P, K (..., n, m), u (..., n), v (..., m), values (...); mu_i = 1/n, nu_j = 1/m.

For every u and v, and every P >= 0 with row sums mu and column sums nu,

    primal(P) - dual(u, v) = eps sum_ij (P_ij log(P_ij / K_ij) - P_ij + K_ij) >= 0

so that the dual value of any potentials is a lower bound of the primal value of any plan (weak duality), and both are equal exactly
where P = K, at the limit of Sinkhorn's iterations.

Source: duality of entropic transport as in Peyré, Cuturi, "Computational Optimal Transport", arXiv:1803.00567, section 4, derived here for
these potentials; the iterations are those of arXiv:2110.11773, section 3. The two values were not taken from any author's code.

Conventions. Potentials are in the units of the scores and belong to P = exp((S + u + v) / eps), as in Sinkhorn's iterations here.
The mass term eps (1 - sum K) is 0 after any row or column step of `sinkhorn_potentials` (key_marginal="valid"), where K has mass 1 and
the dual value is <mu, u> + <nu, v>; without it that sum alone bounds nothing, as it grows without limit with u. Gauge: (u + c, v - c)
has the same value.
With the entropy taken as KL(P | mu x nu), as often elsewhere, potentials are u + eps log n and v + eps log m, and both values grow by
eps (log n + log m). A masked key, and a position with a score of -inf, carry no mass; nu is 1/(number of real keys).
There is no duality for key_marginal="all" where keys are masked: rows then hold more mass than columns, no plan has both marginals, and
<mu, u> + <nu, v> grows without limit along (u + c, v - c). `sinkhorn_potentials` gives the potentials of its steps all the same.
Values of plans without the marginals mu and nu can be computed, but are bounded by nothing.

Identities. Weak duality, with the gap above. Each half-step raises the dual value (it maximises it over u, or over v). At convergence
primal(P) = dual(u, v) = <mu, u> + <nu, v>.

Wrong versions met elsewhere: the mass term left out for potentials that are no iterates; POT's log_u and log_v taken for u and v (they are
u / eps and v / eps); eps sum P (log P - 1), which is lower by eps.
"""

from typing import NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import number
from attnspec.reference.transport.sinkhorn import solve, transport_problem


class SinkhornPotentials(NamedTuple):
    """Potentials of rows and columns, in the units of the scores."""

    u: np.ndarray            # (..., n)
    v: np.ndarray            # (..., m)


@formula(
    family="transport",
    shapes={"scores": "... n m", "key_mask": "bool ... #m", "u": "... n", "v": "... m"},
    equation="u_i = eps (log 1/n - LSE_j((S_ij + v_j)/eps)),  v_j = eps (log 1/m - LSE_i((S_ij + u_i)/eps)) in turn",
    latex=r"u_i=\varepsilon\log\frac{1/n}{\sum_j e^{(S_{ij}+v_j)/\varepsilon}},\quad"
          r" v_j=\varepsilon\log\frac{1/m}{\sum_i e^{(S_{ij}+u_i)/\varepsilon}}",
    source="arXiv:2110.11773, section 3; michaelsdr/sinkformers",
    workspace="... n m",
)
def sinkhorn_potentials(scores, *, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", tol=None):
    """Potentials u (..., n) and v (..., m) of scores S (..., n, m), S = -cost, after n_iters half-steps.

    n_iters, eps, key_mask, key_marginal, tol: as in `sinkhorn_plan`, whose plan is exp((S + u + v) / eps).
    A removed key, and a row or column whose scores are all -inf, have potential 0.
    Returns SinkhornPotentials. Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> u, v = sinkhorn_potentials(np.log([[1.0, 3.0], [1.0, 1.0]]), n_iters=1)
    >>> np.exp(-u), v                                      # n times the row sums of exp(S)
    (array([8., 4.]), array([0., 0.]))
    """
    result = solve(transport_problem(scores, eps, key_mask, key_marginal), n_iters, tol)
    return SinkhornPotentials(result.u, result.v)


@formula(
    family="transport",
    shapes={"scores": "... n m", "u": "... n", "v": "... m", "key_mask": "bool ... #m", "value": "..."},
    equation="sum_i u_i / n + sum_j v_j / m + eps (1 - sum_ij exp((S_ij + u_i + v_j) / eps))",
    latex=r"\frac1n\sum_i u_i+\frac1m\sum_j v_j+\varepsilon\Bigl(1-\sum_{ij}e^{(S_{ij}+u_i+v_j)/\varepsilon}\Bigr)",
    source="arXiv:1803.00567, section 4, for the potentials of arXiv:2110.11773",
    status="derived",
    workspace="... n m",
)
def sinkhorn_dual_value(scores, u, v, *, eps=1.0, key_mask=None):
    """Dual value (...) of potentials u (..., n), v (..., m) for scores S (..., n, m), S = -cost: a lower bound of every primal value.

    u, v: any real numbers, in the units of the scores.  eps: > 0, the strength of the entropy.
    key_mask: bool, broadcastable to (..., m), True = a real key; the others have no mass, and their v counts for nothing.
    -inf where the exponentials overflow. Raises ValueError where shapes do not match or eps is not positive and finite, naming it.

    >>> float(sinkhorn_dual_value([[2.0, 2.0]], [-2.0], [np.log(0.5), np.log(0.5)]).round(12))     # one plan, (1/2, 1/2): it is reached
    -2.69314718056
    """
    problem = transport_problem(scores, eps, key_mask)
    real = True if key_mask is None else key_mask
    X = (problem.S + u[..., :, None] + v[..., None, :]) / problem.eps
    mass = np.sum(np.exp(np.where(problem.visible, X, -np.inf)), axis=(-2, -1))
    mu_u = np.sum(u, axis=-1) / problem.rows
    nu_v = np.sum(np.where(real, v, 0.0) / problem.columns, axis=-1)
    return mu_u + nu_v + problem.eps * (1 - mass)


def draw_plan(sizes, rng):
    lead = tuple(sizes[axis] for axis in ("b", "h") if axis in sizes)
    plan = rng.random((*lead, sizes["n"], sizes["m"])) + 0.1
    return {"plan": plan / plan.sum(axis=(-2, -1), keepdims=True), "scores": rng.standard_normal(plan.shape)}


@formula(
    family="transport",
    shapes={"plan": "... n m", "scores": "... n m", "value": "..."},
    equation="-sum_ij P_ij S_ij + eps sum_ij P_ij log P_ij",
    latex=r"-\sum_{ij}P_{ij}S_{ij}+\varepsilon\sum_{ij}P_{ij}\log P_{ij}",
    source="arXiv:1803.00567, section 4, for the scores of arXiv:2110.11773",
    status="derived",
    kinks="P_ij = 0",
    draw=draw_plan,
    workspace="... n m",
)
def sinkhorn_primal_value(plan, scores, *, eps=1.0):
    """Primal value (...) of a plan P (..., n, m) for scores S (..., n, m), S = -cost: transport cost minus eps times the entropy.

    plan: entries >= 0; where they are 0 the score does not matter.  eps: > 0, the strength of the entropy.
    Raises ValueError where shapes do not match, for a negative entry of the plan, or an eps that is not positive and finite, naming
    the argument.

    >>> float(sinkhorn_primal_value([[0.5, 0.5]], [[2.0, 2.0]]).round(12))
    -2.69314718056
    """
    eps = number("eps", eps, above=0, finite=True)
    if np.any(plan.real < 0):
        raise ValueError(f"plan: expected entries >= 0, got {plan.real.min()}")
    used = plan != 0
    terms = plan * (eps * np.log(np.where(used, plan, 1.0)) - np.where(used, scores, 0.0))
    return np.sum(terms, axis=(-2, -1))
