"""Sinkhorn attention: weights that are normalised over rows and over columns in turn, in the limit an entropic transport plan.

    K^0 = exp(S / eps),  K^{l+1} = K^l with rows normalised (l even) or columns normalised (l odd)          S = scale q k^T

In the log domain, with marginals mu_i = 1/n and nu_j = 1/m, from u = v = 0, for the half-steps t = 0 .. T-1:

    t even:  u_i = eps (log mu_i - log sum_j exp((S_ij + v_j) / eps))
    t odd:   v_j = eps (log nu_j - log sum_i exp((S_ij + u_i) / eps))

    P_ij = exp((S_ij + u_i + v_j) / eps),  A = c P,  o = A V

where q (..., n, d), k (..., m, d), V (..., m, e), S, P, A (..., n, m), u (..., n), v (..., m), o (..., n, e); scale is 1/sqrt(d) unless
given. V are the values, v the potentials of the keys.

Backward, from the cotangent dP of P: dS = dP * P / eps, du and dv its row and column sums; then for t = T-1 .. 0, with W the rows of
exp((S + v) / eps) or the columns of exp((S + u) / eps) normalised to 1, as they stood at step t:

    t even:  dS_ij -= du_i W_ij,  dv_j -= sum_i du_i W_ij,  du = 0
    t odd:   dS_ij -= dv_j W_ij,  du_i -= sum_j dv_j W_ij,  dv = 0

Source: Sander, Ablin, Blondel, Peyré, "Sinkformers: Transformers with Doubly Stochastic Attention", arXiv:2110.11773, section 3, and the
authors' code (michaelsdr/sinkformers: ViT, text classification, set transformer). Equation numbers of the paper were not checked.

Conventions. n_iters counts half-steps T, as the authors' n_it does; rows come first, and an odd T ends on rows. The authors use T = 3 on
text and in the ViT class, 3 on cats and dogs, 5 on MNIST, 1 to 10 on ModelNet, with eps = 1. The plan has total mass 1: rows of 1/n after a
row step, columns of 1/m after a column step.
output_scaling "rows" is c = n (rows of A sum to 1 for odd T; the set transformer's self-attention), "cols" is c = 1/nu_j (columns of A sum
to 1 after a column step; c = m, as in the ViT and text code), "none" is c = 1 (the set transformer's cross-attention). For n = m the
first two are the same.
cost "squared_distance" takes S = -scale |q_i - k_j|^2, without a factor 1/2 (the set transformer's SAB variant, where queries and keys
are divided by the fourth root of the model's width, so that its scale is 1/sqrt of that width, not of the head's).
key_mask removes keys for all queries. key_marginal "valid" gives each remaining key nu_j = 1/(number of remaining keys); "all" leaves it
at 1/m, as the text code does, which masks by logits of -1e9 and resets their potentials. For odd T the plan is the same; for even
T the plan of "all" has a total mass below 1. Queries are never masked: padding queries keep their mass 1/n, as in that code.
A removed key has potential 0 and no mass, and so have a row or a column whose scores are all -inf.
tol stops after a row step that changed u by less than tol, measured as the code does: sum_i |u_i - u_i before|, averaged over all
leading axes; hence one decision for everything that is computed together, and results that depend on what is in the batch. The code uses
1e-12 (ViT, text) and 1e-2 (set transformer) and compares after every half-step, but only a row step changes what it compares.
gradient "unrolled" differentiates every half-step (ViT code); "detached" holds v constant (text code), so that only the last row step
counts: for odd T it is softmax's gradient with a bias v_j on the keys.
There is no causal form: the only doubly stochastic lower-triangular matrix is the identity, to which the iterates converge at a rate
of 1/T, whatever the scores. Scores may be -inf; where they leave no matrix with the marginals, the iterates do not converge.

Identities. T = 1 is softmax attention. For odd T, A ("rows") is softmax attention with a bias v_j / eps on the keys. Adding a_i to a
row of S changes no iterate; adding b_j to a column does not change the limit. A symmetric S has a symmetric limit. -|q - k|^2 / 2 and
<q, k> have the same limit. For growing eps all weights tend to 1/m.

Wrong versions met elsewhere: T counted in pairs of steps; columns first (POT's sinkhorn_log: its N iterations on the transposed scores are
T = 2N here); the factor c missing, or m where n is meant; masked keys at -1e9 without a reset of their potentials, which brings them back;
exponentials outside the log domain, which overflow for small eps; marginals in float32.
"""

from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, default_scale, number, one_of, sum_to_shape, whole
from attnspec.reference.softmax.scaled_dot_product import AttentionGradients
from attnspec.reference.softmax.weights import attention_logits, softmax_weights, weighted_values

