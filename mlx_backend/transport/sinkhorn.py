"""Twin of reference/transport/sinkhorn.py: the backward functions go through the half-steps in reverse, mx.grad differentiates each."""

import math

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import INF, any_to_shape, scale_of, sum_to_shape, total, turned, weighted_values
from attnspec.mlx_backend.metal import Kernel
from attnspec.mlx_backend.softmax import tiles
from attnspec.mlx_backend.transport.half_steps import half_steps, solve, transport_problem, valid_keys
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, one_of, whole
from attnspec.reference.softmax.scaled_dot_product import AttentionGradients

COSTS = ("dot", "squared_distance")
SCALINGS = ("rows", "cols", "none")
GRADIENTS = ("unrolled", "detached", "implicit")
LACKS = {"gradient=implicit": "it solves a dense system of n + m unknowns, which is NumPy's work in the reference"}


# --- plans ---------------------------------------------------------------------------------------------------------------------------


@twin
def sinkhorn_plan(scores, *, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", tol=None, return_info=False):
    """Transport plan P (..., n, m) of scores S (..., n, m); the parameters are those of the reference."""
    result = solve(transport_problem(scores, eps, key_mask, key_marginal), n_iters, tol)
    return result if return_info else result.plan


@twin(lacks=LACKS)
def sinkhorn_plan_backward(scores, dplan, *, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", gradient="unrolled"):
    """Gradient (..., n, m) of `sinkhorn_plan` by its scores for the cotangent dplan; the parameters are those of the reference."""
    problem = transport_problem(scores, eps, key_mask, key_marginal)
    return sum_to_shape(plan_gradient(problem, dplan, n_iters, gradient)[0], scores.shape)


def plan_gradient(problem, dP, n_iters, gradient):
    """dS (..., n, m) of a transport problem, and its plan; dP may be anything where the plan is 0."""
    if one_of("gradient", gradient, GRADIENTS) == "implicit":
        raise ValueError(f"gradient: the MLX twin lacks 'implicit': {LACKS['gradient=implicit']}")
    steps = list(half_steps(problem, whole("n_iters", n_iters, least=1)))
    P = steps[-1].P
    dS = mx.where(mx.logical_and(problem.visible, P != 0), dP * P, 0.0)         # times eps, by which it is divided in the end
    du, dv = total(dS, -1), total(dS, -2)
    for t in reversed(range(len(steps))):
        if t % 2 == 0:
            step = du[..., :, None] * steps[t].W
            dS, dv, du = dS - step, dv - total(step, -2), mx.zeros_like(du)
        else:
            step = dv[..., None, :] * steps[t].W
            if gradient == "unrolled":
                dS, du = dS - step, du - total(step, -1)
            dv = mx.zeros_like(dv)
    return dS / problem.eps, P


# --- attention -----------------------------------------------------------------------------------------------------------------------


@twin
def sinkhorn_attention(
    q, k, v, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid", tol=None,
    causal=False, return_weights=False,
):
    """Sinkhorn attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    def graph(q, k, v):
        problem = attention_problem(q, k, eps, scale, cost, key_mask, key_marginal, causal)
        A = output_factor(problem, output_scaling) * solve(problem, n_iters, tol).plan
        return weighted_values(A, v, problem.visible), A

    out, A = graph(q, k, v)                                            # a graph is not computed before it is asked for
    reason = "it does not write weights" if return_weights else None if tol is None else "it makes a fixed number of half-steps"
    if HALF_STEP.chosen(reason or tiles.refusal(q, k, v, False), tiles.pays(q, k), ("float32",), check):
        return streamed(graph, q, k, v, n_iters, eps, scale, cost, output_scaling, key_mask, key_marginal)
    return AttentionResult(out, A) if return_weights else out


@twin(lacks=LACKS)
def sinkhorn_attention_backward(
    q, k, v, do, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid",
    causal=False, gradient="unrolled",
):
    """Gradients (dq, dk, dv) of `sinkhorn_attention` for the cotangent do of its output; the parameters are those of the reference."""
    problem = attention_problem(q, k, eps, scale, cost, key_mask, key_marginal, causal)
    c = output_factor(problem, output_scaling)
    do = mx.broadcast_to(do, np.broadcast_shapes(do.shape, (*v.shape[:-2], 1, 1)))
    dS, P = plan_gradient(problem, c * (do @ turned(v)), n_iters, gradient)
    dq, dk = score_gradients(q, k, dS, problem.visible, cost)
    dv = weighted_values(turned(c * P), do, turned(problem.visible))
    scale = scale_of(scale, q)
    return AttentionGradients(scale * sum_to_shape(dq, q.shape), scale * sum_to_shape(dk, k.shape), sum_to_shape(dv, v.shape))


def attention_problem(q, k, eps, scale, cost, key_mask, key_marginal, causal):
    """The transport problem of queries and keys."""
    if causal is not False:
        raise ValueError(f"causal: expected False, got {causal!r}; the only doubly stochastic lower-triangular matrix is the identity")
    one_of("cost", cost, COSTS)
    valid = valid_keys(k.shape[-2], key_mask)[..., None, :]
    scores = (products if cost == "dot" else distances)(q, k, valid)
    return transport_problem(scale_of(scale, q) * scores, eps, key_mask, key_marginal)


def output_factor(problem, output_scaling):
    """c of A = c P."""
    one_of("output_scaling", output_scaling, SCALINGS)
    return {"rows": float(problem.rows), "cols": problem.columns[..., None], "none": 1.0}[output_scaling]


@mx.custom_function
def products(q, k, valid):
    """<q_i, k_j>; their gradients leave out what is not valid or at -inf, whatever stands there."""
    return q @ turned(k)


@mx.custom_function
def distances(q, k, valid):
    """-|q_i - k_j|^2, likewise."""
    return -total((q[..., :, None, :] - k[..., None, :, :]) ** 2)


@products.vjp
def products_gradients(primals, cotangent, S):
    return gradients_by(primals, cotangent, S, "dot")


@distances.vjp
def distances_gradients(primals, cotangent, S):
    return gradients_by(primals, cotangent, S, "squared_distance")


def gradients_by(primals, cotangent, S, cost):
    q, k, valid = primals
    seen = mx.broadcast_to(valid, (*valid.shape[:-2], *S.shape[-2:]))
    seen = any_to_shape(mx.broadcast_to(seen, np.broadcast_shapes(seen.shape, S.shape)), S.shape)
    seen = mx.logical_and(seen, S != -INF)
    dq, dk = score_gradients(q, k, cotangent, seen, cost)
    return sum_to_shape(dq, q.shape), sum_to_shape(dk, k.shape), mx.zeros_like(valid)


def score_gradients(q, k, dS, visible, cost):
    """Gradients by queries and keys of scores without a scale; dS is 0 where not visible."""
    back, seen = turned(dS), turned(visible)
    dq, dk = weighted_values(dS, k, visible), weighted_values(back, q, seen)
    if cost == "dot":
        return dq, dk
    real = mx.where(mx.any(seen, axis=-1, keepdims=True), k, 0.0)  # 0 * NaN of a masked key
    return 2 * (dq - total(dS, keepdims=True) * q), 2 * (dk - total(back, keepdims=True) * real)


# --- by kernels ----------------------------------------------------------------------------------------------------------------------

HALF_STEP = Kernel("half step", "attnspec.mlx_backend.transport", "half_step.metal",
                   ("q", "k", "potential", "mask", "of", "sizes", "factors"), ("lse",))
SIMDGROUPS = 4


def streamed(graph, q, k, v, n_iters, eps, scale, cost, output_scaling, key_mask, key_marginal) -> mx.array:
    """Half-steps that keep potentials alone, the last of them fused with the values; gradients by the graph, which keeps the plan."""
    @mx.custom_function
    def forward(q, k, v):
        return by_half_steps(q, k, v, n_iters, float(eps), scale_of(scale, q), cost, output_scaling, key_mask, key_marginal)

    @forward.vjp
    def backward(primals, cotangent, _):
        return mx.vjp(lambda *arrays: graph(*arrays)[0], list(primals), [cotangent])[1]

    return forward(q, k, v)


def by_half_steps(q, k, v, n_iters, eps, scale, cost, output_scaling, key_mask, key_marginal) -> mx.array:
    n, m, factor, e = q.shape[-2], k.shape[-2], scale / eps, v.shape[-1]
    valid = valid_keys(m, key_mask)
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], valid.shape[:-1])
    mask = None if key_mask is None else valid[..., None, :]
    potential = mx.zeros((*lead, m))
    if cost == "squared_distance":                                     # around the mean of the keys, or squares would swallow differences
        k = mx.where(valid[..., None], k, 0.0)
        count = mx.sum(mx.broadcast_to(valid[..., None], (*k.shape[:-1], 1)).astype(mx.float32))
        centre = mx.sum(k, axis=list(range(k.ndim - 1))) / mx.maximum(count, 1.0)
        q, k = q - centre, mx.where(valid[..., None], k - centre, 0.0)
        potential, factor = mx.broadcast_to(-factor * mx.sum(k * k, axis=-1), (*lead, m)), 2 * factor
    counted = total(valid.astype(mx.float32), keepdims=True) if key_marginal == "valid" else mx.array([float(m)])
    columns = mx.broadcast_to(mx.maximum(counted, 1.0), (*lead, 1))
    u = mx.zeros((*lead, n))
    for t in range(n_iters - n_iters % 2):
        if t % 2 == 0:
            lse = half_step(lead, q, k, potential, factor, mask)
            u = mx.where(lse == -INF, 0.0, -math.log(n) - lse)
        else:
            lse = half_step(lead, k, q, u, factor, None if mask is None else turned(mask))
            potential = mx.where(lse == -INF, 0.0, -mx.log(columns) - lse)
    out, lse = tiles.launch(tiles.Layout.of_call(
        mx.float32, 0, q, k, v, bias=potential[..., None, :], scale=factor, softcap=None, mask=mask, causal=False, window=None,
        enable_gqa=False,
    ))
    c = {"rows": float(n), "cols": columns, "none": 1.0}[output_scaling]
    share = c / n if n_iters % 2 else mx.where(lse == -INF, 0.0, mx.exp(mx.where(lse == -INF, 0.0, lse) + u)) * c
    return out[..., :e] * (share if isinstance(share, float) else share[..., None])


def half_step(lead, q, k, potential, factor, mask) -> mx.array:
    """Log-sum-exp (..., n) over the keys of factor <q_i, k_j> + potential_j, potential (..., m) in natural units."""
    n, m, heads = q.shape[-2], k.shape[-2], math.prod(lead)
    masked, mask = mask is not None, mx.ones((1, 1), mx.bool_) if mask is None else mask
    of = np.stack([*(tiles.entries(tuple(x.shape[:-2]), lead, 1) for x in (q, k)), np.arange(heads),
                   tiles.entries(tuple(mask.shape[:-2]), lead, 1)])
    q, k, mask = tiles.padded(q), tiles.padded(k), tiles.flat(mask)
    D, rows = q.shape[-1], 8 * SIMDGROUPS
    (lse,) = HALF_STEP.launch(
        [q, k, potential.reshape(heads, m), mask, mx.array(of, mx.int32), mx.array([n, m, *mask.shape[1:]], mx.int32),
         mx.array([factor * tiles.LOG2_E])],
        {"T": mx.float32, "D": D, "KEYS": tiles.fitting(D, mx.float32), "ROWS": rows, "SIMDS": SIMDGROUPS, "MASKED": masked},
        (32 * SIMDGROUPS * -(-n // rows), heads, 1), (32 * SIMDGROUPS, 1, 1), [((heads, n), mx.float32)],
    )
    return lse.reshape(*lead, n)


def check() -> bool:
    """Whether kernel and graph agree on a small case."""
    q, k, v = tiles.small_case(mx.float32)
    problem = attention_problem(q, k, 1.0, None, "dot", None, "valid", False)
    want = weighted_values(33.0 * solve(problem, 4).plan, v, problem.visible)
    ours = by_half_steps(q, k, v, 4, 1.0, scale_of(None, q), "dot", "rows", None, "valid")
    return bool(mx.all(mx.abs(ours - want) < 1e-4))
