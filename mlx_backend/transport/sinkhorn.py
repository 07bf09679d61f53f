"""Twin of reference/transport/sinkhorn.py: the backward functions go through the half-steps in reverse, mx.grad differentiates each."""

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import INF, any_to_shape, scale_of, sum_to_shape, total, turned, weighted_values
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
    problem = attention_problem(q, k, eps, scale, cost, key_mask, key_marginal, causal)
    A = output_factor(problem, output_scaling) * solve(problem, n_iters, tol).plan
    out = weighted_values(A, v, problem.visible)
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
