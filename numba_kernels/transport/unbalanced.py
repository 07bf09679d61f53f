"""Twin of reference/transport/unbalanced.py: the half-steps of sinkhorn.py, with relaxed columns."""

from attnspec.numba_kernels.transport.sinkhorn import Options, plan
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import number


@twin
def sinkhorn_unbalanced_plan(
    scores, *, n_iters=3, eps=1.0, rho=10.0, key_mask=None, key_marginal="valid", tol=None, return_info=False,
):
    """Transport plan P (..., n, m) of scores S (..., n, m) whose columns may leave 1/m; the parameters are those of the reference."""
    options = Options.checked(n_iters, eps, key_marginal, tol)
    result = plan(scores, key_mask, options, float(number("rho", rho, least=0)))
    return result if return_info else result.plan
