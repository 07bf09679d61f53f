"""Twin of reference/transport/sinkhorn.py. Logits S log2(e) / eps and potentials are kept in the arrays' dtype, sums of exponentials
within a safe range, so that no problem overflows.

Streaming: each half-step is one pass of softmax tiles that keeps nothing but the log-sum-exp, with the other side's potential as a bias;
the last is fused with the values. Memory of order n + m. With a scratch matrix of a head's logits (taken up to SCRATCH_BYTES), a row step
and the column step after it are one pass over it (sinkhorn_tiles.py). Gradients go through the half-steps again, a block of rows at a time
(sinkhorn_backward.py).

|q - k|^2 is |q|^2 - 2 <q, k> + |k|^2 around the mean of the keys: far from the origin the squares would swallow their difference. Queries
or keys with infinities in them take the way of the plan, where each entry's visibility is known.
"""

import math
from typing import NamedTuple

import numpy as np

from attnspec.numba_kernels.arrays import heads_of, summed_like, without_axes
from attnspec.numba_kernels.exponential import LN_2, LOG2_E
from attnspec.numba_kernels.matrix import packed_columns, packed_rows, panel_width
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.softmax.tiles import FAR, QUERIES, attend_blocks, chunks_finite
from attnspec.numba_kernels.transport.sinkhorn_backward import Steps, plan_gradient, qkv_gradients
from attnspec.numba_kernels.transport.sinkhorn_tiles import ROWS, Potentials, logits, plan_rows, scaled_scores
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, default_scale, number, one_of, sum_to_shape, whole
from attnspec.reference.softmax.scaled_dot_product import AttentionGradients
from attnspec.reference.transport.sinkhorn import SinkhornPlan

COSTS = ("dot", "squared_distance")
SCALINGS = ("rows", "cols", "none")
MARGINALS = ("valid", "all")
GRADIENTS = ("unrolled", "detached", "implicit")
LACKS = {"gradient=implicit": "it solves a dense system of n + m unknowns, which is NumPy's work in the reference"}

SCRATCH_BYTES = 2**28        # the largest matrix of one head that is kept; a larger problem is streamed
GROUP_BYTES = 2**24          # heads are taken together up to so much, which stays in the last cache


class Options(NamedTuple):
    """The options of a transport problem, checked."""

    steps: int
    eps: float
    key_marginal: str
    tol: float | None = None
    cost: str = "dot"
    output_scaling: str = "rows"

    @classmethod
    def checked(cls, n_iters, eps, key_marginal, tol=None, cost="dot", output_scaling="rows"):
        eps = float(number("eps", eps, above=0, finite=True))
        one_of("key_marginal", key_marginal, MARGINALS)
        one_of("cost", cost, COSTS)
        one_of("output_scaling", output_scaling, SCALINGS)
        steps = whole("n_iters", n_iters, least=1)
        tol = None if tol is None else float(number("tol", tol, least=0))
        return cls(steps, eps, str(key_marginal), tol, str(cost), str(output_scaling))


def refuse_causal(causal):
    if causal is not False:
        raise ValueError(f"causal: expected False, got {causal!r}; the only doubly stochastic lower-triangular matrix is the identity")


def refuse_implicit(gradient):
    if one_of("gradient", gradient, GRADIENTS) == "implicit":
        raise ValueError(f"gradient: 'implicit' has no twin, as {LACKS['gradient=implicit']}")


def valid_keys(key_mask, m):
    """A key mask with its axis of keys."""
    return np.ones(m, np.bool_) if key_mask is None else np.broadcast_to(key_mask, np.broadcast_shapes(key_mask.shape, (m,)))


def key_counts(masks, mask_of, heads, m, key_marginal):
    """How many keys share the mass of the columns, (heads,) whole numbers, at least 1."""
    counted = masks.size and key_marginal == "valid"
    return np.maximum(masks[mask_of, 0].sum(axis=-1) if counted else np.full(heads, m), 1)


def logs_of_marginals(n, columns, kind):
    """Natural logarithms of 1/n and of 1/columns (heads,)."""
    return -np.log(kind.type(max(n, 1))), -np.log(columns.astype(kind))


# --- attention -----------------------------------------------------------------------------------------------------------------------


