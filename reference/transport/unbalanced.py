"""Unbalanced Sinkhorn plan: rows keep their marginal, columns are only drawn towards theirs, with strength rho.

    t even:  u_i = eps (log mu_i - log sum_j exp((S_ij + v_j) / eps))
    t odd:   v_j = rho / (rho + eps) * eps (log nu_j - log sum_i exp((S_ij + u_i) / eps))

    P_ij = exp((S_ij + u_i + v_j) / eps)

where S, P (..., n, m), u (..., n), v (..., m); mu_i = 1/n, nu_j = 1/m, u = v = 0 at the start, half-steps t = 0 .. T-1.

Source: the code of Sander, Ablin, Blondel, Peyré, "Sinkformers", arXiv:2110.11773 (michaelsdr/sinkformers, vit_pytorch/unbalanced.py);
not in the paper's main text.

Conventions. n_iters, eps, key masks and tol are those of `sinkhorn_plan`. rho is the code's q, 10 by default, in the units of eps;
infinity is allowed and is the balanced plan. The factor that would relax the rows too stands in the code as a comment and is not applied:
rows are balanced.

Identities. rho -> infinity is the balanced plan; rho = 0 the softmax over n, for odd T. For odd T rows sum to 1/n. After a column step the
columns sum to nu_j exp(-v_j / rho), which is what makes the relaxed problem stationary.

Wrong versions met elsewhere: the factor rho / (rho + eps) on the rows as well; the old v added after the factor rather than inside it.
"""

from attnspec.reference.formula import formula
from attnspec.reference.inputs import number
from attnspec.reference.transport.sinkhorn import solve, transport_problem


@formula(
    family="transport",
    shapes={"scores": "... n m", "key_mask": "bool ... #m", "plan": "... n m"},
    equation="P = exp((S + u + v) / eps),  u_i = eps (log 1/n - LSE_j((S_ij + v_j)/eps)),  "
             "v_j = rho/(rho + eps) eps (log 1/m - LSE_i((S_ij + u_i)/eps)) in turn",
    latex=r"P_{ij}=e^{(S_{ij}+u_i+v_j)/\varepsilon},\quad u_i=\varepsilon\log\frac{1/n}{\sum_j e^{(S_{ij}+v_j)/\varepsilon}},\quad"
          r" v_j=\frac{\rho}{\rho+\varepsilon}\,\varepsilon\log\frac{1/m}{\sum_i e^{(S_{ij}+u_i)/\varepsilon}}",
    source="michaelsdr/sinkformers, vit-pytorch/vit_pytorch/unbalanced.py",
    bound="transport plan",
    workspace="... n m",
)
def sinkhorn_unbalanced_plan(
    scores, *, n_iters=3, eps=1.0, rho=10.0, key_mask=None, key_marginal="valid", tol=None, return_info=False,
):
    """Transport plan P (..., n, m) of scores S (..., n, m), S = -cost, whose column sums may leave 1/m.

    rho: >= 0, the strength with which columns are held to 1/m; infinity holds them as `sinkhorn_plan` does.
    n_iters: half-steps T >= 1, rows first.  eps: > 0, the strength of the entropy.
    key_mask: bool, broadcastable to (..., m), True = a real key.  key_marginal: "valid" or "all".  tol: when to stop early.
    return_info: return a SinkhornPlan with the plan, the potentials u and v, the half-steps taken and the last change of u.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> sinkhorn_unbalanced_plan(np.log([[1.0, 3.0], [1.0, 1.0]]), rho=0.0)         # rows only: a softmax over n
    array([[0.125, 0.375],
           [0.25 , 0.25 ]])
    """
    problem = transport_problem(scores, eps, key_mask, key_marginal)
    rho = number("rho", rho, least=0)
    result = solve(problem, n_iters, tol, rho)
    return result if return_info else result.plan
