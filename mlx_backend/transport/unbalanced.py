"""Twin of reference/transport/unbalanced.py: the half-steps of a balanced plan, with relaxed columns."""

from attnspec.mlx_backend.transport.half_steps import solve, transport_problem
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import number


@twin
def sinkhorn_unbalanced_plan(
    scores, *, n_iters=3, eps=1.0, rho=10.0, key_mask=None, key_marginal="valid", tol=None, return_info=False,
):
    """Transport plan P (..., n, m) of scores S (..., n, m) whose columns may leave 1/m; the parameters are those of the reference."""
    problem = transport_problem(scores, eps, key_mask, key_marginal)
    result = solve(problem, n_iters, tol, float(number("rho", rho, least=0)))
    return result if return_info else result.plan