@twin
def sinkhorn_attention(
    q, k, v, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid", tol=None,
    causal=False, return_weights=False,
):
    """Sinkhorn attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    refuse_causal(causal)
    out, weights = attention(q, k, v, n_iters=n_iters, eps=eps, scale=scale, cost=cost, output_scaling=output_scaling, key_mask=key_mask,
                             key_marginal=key_marginal, tol=tol, return_weights=return_weights)
    return AttentionResult(out, weights) if return_weights else out


def attention(
    q, k, v, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid", tol=None,
    return_weights=False, scratch_bytes=SCRATCH_BYTES,
):
    """(out, weights or None) of Sinkhorn attention; a head's scratch matrix is kept up to scratch_bytes, 0 streams always."""
    options = Options.checked(n_iters, eps, key_marginal, tol, cost, output_scaling)
    scale = float(default_scale(scale, q))
    problem = Problem.of(q, k, scale, key_mask, options)
    if problem is None:
        return attention_of_scores(q, k, v, scale, key_mask, options, return_weights)
    (n, e), m = (q.shape[-2], v.shape[-1]), k.shape[-2]
    lead = np.broadcast_shapes(problem.lead, v.shape[:-2])
    of = np.broadcast_to(np.arange(problem.heads).reshape(problem.lead), lead).reshape(-1)     # values may have more heads than scores

    taken, u, potential = solve(problem, scratch_bytes)
    out, lse, weights = attend(problem, of, *heads_of(v, lead), potential, return_weights)
    factor = {"rows": max(n, 1), "cols": problem.columns[of], "none": 1}[options.output_scaling]
    if taken % 2 == 0:
        share = np.exp(np.where(np.isneginf(lse), 0, lse + u[of])) * np.reshape(factor, (-1, 1))
    else:                                                          # the rows of the plan sum to 1/n, those of `out` to 1
        share = np.reshape(factor, (-1, 1)) / max(n, 1)
    if taken % 2 == 0 or options.output_scaling != "rows":
        share = share[..., None].astype(out.dtype)
        out *= share
        weights = np.where(weights == 0, weights, weights * share) if return_weights else weights      # hidden where a row is NaN
    out = out.reshape(*lead, n, e)
    return out, without_axes(weights.reshape(*lead, n, m), problem.lead) if return_weights else None


class Side(NamedTuple):
    """Queries or keys: (b, n, d), which of the b a head uses, and packed rows."""

    array: np.ndarray
    of: np.ndarray
    panels: np.ndarray


class Problem(NamedTuple):
    """The scores of an attention, their heads flattened, and what a solution needs of them. Potentials are natural, in units of eps."""

    lead: tuple[int, ...]
    q: Side
    k: Side
    mask: np.ndarray               # (b, 1, m) of the keys, or without entries
    mask_of: np.ndarray
    scale: np.floating             # of the products of q and k, divided by eps
    columns: np.ndarray            # (heads,) the keys that share the columns' mass
    start: np.ndarray              # (heads, m) potentials of the keys at the start
    of_u: np.ndarray               # (heads, n) what of the scores is in no product, and u takes up
    options: Options

    @property
    def heads(self):
        return math.prod(self.lead)

    @classmethod
    def of(cls, q, k, scale, key_mask, options):
        """The problem, or None where an infinity may be seen."""
        m, kind = k.shape[-2], q.dtype
        lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], () if key_mask is None else key_mask.shape[:-1])
        (queries, q_of), (keys, k_of) = heads_of(q, lead), heads_of(k, lead)
        masks, mask_of = np.zeros((0, 1, m), np.bool_), np.zeros(math.prod(lead), np.int64)
        if key_mask is not None:
            masks, mask_of = heads_of(valid_keys(key_mask, m)[..., None, :], lead)
        squares = options.cost == "squared_distance"
        if masks.size and (squares or not np.isfinite(keys).all()):             # whatever stands at a masked key
            keys, k_of = np.where(masks[mask_of, 0][..., None], keys[k_of], kind.type(0)), np.arange(len(k_of))
        if any(np.isinf(x).any() for x in (queries, keys) if not np.isfinite(x).all()):
            return None
        if squares:
            queries, keys = around(middle(keys, masks[mask_of, 0] if masks.size else np.True_), queries, keys)
        start, of_u = np.zeros((len(k_of), m), kind), np.zeros((len(k_of), q.shape[-2]), kind)
        if squares:
            start = (-scale / options.eps * np.sum(np.square(keys, dtype=np.float64), axis=-1)).astype(kind)[k_of]
            of_u = (scale / options.eps * np.sum(np.square(queries, dtype=np.float64), axis=-1)).astype(kind)[q_of]
        factor = kind.type((2 if squares else 1) * scale / options.eps)
        columns = key_counts(masks, mask_of, len(k_of), m, options.key_marginal)
        return cls(lead, Side(queries, q_of, packed_rows(queries)), Side(keys, k_of, packed_rows(keys)), masks, mask_of, factor, columns,
                   start, of_u, options)


