"""Sinkhorn attention: weights that are normalised over rows and over columns in turn, in the limit an entropic transport plan.

    K^0 = exp(S / eps),  K^{l+1} = K^l with rows normalised (l even) or columns normalised (l odd)          S = scale q k^T

Only normalised rows or columns are ever formed, in logarithms. With mu_i = 1/n, nu_j = 1/m, X = S / eps and u = v = 0 at the start, for
the half-steps t = 0 .. T-1, a row or column of W being that of exp(X) divided by its sum:

    t even:  c_i = log mu_i - log sum_j exp(X_ij),  X_ij += c_i,  u_i += eps c_i,  P_ij = exp(X_ij) = mu_i W_ij
    t odd:   c_j = log nu_j - log sum_i exp(X_ij),  X_ij += c_j,  v_j += eps c_j,  P_ij = exp(X_ij) = nu_j W_ij

    P_ij = exp((S_ij + u_i + v_j) / eps),  A = c P,  o = A V

where q (..., n, d), k (..., m, d), V (..., m, e), S, P, A (..., n, m), u (..., n), v (..., m), o (..., n, e); scale is 1/sqrt(d) unless
given. V are the values, v the potentials of the keys.

Backward, from the cotangent dP of P: dS = dP * P / eps, du and dv its row and column sums; then for t = T-1 .. 0, with W the normalised
rows or columns of step t:

    t even:  dS_ij -= du_i W_ij,  dv_j -= sum_i du_i W_ij,  du = 0
    t odd:   dS_ij -= dv_j W_ij,  du_i -= sum_j dv_j W_ij,  dv = 0

At the limit of the iterations no step has to be gone through: with G = dP * P,

    [diag(P 1)  P; P^T  diag(P^T 1)] [a; b] = [G 1; G^T 1],  dS_ij = (G_ij - P_ij (a_i + b_j)) / eps

where the matrix has a kernel, (1, -1), which a_i + b_j does not see.

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
counts: for odd T it is softmax's gradient with a bias v_j on the keys. "implicit" differentiates the limit (derived here, in no author's
code): right where n_iters was enough to converge, and meaningless where not.
The potentials are sums of what the steps add: beside scores of 1e16 they have no digits left for log n, while the plan keeps all of its.
There is no causal form: the only doubly stochastic lower-triangular matrix is the identity, to which the iterates converge at a rate
of 1/T, whatever the scores. Scores may be -inf; where they leave no matrix with the marginals, the iterates do not converge.

Identities. T = 1 is softmax attention. For odd T, A ("rows") is softmax attention with a bias v_j / eps on the keys. Adding a_i to a
row of S changes no iterate; adding b_j to a column does not change the limit. A symmetric S has a symmetric limit. -|q - k|^2 / 2 and
<q, k> have the same limit. For growing eps all weights tend to 1/m. At the limit "implicit" and "unrolled" gradients are equal.

Wrong versions met elsewhere: T counted in pairs of steps; columns first (POT's sinkhorn_log: its N iterations on the transposed scores are
T = 2N here); the factor c missing, or m where n is meant; masked keys at -1e9 without a reset of their potentials, which brings them back;
exponentials outside the log domain, which overflow for small eps; the plan put together from S + u + v, which cancel where scores are
large; marginals in float32.
"""

from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, default_scale, number, one_of, sum_to_shape, whole
from attnspec.reference.softmax.scaled_dot_product import AttentionGradients
from attnspec.reference.softmax.weights import attention_logits, row_maximum, softmax_weights, weighted_values

COSTS = ("dot", "squared_distance")
SCALINGS = ("rows", "cols", "none")
MARGINALS = ("valid", "all")
GRADIENTS = ("unrolled", "detached", "implicit")
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
    eps = number("eps", eps, above=0, finite=True)
    one_of("key_marginal", key_marginal, MARGINALS)
    n, m = S.shape[-2:]
    valid = np.ones(m, bool) if key_mask is None else np.broadcast_to(key_mask, np.broadcast_shapes(key_mask.shape, (m,)))
    visible = (S.real != -np.inf) & valid[..., None, :]
    columns = np.sum(valid, axis=-1, keepdims=True) if key_marginal == "valid" else np.array([m])
    return Problem(np.where(visible, S, 0.0), visible, max(n, 1), np.where(columns == 0, 1, columns), eps)


class HalfStep(NamedTuple):
    """What a row or a column step leaves."""

    P: np.ndarray            # the plan (..., n, m)
    W: np.ndarray            # its rows, or columns, normalised to 1
    u: np.ndarray            # (..., n)
    v: np.ndarray            # (..., m)
    c: np.ndarray            # what was added to a row, or a column, of X


def normalised(X, visible):
    """Rows of exp(X) normalised to 1, their logarithms, and the logarithms of the sums (..., n), -inf for a row without mass."""
    top = row_maximum(X, visible)
    X = np.where(visible, X - top[..., None], -np.inf)             # before log sum exp, whose digits a large X would swallow
    W, L = softmax_weights(X, visible)
    return W, X - np.where(L.real == -np.inf, 0.0, L)[..., None], top + L