COSTS = ("dot", "squared_distance")
SCALINGS = ("rows", "cols", "none")
MARGINALS = ("valid", "all")
GRADIENTS = ("unrolled", "detached")
FACTS: dict[str, Any] = {
    "source": "arXiv:2110.11773, section 3; michaelsdr/sinkformers",
    "workspace": "... n m",
}


class SinkhornPlan(NamedTuple):
    """A transport plan and how it was found."""

    plan: np.ndarray         # P (..., n, m)
    u: np.ndarray            # potentials of the rows (..., n), in units of the scores
    v: np.ndarray            # potentials of the columns (..., m)
    n_iters: int             # half-steps taken
    error: float             # mean over the leading axes of sum_i |change of u_i| in the last row step


class Problem(NamedTuple):
    """Scores and marginals: mu_i = 1/rows and nu_j = 1/columns at all that is visible."""

    S: np.ndarray            # (..., n, m), 0 where invisible
    visible: np.ndarray      # (..., n, m): a valid key and a score above -inf
    rows: int
    columns: np.ndarray      # (..., 1)
    eps: Any


def transport_problem(S, eps, key_mask=None, key_marginal="valid"):
    """The transport problem of scores S (..., n, m) under key_mask, broadcastable to (..., m)."""
    eps = number("eps", eps, above=0)
    if np.isinf(eps):
        raise ValueError(f"eps: expected a finite number, got {eps}")
    one_of("key_marginal", key_marginal, MARGINALS)
    n, m = S.shape[-2:]
    valid = np.ones(m, bool) if key_mask is None else np.broadcast_to(key_mask, np.broadcast_shapes(key_mask.shape, (m,)))
    visible = (S.real != -np.inf) & valid[..., None, :]
    columns = np.sum(valid, axis=-1, keepdims=True) if key_marginal == "valid" else np.array([m])
    return Problem(np.where(visible, S, 0.0), visible, max(n, 1), np.where(columns == 0, 1, columns), eps)


def row_weights(problem, v):
    """Rows of exp((S + v) / eps) normalised to 1, and the logarithms of their sums (..., n)."""
    return softmax_weights((problem.S + v[..., None, :]) / problem.eps, problem.visible)


def column_weights(problem, u):
    """Columns of exp((S + u) / eps) normalised to 1, and the logarithms of their sums (..., m)."""
    X = np.swapaxes((problem.S + u[..., :, None]) / problem.eps, -1, -2)
    W, L = softmax_weights(X, np.swapaxes(problem.visible, -1, -2))
    return np.swapaxes(W, -1, -2), L


def potentials(problem, log_marginal, L):
    """eps (log marginal - L), and 0 where there is nothing to normalise."""
    empty = L.real == -np.inf
    return np.where(empty, 0.0, problem.eps * (log_marginal - np.where(empty, 0.0, L)))


def half_steps(problem, relaxation=1.0):
    """Potentials (u, v) after each half-step, for ever; the column steps multiplied by the relaxation of an unbalanced problem."""
    u, v = np.zeros(problem.visible.shape[:-1]), np.zeros(problem.visible.shape[:-2] + problem.visible.shape[-1:])
    while True:
        u = potentials(problem, -np.log(problem.rows), row_weights(problem, v)[1])
        yield u, v
        v = relaxation * potentials(problem, -np.log(problem.columns), column_weights(problem, u)[1])
        yield u, v


def plan_of(problem, u, v):
    """P_ij = exp((S_ij + u_i + v_j) / eps), 0 where invisible."""
    X = (problem.S + u[..., :, None] + v[..., None, :]) / problem.eps
    return np.exp(np.where(problem.visible, X, -np.inf))


def solve(problem, n_iters, tol=None, relaxation=1.0):
    """The plan after n_iters half-steps, or fewer where a row step changes u by less than tol."""
    n_iters = whole("n_iters", n_iters, least=1)
    tol = None if tol is None else number("tol", tol, least=0)
    u_before, error = 0.0, 0.0
    for t, step in enumerate(islice(half_steps(problem, relaxation), n_iters)):
        u, v = step
        if t % 2 == 0:
            change = np.sum(abs((u - u_before).real), axis=-1)
            error = float(np.mean(change)) if change.size else 0.0
            u_before = u
            if tol is not None and error < tol:
                break
    return SinkhornPlan(plan_of(problem, u, v), u, v, t + 1, error)


def similarity(q, k, scale=None, cost="dot"):
    """Scores S (..., n, m): scale <q_i, k_j>, or -scale |q_i - k_j|^2."""
    if one_of("cost", cost, COSTS) == "dot":
        return attention_logits(q, k, scale)
    with np.errstate(invalid="ignore"):                                # an inf in a key that is masked
        return -default_scale(scale, q) * np.sum((q[..., :, None, :] - k[..., None, :, :]) ** 2, axis=-1)