def middle(keys, valid):
    """The mean (d,) of the valid keys (b, m, d) in float64, NaN left out."""
    seen = np.isfinite(keys) & valid[..., None]
    return np.sum(keys, axis=(0, 1), where=seen, dtype=np.float64) / np.maximum(seen.sum(axis=(0, 1)), 1)


def around(centre, *arrays):
    return (np.subtract(x, centre).astype(x.dtype) for x in arrays)


def attend(problem, of, v, v_of, potential, return_weights):
    """Softmax attention with a potential of the keys: out, lse (heads, n), weights; `of` is the head of the problem that a head uses."""
    (n, m), kind, heads = (problem.q.array.shape[1], problem.k.array.shape[1]), potential.dtype, len(of)
    out, lse = np.empty((heads, n, v.shape[-1]), kind), np.empty((heads, n), kind)
    weights = np.empty((heads, n, m) if return_weights else (0, 0, 0), kind)
    run(problem, problem.q, problem.k, of, packed_columns(v), v_of, chunks_finite(v), potential, problem.mask, out, lse, weights)
    return out, lse, weights


def log_sum_exp(problem, towards_keys, potential):
    """Log-sum-exp over the keys (heads, n), or over the queries (heads, m), with a potential added to what is summed over."""
    one, other = (problem.q, problem.k) if towards_keys else (problem.k, problem.q)
    rows, columns, kind, heads = one.array.shape[1], other.array.shape[1], potential.dtype, problem.heads
    lse, nothing = np.empty((heads, rows), kind), np.empty((1, 0, columns, panel_width(kind)), kind)
    mask = problem.mask if towards_keys else np.swapaxes(problem.mask, -1, -2)
    run(problem, one, other, np.arange(heads), nothing, np.zeros(heads, np.int64), np.ones((1, columns), np.bool_), potential, mask,
        np.empty((heads, rows, 0), kind), lse, np.empty((0, 0, 0), kind))
    return lse