def half_steps(problem, rho=np.inf):
    """The HalfStep after each row and each column step, for ever; a finite rho relaxes the column steps of an unbalanced problem."""
    S, visible, rows, columns, eps = problem
    log_mu, log_nu = -np.log(rows), -np.log(columns)
    relaxation = 1.0 if np.isinf(rho) else rho / (rho + eps)
    top = row_maximum(S, visible)
    X = (S - top[..., None]) / eps                                 # adding a_i to a row changes no step: u takes it up at once
    u, v = 0.0 - top, np.zeros(visible.shape[:-2] + visible.shape[-1:])
    while True:
        W, log_W, L = normalised(X, visible)
        c = np.where(L.real == -np.inf, 0.0, log_mu - L)
        u, X, P = u + eps * c, log_W + log_mu, W / rows
        yield HalfStep(P, W, u, v, c)

        W, log_W, L = normalised(np.swapaxes(X, -1, -2), np.swapaxes(visible, -1, -2))
        W, log_W = np.swapaxes(W, -1, -2), np.swapaxes(log_W, -1, -2)
        c = np.where(L.real == -np.inf, 0.0, log_nu - L)
        excess = (v + eps * c) / (rho + eps)                       # v / rho: how far a relaxed column stays below log nu
        v, X, P = relaxation * (v + eps * c), log_W + (log_nu - excess)[..., None, :], W * (np.exp(-excess) / columns)[..., None, :]
        yield HalfStep(P, W, u, v, c)


def solve(problem, n_iters, tol=None, rho=np.inf):
    """The plan after n_iters half-steps, or fewer where a row step changes u by less than tol."""
    n_iters = whole("n_iters", n_iters, least=1)
    tol = None if tol is None else number("tol", tol, least=0)
    error = 0.0
    for t, step in enumerate(islice(half_steps(problem, rho), n_iters)):
        if t % 2 == 0:
            change = np.sum(abs((step.u if t == 0 else problem.eps * step.c).real), axis=-1)
            error = float(np.mean(change)) if change.size else 0.0
            if tol is not None and error < tol:
                break
    return SinkhornPlan(step.P, step.u, step.v, t + 1, error)


def similarity(q, k, scale=None, cost="dot"):
    """Scores S (..., n, m): scale <q_i, k_j>, or -scale |q_i - k_j|^2."""
    if one_of("cost", cost, COSTS) == "dot":
        return attention_logits(q, k, scale)
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
    bound="transport plan",
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
    bound="transport plan gradient",
    **FACTS,
)
def sinkhorn_plan_backward(scores, dplan, *, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", gradient="unrolled"):
    """Reverse-mode gradient (..., n, m) of `sinkhorn_plan` by its scores, for the cotangent dplan (..., n, m) of the plan.

    gradient: "unrolled" differentiates all half-steps; "detached" holds the potentials v of the keys constant; "implicit" differentiates
    the limit, which the n_iters half-steps must have reached.
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
    P = steps[-1].P
    dS = np.where(problem.visible & (P != 0), dP * P, 0.0)         # times eps, by which it is divided in the end
    if gradient == "implicit":
        return (dS - P * common_part(P, dS)) / problem.eps
    du, dv = dS.sum(axis=-1), dS.sum(axis=-2)
    for t in reversed(range(len(steps))):
        if t % 2 == 0:
            step = du[..., :, None] * steps[t].W
            dS, dv, du = dS - step, dv - step.sum(axis=-2), np.zeros_like(du)
        else:
            step = dv[..., None, :] * steps[t].W
            if gradient == "unrolled":
                dS, du = dS - step, du - step.sum(axis=-1)
            dv = np.zeros_like(dv)
    return dS / problem.eps


def common_part(P, G):
    """a_i + b_j (..., n, m) with [diag(P 1) P; P^T diag(P^T 1)] [a; b] = [G 1; G^T 1]: G / P as a sum, by weighted least squares."""
    n, m = P.shape[-2:]
    upper = np.concatenate([P.sum(axis=-1)[..., None] * np.eye(n), P], axis=-1)
    lower = np.concatenate([np.swapaxes(P, -1, -2), P.sum(axis=-2)[..., None] * np.eye(m)], axis=-1)
    matrix = np.concatenate([upper, lower], axis=-2)
    matrix = np.where(np.isfinite(matrix), matrix, 0.0)                # a plan that is not finite stays so in P (a_i + b_j)
    sums = np.concatenate([G.sum(axis=-1), G.sum(axis=-2)], axis=-1)[..., None]
    inverse = np.linalg.pinv(matrix.real, hermitian=True)
    ab = inverse @ sums
    ab = (ab + inverse @ (sums - matrix @ ab))[..., 0]                 # refined once: to rounding, and for the imaginary part of matrix
    return ab[..., :n, None] + ab[..., None, n:]


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
    bound="sinkhorn gradients",
    **FACTS,
)
def sinkhorn_attention_backward(
    q, k, v, do, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid",
    causal=False, gradient="unrolled",
):
    """Reverse-mode gradients (dq, dk, dv) of `sinkhorn_attention` for the cotangent do (..., n, e) of its output.

    gradient: "unrolled" differentiates all half-steps; "detached" holds the potentials of the keys constant; "implicit" differentiates
    the limit, which the n_iters half-steps must have reached.
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
    do = np.broadcast_to(do, np.broadcast_shapes(do.shape, (*v.shape[:-2], 1, 1)))        # one for each head of the output
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