def output_factor(problem, output_scaling):
    """c of A = c P."""
    one_of("output_scaling", output_scaling, SCALINGS)
    return {"rows": problem.rows, "cols": problem.columns[..., None], "none": 1.0}[output_scaling]


def refuse_causal(causal):
    if causal is not False:
        raise ValueError(f"causal: expected False, got {causal!r}; the only doubly stochastic lower-triangular matrix is the identity")


@formula(
    family="transport",
    shapes={"scores": "... n m", "key_mask": "bool ... #m", "plan": "... n m"},
    equation="P = exp((S + u + v) / eps),  u_i = eps (log 1/n - LSE_j((S_ij + v_j)/eps)),  "
             "v_j = eps (log 1/m - LSE_i((S_ij + u_i)/eps)) in turn",
    latex=r"P_{ij}=e^{(S_{ij}+u_i+v_j)/\varepsilon},\quad u_i=\varepsilon\log\frac{1/n}{\sum_j e^{(S_{ij}+v_j)/\varepsilon}},\quad"
          r" v_j=\varepsilon\log\frac{1/m}{\sum_i e^{(S_{ij}+u_i)/\varepsilon}}",
    **FACTS,
)
def sinkhorn_plan(scores, *, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", tol=None, return_info=False):
    """Transport plan P (..., n, m) of scores S (..., n, m), S = -cost, after n_iters half-steps; its total mass is 1.

    n_iters: half-steps T >= 1, rows first.  eps: > 0, the strength of the entropy.
    key_mask: bool, broadcastable to (..., m), True = a real key; the others are removed.
    key_marginal: "valid" spreads the mass over the real keys, "all" gives each of them 1/m.
    tol: stop after a row step in which sum_i |change of u_i|, averaged over the leading axes, is below it; None never stops early.
    return_info: return a SinkhornPlan with the plan, the potentials u and v, the half-steps taken and the last change of u.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> sinkhorn_plan(np.log([[1.0, 3.0], [1.0, 1.0]]), n_iters=1)
    array([[0.125, 0.375],
           [0.25 , 0.25 ]])
    """
    problem = transport_problem(scores, eps, key_mask, key_marginal)
    result = solve(problem, n_iters, tol)
    return result if return_info else result.plan


@formula(
    family="transport",
    shapes={"scores": "... n m", "dplan": "... n m", "key_mask": "bool ... #m", "dscores": "... n m"},
    equation="dS = dP * P / eps, then t = T-1..0: dS -= du W, dv -= W^T du, du = 0 (rows) or dS -= dv W, du -= W dv, dv = 0 (columns)",
    latex=r"dS=dP\circ P/\varepsilon;\quad dS_{ij}\mathrel{-}=du_iW_{ij},\ dv_j\mathrel{-}=\sum_i du_iW_{ij}\ \text{(rows)};\quad"
          r" dS_{ij}\mathrel{-}=dv_jW_{ij},\ du_i\mathrel{-}=\sum_j dv_jW_{ij}\ \text{(columns)}",
    **FACTS,
)
def sinkhorn_plan_backward(scores, dplan, *, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", gradient="unrolled"):
    """Reverse-mode gradient (..., n, m) of `sinkhorn_plan` by its scores, for the cotangent dplan (..., n, m) of the plan.

    gradient: "unrolled" differentiates all half-steps; "detached" holds the potentials v of the keys constant.
    The other parameters are those of the forward function.
    Raises ValueError as the forward function does.

    >>> sinkhorn_plan_backward(np.zeros((1, 2)), [[1.0, 0.0]], n_iters=1)          # the derivative of a softmax
    array([[ 0.25, -0.25]])
    """
    problem = transport_problem(scores, eps, key_mask, key_marginal)
    return sum_to_shape(plan_gradient(problem, dplan, n_iters, gradient), scores.shape)


def plan_gradient(problem, dP, n_iters, gradient):
    """dS (..., n, m) of a transport problem; dP may be anything where the plan is 0."""
    one_of("gradient", gradient, GRADIENTS)
    steps = list(islice(half_steps(problem), whole("n_iters", n_iters, least=1)))
    P = plan_of(problem, *steps[-1])
    with np.errstate(invalid="ignore"):
        dS = np.where(problem.visible & (P != 0), dP * P, 0.0) / problem.eps
    du, dv = dS.sum(axis=-1), dS.sum(axis=-2)
    for t in reversed(range(len(steps))):
        u, v = steps[t]
        if t % 2 == 0:
            step = du[..., :, None] * row_weights(problem, v)[0]
            dS, dv, du = dS - step, dv - step.sum(axis=-2), np.zeros_like(du)
        else:
            step = dv[..., None, :] * column_weights(problem, u)[0]
            if gradient == "unrolled":
                dS, du = dS - step, du - step.sum(axis=-1)
            dv = np.zeros_like(dv)
    return dS


@formula(
    family="transport",
    shapes={"q": "... n d", "k": "... m d", "v": "... m e", "key_mask": "bool ... #m", "out": "... n e"},
    equation="out = c P v,  P = exp((S + u + v) / eps) with rows and columns normalised in turn,  S = scale q k^T",
    latex=r"o=c\,P\,V,\quad P_{ij}=e^{(S_{ij}+u_i+v_j)/\varepsilon},\quad S=\mathrm{scale}\;q\,k^\top",
    bound="sinkhorn",
    **FACTS,
)
def sinkhorn_attention(
    q, k, v, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid", tol=None,
    causal=False, return_weights=False,
):
    """Sinkhorn attention of q (..., n, d) over k (..., m, d), v (..., m, e); returns (..., n, e).

    scale: multiplies the scores, default 1/sqrt(d).  cost: "dot" for S = scale q k^T, "squared_distance" for S = -scale |q_i - k_j|^2.
    output_scaling: the factor c of the plan: "rows" n, "cols" m (the number of real keys where key_marginal is "valid"), "none" 1.
    n_iters, eps, key_mask, key_marginal, tol: as in `sinkhorn_plan`.  causal: only False; there is no causal form.
    return_weights: return an AttentionResult with the weights A = c P (..., n, m).
    Raises ValueError where shapes do not match, for any causal but False, or where an option is out of range, naming the argument.

    >>> q, k, v = [[0.0], [1.0]], [[0.0], [np.log(4.0)]], [[0.0], [3.0]]
    >>> sinkhorn_attention(q, k, v, n_iters=1).round(6)                # softmax: the second key gets more than its share
    array([[1.5],
           [2.4]])
    >>> sinkhorn_attention(q, k, v, n_iters=51).round(6)               # both keys get the same: weights 2/3, 1/3 and 1/3, 2/3
    array([[1.],
           [2.]])
    """
    refuse_causal(causal)
    problem = transport_problem(similarity(q, k, scale, cost), eps, key_mask, key_marginal)
    A = output_factor(problem, output_scaling) * solve(problem, n_iters, tol).plan
    out = weighted_values(A, v, problem.visible)
    return AttentionResult(out, A) if return_weights else out


@formula(
    family="transport",
    shapes={"q": "... n d", "k": "... m d", "v": "... m e", "do": "... n e", "key_mask": "bool ... #m",
            "dq": "... n d", "dk": "... m d", "dv": "... m e"},
    equation="dP = c dO v^T, dS from the half-steps in reverse,  dq = scale dS k,  dk = scale dS^T q,  dv = A^T dO",
    latex=r"dP=c\,dO\,V^\top,\quad dq=\mathrm{scale}\,dS\,k,\quad dk=\mathrm{scale}\,dS^\top q,\quad dV=A^\top dO",
    **FACTS,
)
def sinkhorn_attention_backward(
    q, k, v, do, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid",
    causal=False, gradient="unrolled",
):
    """Reverse-mode gradients (dq, dk, dv) of `sinkhorn_attention` for the cotangent do (..., n, e) of its output.

    gradient: "unrolled" differentiates all half-steps; "detached" holds the potentials of the keys constant.
    The other parameters are those of the forward function, without tol: a stop has no derivative.
    Raises ValueError as the forward function does.

    >>> sinkhorn_attention_backward([[1.0]], [[0.0], [0.0]], [[1.0], [3.0]], [[1.0]], n_iters=1).dk        # softmax's
    array([[-0.5],
           [ 0.5]])
    """
    refuse_causal(causal)
    problem = transport_problem(similarity(q, k, scale, cost), eps, key_mask, key_marginal)
    visible = problem.visible
    c = output_factor(problem, output_scaling)
    with np.errstate(invalid="ignore"):
        dP = c * (do @ np.swapaxes(v, -1, -2))
    dS = plan_gradient(problem, dP, n_iters, gradient)
    A = c * solve(problem, n_iters).plan

    scale = default_scale(scale, q)
    back, seen = np.swapaxes(dS, -1, -2), np.swapaxes(visible, -1, -2)
    if cost == "dot":
        dq, dk = scale * weighted_values(dS, k, visible), scale * weighted_values(back, q, seen)
    else:
        real = np.where(seen.any(axis=-1, keepdims=True), k, 0.0)      # 0 * NaN of a masked key
        dq = 2 * scale * (weighted_values(dS, k, visible) - dS.sum(axis=-1)[..., None] * q)
        dk = 2 * scale * (weighted_values(back, q, seen) - back.sum(axis=-1)[..., None] * real)
    dv = weighted_values(np.swapaxes(A, -1, -2), do, seen)
    return AttentionGradients(sum_to_shape(dq, q.shape), sum_to_shape(dk, k.shape), sum_to_shape(dv, v.shape))