def run(problem, one, other, of, values, v_of, finite, potential, mask, out, lse, weights):
    kind = potential.dtype
    in_parallel(
        attend_blocks, len(of) * -(-one.array.shape[1] // QUERIES), one.array, one.of[of], other.panels, other.of[of],
        other.array.shape[1], values, v_of, finite, potential[:, None], of, mask, problem.mask_of[of], np.zeros(0, kind), problem.scale,
        kind.type(0), -FAR, FAR, 0, out, lse, np.empty((0, 0, 0), kind), weights,
        work=len(of) * one.array.shape[1] * math.prod(other.array.shape[1:]),
    )


# --- potentials ----------------------------------------------------------------------------------------------------------------------


class Trail(NamedTuple):
    """The potentials after each row step and around each column step, which gradients go back along."""

    u: np.ndarray                  # (row steps, heads, n)
    v: np.ndarray                  # (1 + row steps, heads, m)


def solve(problem, scratch_bytes=SCRATCH_BYTES, trail=None):
    """Half-steps taken, and the potentials u (heads, n) and v (heads, m) with which the last of them is to be made or has been made.

    After an odd number of half-steps v is what the last row step needs; u is not used, and only a trail makes that step.
    """
    n, m, kind, options = problem.q.array.shape[1], problem.k.array.shape[1], problem.start.dtype, problem.options
    matrix = n * m * kind.itemsize * (problem.heads if options.tol is not None else 1)
    if options.steps > 1 and 0 < matrix <= scratch_bytes:
        return solve_with_scratch(problem, trail)
    log_mu, log_nu = logs_of_marginals(n, problem.columns, kind)
    u, v = np.zeros((problem.heads, n), kind), problem.start.copy()
    for t in range(options.steps):
        if t % 2:
            lse = log_sum_exp(problem, False, u)
            v = np.where(np.isneginf(lse), kind.type(0), log_nu[:, None] - lse)
        elif t < options.steps - 1 or trail:
            lse = log_sum_exp(problem, True, v)
            new = np.where(np.isneginf(lse), kind.type(0), log_mu - lse)
            if small_change(new + problem.of_u if t == 0 else new - u, options):
                return t + 1, u, v
            u = new
        if trail:
            trail.u[t // 2], trail.v[t // 2 + t % 2] = u, v
    return options.steps, u, v


def small_change(change, options):
    """Whether a row step that changed u by so much, in units of eps, is the last."""
    if options.tol is None or not change.size:
        return options.tol is not None and options.tol > 0.0
    return bool(np.mean(options.eps * np.abs(change).sum(axis=-1, dtype=np.float64)) < options.tol)


def solve_with_scratch(problem, trail=None):
    """`solve` with the logits of a few heads at a time in memory; all heads together where `tol` looks at all of them."""
    n, m, kind, options = problem.q.array.shape[1], problem.k.array.shape[1], problem.start.dtype, problem.options
    group = problem.heads if options.tol is not None else max(1, GROUP_BYTES // (n * m * kind.itemsize))
    u, v = np.zeros((problem.heads, n), kind), problem.start.copy()
    log_mu, log_nu = (x * kind.type(LOG2_E) for x in logs_of_marginals(n, problem.columns, kind))
    X = np.empty((min(group, problem.heads), n, problem.k.panels.shape[1] * panel_width(kind)), kind)
    in_base_two, natural = kind.type(LOG2_E), kind.type(LN_2)
    for first in range(0, problem.heads, group):
        some = slice(first, min(first + group, problem.heads))
        in_parallel(logits, (some.stop - first) * -(-n // QUERIES), problem.q.array, problem.q.of[some], problem.k.panels,
                    problem.k.of[some], m, problem.mask, problem.mask_of[some], kind.type(problem.scale * LOG2_E), X,
                    work=(some.stop - first) * n * m * problem.k.array.shape[2])
        potentials = Potentials(X, v[some] * in_base_two)
        for t in range(0, options.steps - (options.steps % 2 and not trail), 2):
            change = potentials.step(X, log_mu, log_nu[some], columns=t + 1 < options.steps)
            change = (potentials.u * natural + problem.of_u[some]) if t == 0 else change * natural
            if small_change(change, options):
                return t + 1, u, potentials.v_before[:, :m] * natural
            if trail:
                trail.u[t // 2, some] = potentials.u * natural
                trail.v[t // 2, some], trail.v[t // 2 + 1, some] = (x[:, :m] * natural for x in (potentials.v_before, potentials.v))
        u[some], v[some] = potentials.u * natural, potentials.v[:, :m] * natural
    return options.steps, u, v


# --- scores --------------------------------------------------------------------------------------------------------------------------


def scores_of(q, k, scale, cost):
    """Scores S (..., n, m), a feature at a time for squared distances."""
    if cost == "dot":
        return scale * (q @ np.swapaxes(k, -1, -2))
    total = sum(np.square(q[..., :, None, c] - k[..., None, :, c]) for c in range(q.shape[-1]))
    return -scale * total if q.shape[-1] else np.zeros((*np.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2]))


def seen_sums(A, x, visible):
    """A @ x for A (..., n, m) and x (..., m, e), in which nothing of an unseen entry of x arrives, NaN and infinity included."""
    columns = [np.sum(A * np.where(visible, x[..., None, :, c], 0), axis=-1) for c in range(x.shape[-1])]
    shape = (*np.broadcast_shapes(A.shape[:-2], x.shape[:-2]), A.shape[-2], 0)
    return np.stack(columns, axis=-1).astype(x.dtype) if columns else np.zeros(shape, x.dtype)


def attention_of_scores(q, k, v, scale, key_mask, options, return_weights):
    """`attention` by way of the plan, for scores among which are infinities."""
    S = scores_of(q, k, scale, options.cost).astype(q.dtype)
    found = plan(S, key_mask, options)
    A = (found.plan * output_factor(q, k, key_mask, options)).astype(q.dtype)
    return seen_sums(A, v, ~np.isneginf(S) & valid_keys(key_mask, k.shape[-2])[..., None, :]), A if return_weights else None


def output_factor(q, k, key_mask, options):
    """c of A = c P, (..., 1, 1)."""
    n, m = q.shape[-2], k.shape[-2]
    if options.output_scaling == "cols":
        valid = valid_keys(key_mask, m)
        counts = valid.sum(axis=-1) if options.key_marginal == "valid" else np.asarray(m)
        return np.maximum(counts, 1)[..., None, None].astype(q.dtype)
    return np.full((1, 1), max(n, 1) if options.output_scaling == "rows" else 1, q.dtype)


# --- plans ---------------------------------------------------------------------------------------------------------------------------


@twin
def sinkhorn_plan(scores, *, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", tol=None, return_info=False):
    """Transport plan P (..., n, m) of scores S (..., n, m); the parameters are those of the reference."""
    result = plan(scores, key_mask, Options.checked(n_iters, eps, key_marginal, tol))
    return result if return_info else result.plan


class Scores(NamedTuple):
    """Scores given as such, their heads flattened, as logits in base 2 less the largest of each row."""

    lead: tuple[int, ...]
    X: np.ndarray                  # (heads, n, whole panels of m)
    top: np.ndarray                # (heads, n), in units of the scores
    columns: np.ndarray            # (heads,)

    @classmethod
    def of(cls, scores, key_mask, options):
        kind, (n, m) = scores.dtype, scores.shape[-2:]
        valid = valid_keys(key_mask, m)
        lead = np.broadcast_shapes(scores.shape[:-2], valid.shape[:-1])
        (S, S_of), (masks, mask_of) = heads_of(scores, lead), heads_of(valid[..., None, :], lead)
        width, heads = panel_width(kind), math.prod(lead)
        X, top = np.empty((heads, n, -(-m // width) * width), kind), np.empty((heads, n), kind)
        in_parallel(scaled_scores, heads * -(-n // ROWS), S, S_of, masks, mask_of, m, kind.type(options.eps), X, top, work=X.size)
        return cls(lead, X, top, key_counts(masks, mask_of, heads, m, options.key_marginal))

    def logs_of_marginals(self):
        """Of 1/n and 1/columns, in base 2."""
        kind = self.X.dtype
        return -np.log2(kind.type(max(self.X.shape[1], 1))), -np.log2(self.columns.astype(kind))


def plan(scores, key_mask, options, rho=np.inf) -> SinkhornPlan:
    """The SinkhornPlan of a transport problem, its columns relaxed where rho is finite; all heads at a time."""
    kind, (n, m) = scores.dtype, scores.shape[-2:]
    problem = Scores.of(scores, key_mask, options)
    X, lead, heads = problem.X, problem.lead, len(problem.X)
    log_mu, log_nu = problem.logs_of_marginals()
    relaxation = 1.0 if np.isinf(rho) else rho / (rho + options.eps)
    potentials = Potentials(X, np.zeros((heads, m), kind))
    per_unit = kind.type(options.eps * LN_2)                # a potential of base 2 in units of the scores
    error, taken = 0.0, options.steps
    for t in range(0, options.steps, 2):
        change = potentials.step(X, log_mu, log_nu, relaxation, columns=t + 1 < options.steps)
        change = potentials.u * per_unit - problem.top if t == 0 else change * per_unit
        error = float(np.mean(np.abs(change.astype(np.float64)).sum(axis=-1))) if change.size else 0.0
        if options.tol is not None and error < options.tol:
            taken = t + 1
            potentials.v[:] = potentials.v_before
            break
    P = np.empty((heads, n, m), kind)
    in_parallel(plan_rows, heads * -(-n // ROWS), X, potentials.u, potentials.v, log_mu, taken % 2, P, work=20 * P.size)
    u, v = potentials.u * per_unit - problem.top, potentials.v[:, :m] * per_unit
    return SinkhornPlan(P.reshape(*lead, n, m), u.reshape(*lead, n), v.reshape(*lead, m), taken, error)


# --- gradients -----------------------------------------------------------------------------------------------------------------------


@twin(lacks=LACKS)
def sinkhorn_plan_backward(scores, dplan, *, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", gradient="unrolled"):
    """Gradient (..., n, m) of `sinkhorn_plan` by its scores for the cotangent dplan; the parameters are those of the reference."""
    refuse_implicit(gradient)
    options = Options.checked(n_iters, eps, key_marginal)
    dS = gradient_of_scores(scores, dplan, key_mask, options, gradient)
    return np.asarray(sum_to_shape(dS, scores.shape), order="C")


def gradient_of_scores(scores, dplan, key_mask, options, gradient):
    """dS (..., n, m) for each head that scores, masks or dplan tell apart."""
    n, m = scores.shape[-2:]
    lead = np.broadcast_shapes(scores.shape[:-2], dplan.shape[:-2])
    problem = Scores.of(np.broadcast_to(scores, (*lead, n, m)), key_mask, options)
    log_mu, log_nu = problem.logs_of_marginals()
    X, rows = problem.X, (options.steps + 1) // 2
    potentials = Potentials(X, np.zeros((len(X), m), X.dtype))
    u, v = np.empty((rows, *potentials.u.shape), X.dtype), np.zeros((rows + 1, *potentials.v.shape), X.dtype)
    for t in range(0, options.steps, 2):
        potentials.step(X, log_mu, log_nu, columns=t + 1 < options.steps)
        u[t // 2], v[t // 2 + 1] = potentials.u, potentials.v
    steps = Steps(options.steps, u, v, log_mu, log_nu, gradient == "detached")
    dS = plan_gradient(X, *heads_of(dplan, problem.lead), steps, options.eps)
    return dS.reshape(*problem.lead, n, m)


@twin(lacks=LACKS)
def sinkhorn_attention_backward(
    q, k, v, do, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid",
    causal=False, gradient="unrolled",
):
    """Gradients (dq, dk, dv) of `sinkhorn_attention` for the cotangent do of its output; the parameters are those of the reference."""
    refuse_causal(causal)
    refuse_implicit(gradient)
    options = Options.checked(n_iters, eps, key_marginal, None, cost, output_scaling)
    scale = float(default_scale(scale, q))
    problem = Problem.of(q, k, scale, key_mask, options)
    if problem is None:
        return gradients_of_infinite(q, k, v, do, scale, key_mask, options, gradient)
    kind, n, m = q.dtype, q.shape[-2], k.shape[-2]
    lead = np.broadcast_shapes(problem.lead, v.shape[:-2], do.shape[:-2])
    of = np.broadcast_to(np.arange(problem.heads).reshape(problem.lead), lead).reshape(-1)
    squares, rows = options.cost == "squared_distance", (options.steps + 1) // 2
    factor = {"rows": np.full(len(of), max(n, 1)), "cols": problem.columns[of], "none": np.ones(len(of))}[options.output_scaling]
    slope = kind.type((2 if squares else 1) * scale / options.eps)

    stop = problem.k.panels.shape[1] * panel_width(kind)
    trail = Trail(np.zeros((rows, problem.heads, n), kind), np.zeros((rows + 1, problem.heads, stop), kind))
    solve(problem, trail=Trail(trail.u, trail.v[..., :m]))
    log_mu, log_nu = (x * kind.type(LOG2_E) for x in logs_of_marginals(n, problem.columns, kind))
    steps = Steps(options.steps, trail.u * kind.type(LOG2_E), trail.v * kind.type(LOG2_E), log_mu, log_nu, gradient == "detached")
    dq, dk, dv = qkv_gradients(problem, of, *heads_of(v, lead), *heads_of(do, lead), factor.astype(kind), steps, slope, squares)
    if squares:                                                     # the last feature has the sums of dS
        dq = dq[..., :-1] - dq[..., -1:] * problem.q.array[problem.q.of[of]]
        dk = dk[..., :-1] - dk[..., -1:] * problem.k.array[problem.k.of[of]]
    if problem.mask.size:
        seen = problem.mask[problem.mask_of[of], 0]
        dv = np.where(seen[..., None], dv, 0)                       # also where the rest is NaN
        dk = np.where(seen.any(axis=-1)[:, None, None], dk, 0)
    return AttentionGradients(*(summed_like(x, lead, like) for x, like in ((dq, q), (dk, k), (dv, v))))


def gradients_of_infinite(q, k, v, do, scale, key_mask, options, gradient):
    """The gradients by way of the scores, among which are infinities."""
    S = scores_of(q, k, scale, options.cost).astype(q.dtype)
    visible = ~np.isneginf(S) & valid_keys(key_mask, k.shape[-2])[..., None, :]
    factor = output_factor(q, k, key_mask, options)
    dP = factor * (do @ np.swapaxes(v, -1, -2))
    dS = gradient_of_scores(S, dP.astype(q.dtype), key_mask, options, gradient)
    A = plan(S, key_mask, options).plan * factor
    back, seen = np.swapaxes(dS, -1, -2), np.swapaxes(visible, -1, -2)
    dq, dk = seen_sums(dS, k, visible), seen_sums(back, q, seen)
    if options.cost == "squared_distance":
        real = np.where(seen.any(axis=-1, keepdims=True), k, 0)
        dq, dk = 2 * (dq - dS.sum(axis=-1)[..., None] * q), 2 * (dk - back.sum(axis=-1)[..., None] * real)
    gradients = ((scale * dq, q), (scale * dk, k), (seen_sums(np.swapaxes(A, -1, -2), do, seen), v))
    return AttentionGradients(*(np.asarray(sum_to_shape(x, like.shape), dtype=like.dtype, order="C") for x, like in gradients))
