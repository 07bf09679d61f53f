"""Identities of the memory family."""

import itertools
import math

import numpy as np
from scipy.special import bdtr, betainc, gammaln, ndtr, ndtri

import attnspec
from attnspec.conformance.identities import identity

# --- Hopfield networks ---------------------------------------------------------------------------------------------------------------


def patterns(x, *lead):
    """States (*lead, n, d), stored patterns (*lead, m, d) and an inverse temperature."""
    return x.normal(*lead, x.n, x.d), x.normal(*lead, x.m, x.d), float(x.rng.uniform(0.1, 3.0))


def spins(x, *shape):
    return x.rng.choice([-1, 1], shape)


@identity("E >= 0", "hopfield_energy")
def _(x):
    state, stored, beta = patterns(x)
    E = attnspec.hopfield_energy(state, stored, beta=beta)
    return E, np.maximum(E, 0.0)


@identity("E <= 2 M^2 in the convex hull of the patterns", "hopfield_energy")
def _(x):
    _, stored, beta = patterns(x)
    inside = x.rng.dirichlet(np.full(x.m, 0.3), x.n) @ stored
    E = attnspec.hopfield_energy(inside, stored, beta=beta)
    return E, np.minimum(E, 2 * (stored**2).sum(-1).max())


@identity("grad E = xi - f(xi)", "hopfield_energy", "hopfield_update")
def _(x):
    state, stored, beta = patterns(x)
    direction = x.normal(x.n, x.d)
    slope = attnspec.hopfield_energy(state + 1e-30j * direction, stored, beta=beta).imag / 1e-30
    return slope, ((state - attnspec.hopfield_update(state, stored, beta=beta)) * direction).sum(-1)


@identity("E(f(xi)) <= E(xi)", "hopfield_energy", "hopfield_update")
def _(x):
    state, stored, beta = patterns(x)
    before = attnspec.hopfield_energy(state, stored, beta=beta)
    after = attnspec.hopfield_energy(attnspec.hopfield_update(state, stored, beta=beta), stored, beta=beta)
    return after, np.minimum(after, before)


def at_no_temperature(state, stored):
    """E at beta = 0, and the range of the products."""
    s = state @ stored.T
    return -s.mean(-1) + (state**2).sum(-1) / 2 + (stored**2).sum(-1).max() / 2, np.ptp(s, axis=-1).max()


@identity("beta = 0: E = -<xi, mean y> + <xi, xi>/2 + M^2/2", "hopfield_energy")
def _(x):
    state, stored, _ = patterns(x)
    return attnspec.hopfield_energy(state, stored, beta=0.0), at_no_temperature(state, stored)[0]


@identity("a small beta changes E by at most beta/8 times the squared range of the products", "hopfield_energy")
def _(x):
    state, stored, _ = patterns(x)
    limit, spread = at_no_temperature(state, stored)                   # Hoeffding: of (1/beta) log of a mean of exponentials
    return attnspec.hopfield_energy(state, stored, beta=1e-7), limit, 1e-7 * spread**2 / 8


@identity("permuting the patterns changes nothing", "hopfield_energy", "hopfield_update")
def _(x):
    state, stored, beta = patterns(x)
    shuffled = stored[x.rng.permutation(x.m)]
    got = [attnspec.hopfield_energy(state, shuffled, beta=beta), *attnspec.hopfield_update(state, shuffled, beta=beta).T]
    want = [attnspec.hopfield_energy(state, stored, beta=beta), *attnspec.hopfield_update(state, stored, beta=beta).T]
    return np.stack(got), np.stack(want)


@identity("one update is softmax attention with scale beta over the patterns", "hopfield_update", "hopfield_retrieve")
def _(x):
    state, stored, beta = patterns(x, x.h)
    want = attnspec.scaled_dot_product_attention(state, stored, stored, scale=beta)
    got = [attnspec.hopfield_update(state, stored, beta=beta), attnspec.hopfield_retrieve(state, stored, beta=beta)]
    return np.stack(got), np.stack([want, want])


@identity("an update stays in the convex hull: no direction exceeds the patterns' largest", "hopfield_update")
def _(x):
    state, stored, beta = patterns(x)
    direction = x.normal(x.d)
    got = attnspec.hopfield_update(state, stored, beta=beta) @ direction
    return got, np.minimum(got, (stored @ direction).max())


@identity("beta = 0 gives the mean pattern", "hopfield_update", "hopfield_retrieve")
def _(x):
    state, stored, _ = patterns(x)
    got = [attnspec.hopfield_update(state, stored, beta=0.0), attnspec.hopfield_retrieve(state, stored, beta=0.0, n_iters=x.h)]
    return np.stack(got), np.tile(stored.mean(0), (2, x.n, 1))


@identity("one pattern, or equal ones, are returned at once", "hopfield_update", "hopfield_retrieve")
def _(x):
    state, stored, beta = patterns(x)
    equal = np.tile(stored[:1], (x.m, 1))
    got = [attnspec.hopfield_update(state, equal, beta=beta), attnspec.hopfield_retrieve(state, equal, beta=beta, n_iters=x.e)]
    return np.stack(got), np.tile(stored[:1], (2, x.n, 1))


@identity("a large beta gives the pattern of the largest product, within 2 M (N-1) exp(-beta gap)", "hopfield_update")
def _(x):
    state, stored, _ = patterns(x)
    s = state @ stored.T
    order = np.sort(s, axis=-1)
    gap = (order[:, -1] - order[:, -2]).min() if x.m > 1 else np.inf
    M = np.sqrt((stored**2).sum(-1).max())
    got = attnspec.hopfield_update(state, stored, beta=50.0)
    return got, stored[s.argmax(-1)], 2 * M * (x.m - 1) * np.exp(-50.0 * gap)


@identity("n_iters = K without tol is K updates and one read-out", "hopfield_retrieve", "hopfield_update")
def _(x):
    state, stored, beta = patterns(x, x.h)
    want = state
    for _ in range(x.e + 1):
        want = attnspec.hopfield_update(want, stored, beta=beta)
    return attnspec.hopfield_retrieve(state, stored, beta=beta, n_iters=x.e, tol=None), want


@identity("with a projection the last weights average it", "hopfield_retrieve")
def _(x):
    state, stored, beta = patterns(x, x.h)
    V = x.normal(x.h, x.m, x.e)
    plain = attnspec.hopfield_retrieve(state, stored, beta=beta, n_iters=3, return_weights=True)
    return attnspec.hopfield_retrieve(state, stored, V, beta=beta, n_iters=3), plain.weights @ V


@identity("a converged retrieval is a fixed point: |f(out) - out| <= beta M^2 tol |Y|_2", "hopfield_retrieve", "hopfield_update")
def _(x):
    state, stored, beta = patterns(x)
    out = attnspec.hopfield_retrieve(state, stored, beta=beta, n_iters=None, tol=1e-3)
    # The last two states differ by (A_s - A_{s-1}) Y, and f changes no faster than beta M^2, the largest norm of its Jacobian.
    bound = beta * (stored**2).sum(-1).max() * 1e-3 * np.linalg.norm(stored, 2)
    return attnspec.hopfield_update(out, stored, beta=beta), out, bound


@identity("a head's number of updates does not depend on the other heads", "hopfield_retrieve")
def _(x):
    state, stored, beta = patterns(x, x.h)
    together = attnspec.hopfield_retrieve(state, stored, beta=beta, n_iters=20, return_info=True)
    alone = [attnspec.hopfield_retrieve(a, b, beta=beta, n_iters=20, return_info=True) for a, b in zip(state, stored, strict=True)]
    return together.n_iters, np.array([one.n_iters for one in alone])


def some_visible(x, n, m):
    """A mask under which some states may see no pattern."""
    return x.rng.random((n, m)) < 0.6


@identity("patterns that no state may see might as well not be there", "hopfield_update", "hopfield_retrieve", "hopfield_jacobian",
          "hopfield_retrieve_backward")
def _(x):
    state, stored, beta = patterns(x)
    seen = np.append(x.rng.random(x.m) < 0.5, True)
    stored = np.append(stored, x.normal(1, x.d), axis=0)
    do = x.normal(x.n, x.d)

    def everything(stored, **mask):
        options = {"beta": beta, **mask}
        back = attnspec.hopfield_retrieve_backward(state, stored, do, n_iters=2, **options)
        return np.concatenate([
            attnspec.hopfield_update(state, stored, **options), attnspec.hopfield_retrieve(state, stored, n_iters=3, **options),
            back.dstate, attnspec.hopfield_jacobian(state, stored, **options).reshape(x.n, -1).T.reshape(-1, x.d), back.dstored,
        ])

    got, want = everything(stored, mask=seen), everything(stored[seen])
    unseen = np.append(np.ones(len(got) - x.m - 1, bool), seen)
    return np.append(got[unseen], got[~unseen]), np.append(want, np.zeros((~seen).sum() * x.d))


@identity("a state that may see nothing goes to zero and has no derivative", "hopfield_update", "hopfield_retrieve", "hopfield_jacobian")
def _(x):
    state, stored, beta = patterns(x)
    mask = some_visible(x, x.n, x.m)
    options = {"beta": beta, "mask": mask}
    got = np.concatenate([attnspec.hopfield_update(state, stored, **options),
                          attnspec.hopfield_retrieve(state, stored, n_iters=2, **options),
                          attnspec.hopfield_jacobian(state, stored, **options).reshape(x.n, -1)], axis=-1)
    blind = ~mask.any(-1)
    return got[blind], np.zeros((blind.sum(), got.shape[-1]))


@identity("the updates of a head end where |A_s - A_{s-1}| <= tol for the first time", "hopfield_retrieve")
def _(x):
    state, stored, beta = patterns(x, x.h)
    tol = 10 ** x.rng.uniform(-5, 0)
    A = [attnspec.hopfield_retrieve(state, stored, beta=beta, n_iters=K, tol=None, return_weights=True).weights for K in range(13)]
    still = np.array([np.linalg.norm(after - before, axis=(-2, -1)) <= tol for before, after in itertools.pairwise(A)])
    updates = np.where(still.any(0), still.argmax(0) + 1, 12)
    got = attnspec.hopfield_retrieve(state, stored, beta=beta, n_iters=12, tol=tol, return_info=True)
    want = [A[K][head] for head, K in enumerate(updates)]
    return (np.concatenate([got.n_iters, got.converged, got.weights.ravel()]),
            np.concatenate([updates, still.any(0), np.ravel(want)]))


@identity("<gradients, directions> = Im <do, out(inputs + i h directions)> / h", "hopfield_retrieve_backward", "hopfield_retrieve")
def _(x):
    state, stored, beta = patterns(x, x.h)
    arrays = {"state": state, "stored": stored}
    if x.rng.integers(2):
        arrays["projection"] = x.normal(x.h, x.m, x.e)
    do = x.normal(x.h, x.n, x.e if "projection" in arrays else x.d)
    options = {"beta": beta, "n_iters": int(x.rng.integers(4)), "mask": some_visible(x, x.n, x.m)}
    gradients = attnspec.hopfield_retrieve_backward(**arrays, do=do, **options)._asdict()
    directions = {name: x.normal(*array.shape) for name, array in arrays.items()}
    got = sum(np.sum(gradients[f"d{name}"] * directions[name]) for name in arrays)
    moved = attnspec.hopfield_retrieve(**{name: arrays[name] + 1e-30j * directions[name] for name in arrays}, tol=None, **options)
    return got, np.sum(do * moved.imag) / 1e-30


@identity("J = beta Y^T (diag(p) - p p^T) Y", "hopfield_jacobian", "hopfield_retrieve_backward")
def _(x):
    state, stored, beta = patterns(x)
    do = x.normal(x.n, x.d)
    p = attnspec.hopfield_retrieve(state, stored, beta=beta, return_weights=True).weights
    J = np.stack([beta * stored.T @ (np.diag(row) - np.outer(row, row)) @ stored for row in p])
    back = attnspec.hopfield_retrieve_backward(state, stored, do, beta=beta).dstate
    return np.append(attnspec.hopfield_jacobian(state, stored, beta=beta), back), np.append(J, np.einsum("nab,na->nb", J, do))


@identity("J is the derivative of an update", "hopfield_jacobian", "hopfield_update")
def _(x):
    state, stored, beta = patterns(x)
    mask = some_visible(x, x.n, x.m)
    columns = [attnspec.hopfield_update(state + 1e-30j * row, stored, beta=beta, mask=mask).imag / 1e-30 for row in np.eye(x.d)]
    return attnspec.hopfield_jacobian(state, stored, beta=beta, mask=mask), np.stack(columns, axis=-1)


@identity("J is symmetric and positive semidefinite, of trace at most beta M^2", "hopfield_jacobian")
def _(x):
    state, stored, beta = patterns(x)
    J = attnspec.hopfield_jacobian(state, stored, beta=beta)
    low, trace = np.linalg.eigvalsh(J)[:, 0], np.trace(J, axis1=-2, axis2=-1)
    most = beta * (stored**2).sum(-1).max()
    return np.concatenate([J.ravel(), low, trace]), np.concatenate([J.mT.ravel(), np.maximum(low, 0.0), np.minimum(trace, most)])


@identity("f(xi) - f(eta) = J_m (xi - eta), J_m the mean of J between the two", "hopfield_jacobian", "hopfield_update")
def _(x):
    state, stored, beta = patterns(x)
    other = state + 0.05 * x.normal(x.n, x.d)
    nodes, weights = np.polynomial.legendre.leggauss(24)
    J_m = sum(w / 2 * attnspec.hopfield_jacobian(state + (1 + t) / 2 * (other - state), stored, beta=beta)
              for t, w in zip(nodes, weights, strict=True))
    got = attnspec.hopfield_update(other, stored, beta=beta) - attnspec.hopfield_update(state, stored, beta=beta)
    return got, np.einsum("nab,nb->na", J_m, other - state)


@identity("separation does not change under rotations and grows as c^2", "hopfield_separation")
def _(x):
    stored = x.normal(x.m, x.d)
    rotation, _ = np.linalg.qr(x.normal(x.d, x.d))
    return attnspec.hopfield_separation(3 * stored @ rotation), 9 * attnspec.hopfield_separation(stored)


@identity("separation is <x_i, x_i> less the largest product with another pattern", "hopfield_separation")
def _(x):
    stored = x.normal(x.m, x.d)
    rest = [[a @ b for j, b in enumerate(stored) if j != i] for i, a in enumerate(stored)]
    return attnspec.hopfield_separation(stored), np.array([a @ a - max(r, default=-np.inf) for a, r in zip(stored, rest, strict=True)])


def noisy(x):
    """Stored patterns, a state near each of them, beta, and the errors after one update."""
    stored = 2 * x.normal(x.m, x.d)
    state = stored + x.rng.uniform(0, 0.5) * x.normal(x.m, x.d)
    beta = float(x.rng.uniform(0.2, 3.0))
    return stored, state, beta, np.linalg.norm(attnspec.hopfield_update(state, stored, beta=beta) - stored, axis=-1)


@identity("|f(xi) - x_i| is at most each form of the bound", "hopfield_retrieval_bound", "hopfield_update")
def _(x):
    stored, state, beta, error = noisy(x)
    bounds = [attnspec.hopfield_retrieval_bound(stored, state, beta=beta, form=form) for form in ("margin", "distance", "separation")]
    return np.stack([error] * 3), np.minimum(error, bounds)


@identity("margin <= distance, and they are equal at the patterns", "hopfield_retrieval_bound")
def _(x):
    stored, state, beta, _ = noisy(x)
    margin = attnspec.hopfield_retrieval_bound(stored, state, beta=beta)
    larger = attnspec.hopfield_retrieval_bound(stored, state, beta=beta, form="distance")
    here = attnspec.hopfield_retrieval_bound(stored, beta=beta)
    same = attnspec.hopfield_retrieval_bound(stored, beta=beta, form="distance")
    return np.stack([margin, here]), np.stack([np.minimum(margin, larger), same])


@identity("separation form = e times the margin form at the patterns", "hopfield_retrieval_bound")
def _(x):
    stored, _, beta, _ = noisy(x)
    got = attnspec.hopfield_retrieval_bound(stored, beta=beta, form="separation")
    return got, np.e * attnspec.hopfield_retrieval_bound(stored, beta=beta)


@identity("distance and separation form by their formulas, with a fixed point, and infinite beyond the premise", "hopfield_retrieval_bound",
          "hopfield_separation")
def _(x):
    stored, beta = x.normal(x.m + 1, x.d), float(x.rng.uniform(0.1, 1.0))
    state, star = (stored + x.rng.uniform(0, 0.5) * x.normal(x.m + 1, x.d) for _ in range(2))
    M, Delta = np.sqrt((stored**2).sum(-1).max()), attnspec.hopfield_separation(stored)
    far = np.maximum(np.linalg.norm(state - stored, axis=-1), np.linalg.norm(star - stored, axis=-1))
    bounds = [attnspec.hopfield_retrieval_bound(stored, state, star, beta=beta, form=form) for form in ("distance", "separation")]
    want = [-beta * (Delta - 2 * M * far), np.where(far <= 1 / (2 * beta * M), 1 - beta * Delta, np.inf)]
    return np.log(bounds), np.log(2 * x.m * M) + want


@identity("radius beta N M = 1, and a pattern contracts where its separation is the needed one", "hopfield_storage_radius",
          "hopfield_separation")
def _(x):
    stored, beta, N = 3 * x.normal(x.m + 1, x.d), float(x.rng.uniform(0.2, 3.0)), x.m + 1
    M = np.sqrt((stored**2).sum(-1).max())
    radius, needed, contracts = attnspec.hopfield_storage_radius(stored, beta=beta)
    formula = 2 / (beta * N) + np.log(2 * (N - 1) * N * beta * M**2) / beta
    return np.append([radius * beta * N * M, needed], contracts), np.append([1.0, formula], attnspec.hopfield_separation(stored) >= formula)


@identity("where the separation suffices an update maps the sphere of a pattern into itself", "hopfield_storage_radius", "hopfield_update")
def _(x):
    stored = 4 * x.normal(x.m, x.d)
    beta = float(x.rng.uniform(0.2, 3.0))
    radius, _, contracts = attnspec.hopfield_storage_radius(stored, beta=beta)
    away = x.normal(x.m, x.d)
    state = stored + radius * away / np.linalg.norm(away, axis=-1, keepdims=True)
    moved = np.linalg.norm(attnspec.hopfield_update(state, stored, beta=beta) - stored, axis=-1)
    return np.where(contracts, moved, 0.0), np.where(contracts, np.minimum(moved, radius), 0.0)


@identity("b/c - log c = a", "hopfield_capacity")
def _(x):
    beta, K, p = x.rng.uniform(0.1, 3.0, (3, x.n)) * np.array([[1.0], [1.0], [0.3]])
    d = x.rng.integers(2, 100, x.n)
    c = attnspec.hopfield_capacity(beta, K, d, p).c
    return 2 * K**2 * beta / 5 / c - np.log(c), 2 / (d - 1) * (1 + np.log(2 * beta * K**2 * p * (d - 1)))


@identity("capacity^2 = p c^((d-1)/2), and it is at least 2 where the theorem applies", "hopfield_capacity")
def _(x):
    beta, K, p = x.rng.uniform(0.1, 3.0, (3, x.n)) * np.array([[1.0], [1.0], [0.3]])
    d = x.rng.integers(2, 60, x.n)
    capacity, c, applies = attnspec.hopfield_capacity(beta, K, d, p)
    return np.stack([np.log(capacity) * 2, applies]), np.stack([np.log(p) + (d - 1) / 2 * np.log(c), capacity >= 2])


@identity("metastable size: the k largest weights reach the mass, k - 1 do not", "hopfield_metastable_size")
def _(x):
    weights = x.arrays("hopfield_metastable_size")["weights"]
    size = attnspec.hopfield_metastable_size(weights, mass=0.8)
    down = -np.sort(-weights, axis=-1)
    return size, np.array([next(k for k in range(1, x.m + 1) if row[:k].sum() >= 0.8 - 1e-15 * x.m) for row in down])


@identity("m equal weights have metastable size ceil(0.9 m)", "hopfield_metastable_size")
def _(x):
    return attnspec.hopfield_metastable_size(np.full((x.n, x.m), 1 / x.m)), np.full(x.n, -(-9 * x.m // 10))


@identity("W is symmetric with a zero diagonal and W + (m/d) I = X^T X / d", "hopfield_binary_weights")
def _(x):
    X = spins(x, x.m, x.d)
    W = attnspec.hopfield_binary_weights(X)
    return np.stack([W, W]), np.stack([W.T, X.T @ X / x.d - np.eye(x.d) * x.m / x.d])


@identity("E(-s) = E(s) without threshold, and the threshold adds <b, s>", "hopfield_binary_energy")
def _(x):
    W, s, b = attnspec.hopfield_binary_weights(spins(x, x.m, x.d)), spins(x, x.n, x.d), x.normal(x.d)
    E = attnspec.hopfield_binary_energy(s, W)
    return np.stack([attnspec.hopfield_binary_energy(-s, W), attnspec.hopfield_binary_energy(s, W, b)]), np.stack([E, E + s @ b])


@identity("asynchronous updates never raise the energy", "hopfield_binary", "hopfield_binary_energy",
          "hopfield_binary_weights")
def _(x):
    X, s, b = spins(x, x.m, x.d), spins(x, x.n, x.d), x.normal(x.d)
    out, E, *_ = attnspec.hopfield_binary(X, s, threshold=b, return_info=True)
    ends = [attnspec.hopfield_binary_energy(state, attnspec.hopfield_binary_weights(X), b) for state in (s, out)]
    return np.append(E[:, 1:].T, E[:, [0, -1]].T, axis=0), np.append(np.minimum(E[:, 1:], E[:, :-1]).T, ends, axis=0)


@identity("an asynchronous sweep under any symmetric weights never raises the energy", "hopfield_binary_update", "hopfield_binary_energy")
def _(x):
    W, s, b = x.normal(x.d, x.d), spins(x, x.n, x.d), x.normal(x.d)
    W = (W + W.T) * (1 - np.eye(x.d))
    after = attnspec.hopfield_binary_energy(attnspec.hopfield_binary_update(s, W, threshold=b), W, b)
    return after, np.minimum(after, attnspec.hopfield_binary_energy(s, W, b))


@identity("a visited bit is the sign of its field, +1 or itself at a tie", "hopfield_binary_update", "hopfield_binary_weights")
def _(x):
    W, s = attnspec.hopfield_binary_weights(spins(x, x.m, x.d), normalise=False), spins(x, x.n, x.d)    # whole numbers, so that ties occur
    b, i, ties = x.rng.integers(-1, 2, x.d), int(x.rng.integers(x.d)), str(x.rng.choice(["keep", "plus"]))
    h = s @ W - b
    aligned = np.where(h == 0, 1 if ties == "plus" else s, np.sign(h))
    one, want = attnspec.hopfield_binary_update(s, W, threshold=b, ties=ties, order=[i]), s.copy()
    want[:, i] = aligned[:, i]
    return np.stack([attnspec.hopfield_binary_update(s, W, threshold=b, ties=ties, mode="synchronous"), one]), np.stack([aligned, want])


@identity("a sweep visits one bit after the other, each in the state that the one before left", "hopfield_binary_update")
def _(x):
    W, s, order = x.normal(x.d, x.d), spins(x, x.n, x.d), x.rng.permutation(x.d)
    want = s
    for i in order:
        want = attnspec.hopfield_binary_update(want, W, order=[i])
    return attnspec.hopfield_binary_update(s, W, order=order), want


@identity("a recall of one sweep is an update under the patterns' weights", "hopfield_binary", "hopfield_binary_update",
          "hopfield_binary_weights")
def _(x):
    X, s, b = spins(x, x.m, x.d), spins(x, x.n, x.d), x.rng.integers(-1, 2, x.d)
    options = {"mode": str(x.rng.choice(["asynchronous", "synchronous"])), "ties": str(x.rng.choice(["keep", "plus"])), "threshold": b}
    if options["mode"] == "asynchronous":
        options["order"] = x.rng.permutation(x.d)
    W = attnspec.hopfield_binary_weights(X, normalise=False)
    return attnspec.hopfield_binary(X, s, max_sweeps=1, normalise=False, **options), attnspec.hopfield_binary_update(s, W, **options)


@identity("synchronous updates under symmetric weights end in a cycle of at most 2", "hopfield_binary_update")
def _(x):
    W, s = x.normal(x.d, x.d), spins(x, x.n, x.d)
    W = W + W.T
    for _ in range(2**x.d):
        s = attnspec.hopfield_binary_update(s, W, mode="synchronous")
    twice = attnspec.hopfield_binary_update(attnspec.hopfield_binary_update(s, W, mode="synchronous"), W, mode="synchronous")
    return twice, s


@identity("a single stored pattern and its negative are fixed points", "hopfield_binary", "hopfield_binary_update")
def _(x):
    pattern = spins(x, x.d)
    W = attnspec.hopfield_binary_weights(pattern[None])
    both = np.stack([pattern, -pattern])
    return np.stack([attnspec.hopfield_binary(pattern[None], both), attnspec.hopfield_binary_update(both, W)]), np.stack([both, both])


@identity("the factor 1/d of the weights does not change the recall", "hopfield_binary")
def _(x):
    X, s = spins(x, x.m, x.d), spins(x, x.n, x.d)
    return attnspec.hopfield_binary(X, s, normalise=False), attnspec.hopfield_binary(X, s)


@identity("degree 2 is the classical network", "dense_associative_memory", "dense_associative_memory_energy", "hopfield_binary")
def _(x):
    X, s = spins(x, x.m, x.d), spins(x, x.n, x.d)
    got = attnspec.dense_associative_memory(s, X, degree=2, max_sweeps=100, return_info=True)
    want = attnspec.hopfield_binary(X, s, normalise=False, return_info=True)
    energy = attnspec.dense_associative_memory_energy(s, X, degree=2)[:, None]
    return (np.concatenate([got.out, got.energies, energy], -1),
            np.concatenate([want.out, 2 * want.energies - x.m * x.d, 2 * want.energies[:, :1] - x.m * x.d], -1))


@identity("updates never raise the energy", "dense_associative_memory", "dense_associative_memory_energy")
def _(x):
    X, s = spins(x, x.m, x.d), spins(x, x.n, x.d)
    options = [{"degree": x.h}, {"degree": 3, "rectified": True}, {"interaction": "exponential"}][x.rng.integers(3)]
    out, E, *_ = attnspec.dense_associative_memory(s, X, **options, max_sweeps=2, return_info=True)
    ends = [attnspec.dense_associative_memory_energy(state, X, **options) for state in (s, out)]
    return np.append(E[:, 1:].T, E[:, [0, -1]].T, axis=0), np.append(np.minimum(E[:, 1:], E[:, :-1]).T, ends, axis=0)


@identity("a bit becomes the sign of the difference of the energies", "dense_associative_memory", "dense_associative_memory_energy")
def _(x):
    X, s = spins(x, x.m, x.d), spins(x, x.n, x.d)
    options = [{"degree": x.h}, {"degree": 3, "rectified": True}, {"interaction": "exponential"}][x.rng.integers(3)]
    up, down = s.copy(), s.copy()
    up[:, 0], down[:, 0] = 1, -1
    rise = attnspec.dense_associative_memory_energy(up, X, **options) - attnspec.dense_associative_memory_energy(down, X, **options)
    rise = np.where(np.abs(rise) < 1e-9, 0.0, rise)                    # exponentials that cancel
    return attnspec.dense_associative_memory(s, X, **options, order=[0])[:, 0], np.where(rise == 0, s[:, 0], -np.sign(rise))


@identity("E(-s) = (-1)^p E(s)", "dense_associative_memory_energy")
def _(x):
    X, s = spins(x, x.m, x.d), spins(x, x.n, x.d)
    E = attnspec.dense_associative_memory_energy(s, X, degree=x.h)
    return attnspec.dense_associative_memory_energy(-s, X, degree=x.h), (-1) ** x.h * E


@identity("exponential E = -m exp(d - E') with E' of the continuous network", "dense_associative_memory_energy", "hopfield_energy")
def _(x):
    X, s = spins(x, x.m, x.d), spins(x, x.n, x.d)
    return attnspec.dense_associative_memory_energy(s, X, interaction="exponential"), -x.m * np.exp(x.d - attnspec.hopfield_energy(s, X))


@identity("dot products and softmax are attention with scale beta param", "universal_hopfield")
def _(x):
    q, M, P = x.qkv(x.h)
    got = attnspec.universal_hopfield(q, M, P, beta=0.7, param=1.5)
    return got, attnspec.scaled_dot_product_attention(q, M, P, scale=0.7 * 1.5)


@identity("dot products, identity and sign are a synchronous step of the classical network with its diagonal", "universal_hopfield")
def _(x):
    X, s = spins(x, x.m, x.d), spins(x, x.n, x.d)
    W = attnspec.hopfield_binary_weights(X, normalise=False) + x.m * np.eye(x.d)
    step = attnspec.hopfield_binary_update(s, W, mode="synchronous", ties="plus")
    field = attnspec.universal_hopfield(s, X, separation="identity")
    return np.where(field >= 0, 1, -1), step


@identity("normalised weights sum to 1, and beta drops out", "universal_hopfield")
def _(x):
    q, M, _ = x.qkv()
    options = {"similarity": "manhattan", "separation": "polynomial", "param": x.h, "normalise": True}
    got = attnspec.universal_hopfield(q, M, beta=2.5, return_weights=True, **options)
    want = attnspec.universal_hopfield(q, M, **options)
    return np.concatenate([got.out, got.weights.sum(-1, keepdims=True)], -1), np.concatenate([want, np.ones((x.n, 1))], -1)


@identity("without normalisation the weights are log s, s^p and s of s = beta sim", "universal_hopfield", "universal_hopfield_similarity")
def _(x):
    q, M, P = x.qkv()
    s = 1.7 * attnspec.universal_hopfield_similarity(q, M, similarity="manhattan")

    def of(**options):
        got = attnspec.universal_hopfield(q, M, P, similarity="manhattan", beta=1.7, return_weights=True, **options)
        return np.concatenate([got.weights, got.out], -1)

    want = [np.concatenate([w, w @ P], -1) for w in (np.log(s), s**x.h, s)]
    size = np.abs(want).max(axis=(-2, -1), keepdims=True)
    return np.stack([of(separation="log"), of(separation="polynomial", param=x.h), of(separation="identity")]) / size, want / size


@identity("permuting memories and projection together changes nothing", "universal_hopfield")
def _(x):
    q, M, P = x.qkv()
    order = x.rng.permutation(x.m)
    options = {"similarity": "manhattan", "separation": "max"}
    return attnspec.universal_hopfield(q, M[order], P[order], **options), attnspec.universal_hopfield(q, M, P, **options)


@identity("'max' is the limit of the softmax, within (m-1) exp(-param gap) times the values' range", "universal_hopfield")
def _(x):
    q, M, P = x.qkv()
    s = np.sort(attnspec.universal_hopfield_similarity(q, M), axis=-1)
    gap = (s[:, -1] - s[:, -2]).min() if x.m > 1 else np.inf
    bound = (x.m - 1) * np.exp(-40.0 * gap) * np.ptp(P, axis=0).max()
    return attnspec.universal_hopfield(q, M, P, param=40.0), attnspec.universal_hopfield(q, M, P, separation="max"), bound


@identity("cosine similarity does not change with the lengths, and is the dot product of unit vectors", "universal_hopfield_similarity")
def _(x):
    q, M, _ = x.qkv()
    unit = [a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, M)]
    got = attnspec.universal_hopfield_similarity(3 * q, M * x.rng.uniform(0.5, 2.0, (x.m, 1)), similarity="cosine")
    return got, attnspec.universal_hopfield_similarity(*unit)


@identity("the code's cosine is the dot product over the norms of the query and of all memories together", "universal_hopfield_similarity")
def _(x):
    q, M, _ = x.qkv(x.h)
    got = attnspec.universal_hopfield_similarity(q, M, similarity="cosine_official")
    return got * np.linalg.norm(q, axis=-1)[..., None] * np.linalg.norm(M, axis=(-2, -1))[:, None, None], q @ M.mT


@identity("1/euclidean = |q|^2 + |m|^2 - 2 <q, m>", "universal_hopfield_similarity")
def _(x):
    q, M, _ = x.qkv()
    got = 1 / attnspec.universal_hopfield_similarity(q, M, similarity="euclidean")
    return got, (q**2).sum(-1)[:, None] + (M**2).sum(-1) - 2 * q @ M.T


@identity("1/manhattan = sum |q - m|", "universal_hopfield_similarity")
def _(x):
    q, M, _ = x.qkv()
    return 1 / attnspec.universal_hopfield_similarity(q, M, similarity="manhattan"), np.abs(q[:, None] - M).sum(-1)


@identity("the code's normalised dot products sum to 1, in the proportions of <m, q> / sum m", "universal_hopfield_similarity")
def _(x):
    q, M = x.rng.uniform(0.1, 1.0, (x.n, x.d)), x.rng.uniform(0.1, 1.0, (x.m, x.d))
    got = attnspec.universal_hopfield_similarity(q, M, similarity="normdot_official")
    dot = q @ M.T / M.sum(-1)
    return np.append(got.sum(-1), got * dot[:, :1]), np.append(np.ones(x.n), got[:, :1] * dot)


@identity("1/kl = sum x log((x + eps)/(y + eps)), 1/js the mean of both to the midpoint", "universal_hopfield_similarity")
def _(x):
    q, M, eps = x.rng.uniform(0.0, 1.0, (x.n, x.d + 1)), x.rng.uniform(0.0, 1.0, (x.m, x.d + 1)), 10 ** x.rng.uniform(-4, -1)
    got = np.stack([1 / attnspec.universal_hopfield_similarity(q, M, similarity=one, eps=eps) for one in ("kl", "reverse_kl", "js")])
    q, M = (q / q.sum(-1, keepdims=True))[:, None], M / M.sum(-1, keepdims=True)

    def kl(a, b):
        return (a * np.log((a + eps) / (b + eps))).sum(-1)

    return got, np.stack([kl(M, q), kl(q, M), kl(M, (q + M) / 2) / 2 + kl(q, (q + M) / 2) / 2])


@identity("'reverse_kl' is 'kl' with memories and queries exchanged, 'js' is symmetric", "universal_hopfield_similarity")
def _(x):
    q, M = x.rng.uniform(0.1, 1.0, (x.n, x.d + 1)), x.rng.uniform(0.1, 1.0, (x.m, x.d + 1))
    sim = attnspec.universal_hopfield_similarity
    got = np.stack([1 / sim(q, M, similarity="reverse_kl"), 1 / sim(q, M, similarity="js")])
    return got, np.stack([1 / sim(M, q, similarity="kl").T, 1 / sim(M, q, similarity="js").T])


@identity("the code's Jensen-Shannon is the reciprocal of the mean of the two reciprocals", "universal_hopfield_similarity")
def _(x):
    q, M = x.rng.uniform(0.1, 1.0, (x.n, x.d + 1)), x.rng.uniform(0.1, 1.0, (x.m, x.d + 1))
    one, other, js = (attnspec.universal_hopfield_similarity(q, M, similarity=s) for s in ("kl", "reverse_kl", "js_official"))
    return js * (one + other), np.full((x.n, x.m), 2.0)


# --- Sparse Distributed Memory -------------------------------------------------------------------------------------------------------


def circle(x, least=0):
    """Bits, radius and number of neurons of a memory."""
    n = int(x.rng.integers(max(least, 1), 80))
    return {"n_bits": n, "radius": int(x.rng.integers(least, n + 1)), "n_locations": float(x.rng.uniform(1, 1e6))}


def bits(x, *shape):
    return x.rng.integers(0, 2, shape)


def counts_of(sizes):
    """The number of addresses in both circles at every distance."""
    return attnspec.sdm_circle_intersection(np.arange(sizes["n_bits"] + 1), n_bits=sizes["n_bits"], radius=sizes["radius"])


def volume(n, d):
    """Number of addresses in a circle."""
    return float(sum(math.comb(n, i) for i in range(d + 1)))


@identity("the intersection of a circle with itself is its volume, and all of 2^n for d = n", "sdm_circle_intersection")
def _(x):
    sizes = circle(x)
    n, d = sizes["n_bits"], sizes["radius"]
    whole = attnspec.sdm_circle_intersection(np.arange(n + 1), n_bits=n, radius=n)
    return np.append(whole / 2.0**n, counts_of(sizes)[0]), np.append(np.ones(n + 1), volume(n, d))


@identity("I(2k - 1) = I(2k), and 0 beyond 2d", "sdm_circle_intersection")
def _(x):
    sizes = circle(x)
    I = counts_of(sizes)
    even = np.arange(2, sizes["n_bits"] + 1, 2)
    far = I[2 * sizes["radius"] + 1 :]
    return np.append(I[even - 1], far), np.append(I[even], np.zeros(far.size))


@identity("I does not grow with the distance", "sdm_circle_intersection")
def _(x):
    I = counts_of(circle(x))
    return I[1:], np.minimum(I[1:], I[:-1])


@identity("sum_{d_v} C(n, d_v) I(d_v) is the square of a circle's volume", "sdm_circle_intersection")
def _(x):
    sizes = circle(x)
    n, d = sizes["n_bits"], sizes["radius"]
    I = counts_of(sizes)
    return sum(math.comb(n, d_v) * I[d_v] for d_v in range(n + 1)) / 4.0**n, (volume(n, d) / 2.0**n) ** 2


@identity("complementary circles: I(d_v; d) + 2^n = I(d_v; n - d - 1) + 2 volumes", "sdm_circle_intersection")
def _(x):
    n = int(x.rng.integers(1, 34))                                     # of the addresses outside both of two circles of radius d,
    d, d_v = int(x.rng.integers(0, n)), np.arange(n + 1)               # the antipodes are inside both of radius n - d - 1
    inside, outside = (attnspec.sdm_circle_intersection(d_v, n_bits=n, radius=radius) for radius in (d, n - d - 1))
    return inside + 2.0**n, outside + 2 * volume(n, d)


@identity("the logarithm of expected neurons is log I + log r - n log 2", "sdm_circle_intersection")
def _(x):
    sizes = circle(x)
    near = np.arange(min(2 * sizes["radius"], sizes["n_bits"]) + 1)
    log = attnspec.sdm_circle_intersection(near, **sizes, log=True)
    return log, np.log(counts_of(sizes)[near]) + np.log(sizes["n_locations"]) - sizes["n_bits"] * np.log(2)


@identity("a cap's intersection with itself is 1/2 I_{sin^2 theta}((n-1)/2, 1/2) of the sphere", "sdm_cap_intersection")
def _(x):
    sizes = circle(x, least=2)
    n, h = sizes["n_bits"], 1 - 2 * sizes["radius"] / sizes["n_bits"]
    share = betainc((n - 1) / 2, 1 / 2, 1 - h**2) / 2
    return attnspec.sdm_cap_intersection(1.0, **sizes), sizes["n_locations"] * (share if h >= 0 else 1 - share)


@identity("2J / A_n by the formula of Lee and Kim", "sdm_cap_intersection")
def _(x):
    n = int(x.rng.integers(3, 40))
    d = int(x.rng.integers(1, n // 2 + 1))
    theta = np.arccos(1 - 2 * d / n)
    theta_v = float(x.rng.uniform(0.1, 1.9)) * theta

    def slice_of(phi):
        return np.sin(phi) ** (n - 2) * betainc((n - 2) / 2, 1 / 2, 1 - (np.tan(theta_v / 2) / np.tan(phi)) ** 2)

    node, weight = np.polynomial.legendre.leggauss(80)
    s = ((node + 1) / 2) ** 2                                          # phi = theta_v/2 + L s: roots at s = 0 become smooth
    L = theta - theta_v / 2
    log_ratio = gammaln(n / 2) - gammaln((n - 1) / 2) - np.log(np.pi) / 2          # 2 pi^((n-1)/2) / Gamma((n-1)/2) / A_n
    want = np.exp(log_ratio) * np.sum(weight * np.sqrt(s) * L * slice_of(theta_v / 2 + L * s))
    return attnspec.sdm_cap_intersection(np.cos(theta_v), n_bits=n, radius=d, n_locations=1) / want, 1.0


@identity("hemispheres share (pi - theta_v) / (2 pi), in every dimension", "sdm_cap_intersection")
def _(x):
    d, c = int(x.rng.integers(1, 50)), x.rng.uniform(-1, 1, 5)
    return attnspec.sdm_cap_intersection(c, n_bits=2 * d, radius=d, n_locations=1), (np.pi - np.arccos(c)) / (2 * np.pi)


@identity("caps beyond a hemisphere: share(d) = 1 - 2 cap(n - d) + share(n - d)", "sdm_cap_intersection")
def _(x):
    n = int(x.rng.integers(2, 60))
    d, c = int(x.rng.integers(0, n + 1)), x.rng.uniform(-1, 1, 5)
    small, large = (attnspec.sdm_cap_intersection(np.append(c, 1), n_bits=n, radius=radius, n_locations=1) for radius in (d, n - d))
    return large[:-1], 1 - 2 * small[-1] + small[:-1]


@identity("the intersection of caps grows with the cosine", "sdm_cap_intersection")
def _(x):
    share = attnspec.sdm_cap_intersection(np.linspace(-1, 1, 21), **circle(x, least=2))
    return share[:-1], np.minimum(share[:-1], share[1:] * (1 + 1e-13))


@identity("official caps are e^2/2 times as large", "sdm_cap_intersection")
def _(x):
    sizes, c = circle(x, least=2), x.rng.uniform(-1, 1, 5)
    return attnspec.sdm_cap_intersection(c, **sizes, official=True), np.exp(2) / 2 * attnspec.sdm_cap_intersection(c, **sizes)


@identity("beta does not depend on r, which shifts the bias by its logarithm", "sdm_fit_beta")
def _(x):
    sizes, continuous = circle(x, least=2), bool(x.rng.integers(2))
    n, d, r = sizes.values()
    all_addresses = attnspec.sdm_fit_beta(n_bits=n, radius=d, continuous=continuous)
    return attnspec.sdm_fit_beta(**sizes, continuous=continuous), (all_addresses.beta, all_addresses.bias + np.log(r) - n * np.log(2))


@identity("official beta is the least-squares slope times d/(d - 1)", "sdm_fit_beta")
def _(x):
    sizes = circle(x, least=2)
    d = sizes["radius"]
    return attnspec.sdm_fit_beta(**sizes).beta, attnspec.sdm_fit_beta(**sizes, official=False).beta * d / (d - 1)


@identity("the official line: covariance over d - 1, variance over d, through the means; caps from 1 - 1e-15, times e^2/2", "sdm_fit_beta")
def _(x):
    sizes, continuous = circle(x, least=2), bool(x.rng.integers(2))
    d_v = np.arange(sizes["radius"])
    cos = 1 - 2 * d_v / sizes["n_bits"]
    if continuous:
        cos[0] -= 1e-15
        y = attnspec.sdm_cap_intersection(cos, **sizes, log=True, official=True)
    else:
        y = attnspec.sdm_circle_intersection(d_v, **sizes, log=True)
    beta = np.cov(cos, y)[0, 1] / np.var(cos)
    return attnspec.sdm_fit_beta(**sizes, continuous=continuous), (beta, y.mean() - beta * cos.mean())


@identity("residuals of the least-squares line sum to zero and are orthogonal to the cosines", "sdm_fit_beta")
def _(x):
    sizes, continuous = circle(x, least=2), bool(x.rng.integers(2))
    d_v = np.arange(sizes["radius"])
    cos = 1 - 2 * d_v / sizes["n_bits"]
    fit = attnspec.sdm_fit_beta(**sizes, continuous=continuous, official=False)
    y = attnspec.sdm_cap_intersection(cos, **sizes, log=True) if continuous else attnspec.sdm_circle_intersection(d_v, **sizes, log=True)
    residual = (y - fit.bias - fit.beta * cos) / np.abs(y).max(initial=1.0)
    return [residual.sum(), residual @ cos], [0.0, 0.0]


@identity("p(d* - 1) < p* <= p(d*)", "sdm_optimal_radius")
def _(x):
    n, r, m = int(x.rng.integers(10, 80)), float(x.rng.uniform(1e3, 1e6)), int(x.rng.integers(1, 1000))
    criterion = x.rng.choice(["snr", "memory"])
    z2 = ndtri(0.5 ** (1 / n)) ** 2
    T = 2 * r**4 * z2 + r**3 * z2**3 + 2 * np.sqrt(r**8 * z2**2 + r**7 * z2**4)
    p = (2 * m * r) ** (-1 / 3) if criterion == "snr" else (z2**2 / T ** (1 / 3) + T ** (1 / 3) / r**2 + z2 / r) / 2
    d = attnspec.sdm_optimal_radius(n_bits=n, n_patterns=m, n_locations=r, criterion=str(criterion))
    return [int(d == 0 or bdtr(d - 1, n, 0.5) < p), int(bdtr(d, n, 0.5) >= p)], [1, 1]


@identity("no radius has a larger critical distance than d*", "sdm_optimal_radius", "sdm_critical_distance")
def _(x):
    n = int(x.rng.integers(1, 40))
    sizes = {"n_bits": n, "n_patterns": int(x.rng.integers(1, 1000)), "n_locations": float(x.rng.uniform(1e3, 1e8))}
    best = attnspec.sdm_optimal_radius(**sizes, criterion="critical_distance")
    all_radii = [attnspec.sdm_critical_distance(**sizes, radius=d) for d in range(n + 1)]
    return best, int(np.argmax(all_radii))


@identity("reading brings a query closer up to the critical distance, and not one bit further", "sdm_critical_distance")
def _(x):
    n, r, m = int(x.rng.integers(1, 60)), float(x.rng.uniform(1e3, 1e8)), int(x.rng.integers(1, 1000))
    d = int(x.rng.integers(0, n + 1))
    p = bdtr(d, n, 0.5)
    I = attnspec.sdm_circle_intersection(np.arange(n + 1), n_bits=n, radius=d, n_locations=r)
    noise = I + (m - 1) * p**2 * r * (1 + p**2 * r)
    closer = n * ndtr(-I / np.sqrt(np.where(noise == 0, 1.0, noise))) < np.arange(n + 1)
    CD = attnspec.sdm_critical_distance(n_bits=n, radius=d, n_patterns=m, n_locations=r)
    return closer[1 : CD + 2].astype(int), np.append(np.ones(CD, int), np.zeros(int(n > CD), int))


@identity("SNR^2 at m = m(p) is z^2", "sdm_capacity")
def _(x):
    n, r, recall = int(x.rng.integers(1, 80)), float(x.rng.uniform(1e3, 1e6)), float(x.rng.uniform(0.6, 0.99))
    d = int(x.rng.integers(n // 2, n + 1))                             # p r is far above z^2, so that m > 1 and nothing cancels
    p, z = bdtr(d, n, 0.5), ndtri(recall ** (1 / n))
    m = attnspec.sdm_capacity(n_bits=n, radius=d, n_locations=r, recall=recall)
    noise = p * r + (m - 1) * p**2 * r * (1 + p**2 * r)
    return noise * z**2 / (p * r) ** 2, 1.0


@identity("writing two sets of patterns adds their storages, in any order", "sdm_write")
def _(x):
    locations, addresses, pointers = bits(x, x.n, x.d), bits(x, x.m, x.d), bits(x, x.m, x.d)
    radius, cut, order = int(x.rng.integers(0, x.d + 1)), int(x.rng.integers(0, x.m + 1)), x.rng.permutation(x.m)
    parts = [attnspec.sdm_write(locations, addresses[part], pointers[part], radius=radius) for part in (order[:cut], order[cut:])]
    every = attnspec.sdm_write(locations, addresses, pointers, radius=radius)
    return np.append(every.storage, every.counts), np.append(sum(p.storage for p in parts), sum(p.counts for p in parts))


@identity("signed counters: the bits are the signs of sum_t a_it (2 v_t - h_t)", "sdm_read", "sdm_write")
def _(x):
    locations, addresses, pointers, queries = bits(x, 20, x.d), bits(x, x.m, x.d), bits(x, x.m, x.d), bits(x, x.n, x.d)
    radius = int(x.rng.integers(0, x.d + 1))
    near = (addresses[:, None] != locations).sum(-1) <= radius
    counters = near.T.astype(int) @ (2 * pointers - 1)
    active = ((queries[:, None] != locations).sum(-1) <= radius).astype(int)
    touched = active @ near.sum(0) > 0
    want = np.where(touched[:, None], active @ counters > 0, queries)
    return attnspec.sdm_read(queries, locations, *attnspec.sdm_write(locations, addresses, pointers, radius=radius), radius=radius), want


@identity("pattern view: patterns weigh by the neurons near both pattern and query", "sdm_read")
def _(x):
    locations, addresses, pointers, queries = bits(x, 20, x.d), bits(x, x.m, x.d), bits(x, x.m, x.d), bits(x, x.n, x.d)
    radius = int(x.rng.integers(0, x.d + 1))
    near = [(z[:, None] != locations).sum(-1) <= radius for z in (queries, addresses)]
    w = np.sum(near[0][:, None] & near[1], axis=-1)
    want = np.where(w.sum(-1, keepdims=True) > 0, 2 * w @ pointers > w.sum(-1, keepdims=True), queries)
    return attnspec.sdm_read(queries, locations, *attnspec.sdm_write(locations, addresses, pointers, radius=radius), radius=radius), want


@identity("one pattern is recalled by every query whose circle holds a neuron of its own", "sdm_read")
def _(x):
    locations, address, pointer, queries = bits(x, 20, x.d), bits(x, 1, x.d), bits(x, 1, x.d), bits(x, x.n, x.d)
    radius = int(x.rng.integers(0, x.d + 1))
    near = [(z[:, None] != locations).sum(-1) <= radius for z in (queries, address)]
    want = np.where(np.any(near[0] & near[1], axis=-1, keepdims=True), pointer, queries)
    return attnspec.sdm_read(queries, locations, *attnspec.sdm_write(locations, address, pointer, radius=radius), radius=radius), want


@identity("with a neuron at every address the pattern view by circles is reading neurons", "sdm_update", "sdm_read", "sdm_write")
def _(x):
    locations = np.array(list(np.ndindex((2,) * x.d)))
    addresses, pointers, queries = bits(x, x.m, x.d), bits(x, x.m, x.d), bits(x, x.n, x.d)
    options = {"radius": int(x.rng.integers(0, x.d + 1)), "n_iters": int(x.rng.integers(1, 4))}
    memory = attnspec.sdm_write(locations, addresses, pointers, radius=options["radius"])
    return attnspec.sdm_update(queries, addresses, pointers, **options), attnspec.sdm_read(queries, locations, *memory, **options)


@identity("a large beta reads the nearest pattern", "sdm_update")
def _(x):
    addresses, pointers, queries = bits(x, x.m, x.d), bits(x, x.m, x.d), bits(x, x.n, x.d)
    distance = (queries[:, None] != addresses).sum(-1)
    nearest = (distance == distance.min(-1, keepdims=True)).astype(int)
    lead = nearest @ (2 * pointers - 1)                                # where the nearest are at a tie, the next ones decide
    bits_read = attnspec.sdm_update(queries, addresses, pointers, weighting="exponential", beta=1e4)
    return np.where(lead == 0, 0, bits_read), (lead > 0).astype(int)


@identity("beta is fitted to the circles unless given", "sdm_update", "sdm_attention", "sdm_fit_beta")
def _(x):
    d, n, m = x.d + 1, 20 * x.n, x.m + 2
    radius = int(x.rng.integers(2, d + 1))
    options = {"weighting": "exponential", "beta": attnspec.sdm_fit_beta(n_bits=d, radius=radius).beta}
    queries, addresses, pointers = bits(x, n, d), bits(x, m, d), bits(x, m, d)
    real = x.normal(x.n, d), x.normal(x.m, d), x.normal(x.m, d)
    got = [attnspec.sdm_update(queries, addresses, pointers, radius=radius, weighting="exponential"),
           attnspec.sdm_attention(*real, radius=radius, weighting="exponential")]
    want = [attnspec.sdm_update(queries, addresses, pointers, **options), attnspec.sdm_attention(*real, **options)]
    return np.concatenate(got), np.concatenate(want)


@identity("exponential reading: the bits where most of the weight exp(beta cos) says 1", "sdm_update")
def _(x):
    addresses, pointers, queries = bits(x, x.m, x.d), bits(x, x.m, x.d), bits(x, x.n, x.d)
    beta = float(x.rng.uniform(-5, 5))
    w = np.exp(beta * (1 - 2 * (queries[:, None] != addresses).sum(-1) / x.d))
    lead = w @ (2 * pointers - 1) / w.sum(-1, keepdims=True)
    read = attnspec.sdm_update(queries, addresses, pointers, weighting="exponential", beta=beta)
    decided = np.abs(lead) > 1e-12
    return np.where(decided, read, 0), np.where(decided, lead > 0, 0)


def unit_vectors(x, *shape):
    v = x.normal(*shape)
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


@identity("exponential weights are softmax attention of unit vectors with scale beta", "sdm_attention")
def _(x):
    q, k, v, beta = unit_vectors(x, x.n, x.d), unit_vectors(x, x.m, x.d), x.normal(x.m, x.d), x.rng.uniform(0, 30)
    return (attnspec.sdm_attention(q, k, v, weighting="exponential", beta=beta),
            attnspec.scaled_dot_product_attention(q, k, v, scale=beta))


@identity("stretching queries and addresses changes nothing", "sdm_attention")
def _(x):
    q, k, v = x.normal(x.n, x.d), x.normal(x.m, x.d), x.normal(x.m, x.d)
    kind = str(x.rng.choice(["circle", "exponential"] + ["cap"] * (x.d > 1)))
    options = {"weighting": kind, "radius": x.d, "beta": 2.0, "return_weights": True}
    stretched = attnspec.sdm_attention(q * x.rng.uniform(0.5, 2, (x.n, 1)), k * x.rng.uniform(0.5, 2, (x.m, 1)), v, **options)
    return stretched.weights, attnspec.sdm_attention(q, k, v, **options).weights


@identity("on vectors of +-1 circles weigh by the Hamming distance", "sdm_attention")
def _(x):
    q, k, v, radius = 2 * bits(x, x.n, x.d) - 1, 2 * bits(x, x.m, x.d) - 1, x.normal(x.m, x.d), int(x.rng.integers(0, x.d + 1))
    w = attnspec.sdm_circle_intersection((q[:, None] != k).sum(-1), n_bits=x.d, radius=radius)
    total = w.sum(-1, keepdims=True)
    return attnspec.sdm_attention(q, k, v, radius=radius), np.where(total > 0, w @ v / np.where(total > 0, total, 1), q)


@identity("caps weigh by the intersection at their cosine", "sdm_attention")
def _(x):
    d, radius = x.d + 1, int(x.rng.integers(0, x.d + 2))
    q, k, v = unit_vectors(x, x.n, d), unit_vectors(x, x.m, d), x.normal(x.m, d)
    w = attnspec.sdm_cap_intersection(np.clip(q @ k.T, -1, 1), n_bits=d, radius=radius, n_locations=1)
    total = w.sum(-1, keepdims=True)
    got = attnspec.sdm_attention(q, k, v, weighting="cap", radius=radius, return_weights=True)
    want = w / np.where(total > 0, total, 1)
    return np.append(got.weights, got.out), np.append(want, np.where(total > 0, want @ v, q))


@identity("resolution K looks caps up at K points from -1 to 1", "sdm_attention", "sdm_cap_intersection")
def _(x):
    d, K = x.d + 1, int(x.rng.integers(2, 50))
    radius = int(x.rng.integers(1, d + 1))
    q, k, v = unit_vectors(x, x.n, d), unit_vectors(x, x.m, d), x.normal(x.m, d)
    index = np.maximum(np.trunc(K * (q @ k.T + 1) / 2 - 1), 0)
    w = attnspec.sdm_cap_intersection(np.minimum(-1 + 2 * index / (K - 1), 1.0), n_bits=d, radius=radius, n_locations=1)
    total = w.sum(-1, keepdims=True)
    got = attnspec.sdm_attention(q, k, v, weighting="cap", radius=radius, resolution=K, return_weights=True)
    return got.weights, w / np.where(total > 0, total, 1)


@identity("unit_norm keeps the direction of an average and gives it length 1", "sdm_attention")
def _(x):
    q, k, v = x.normal(x.n, x.d), x.normal(x.m, x.d), x.normal(x.m, x.d)
    plain = attnspec.sdm_attention(q, k, v, weighting="exponential", beta=3.0)
    normed = attnspec.sdm_attention(q, k, v, weighting="exponential", beta=3.0, unit_norm=True)
    length = np.linalg.norm(plain, axis=-1, keepdims=True)
    return np.append(normed * length, np.linalg.norm(normed, axis=-1)), np.append(plain, np.ones(x.n))


@identity("two steps are a step from the result of the first", "sdm_attention")
def _(x):
    q, k, v = x.normal(x.n, x.d), x.normal(x.m, x.d), x.normal(x.m, x.d)
    options = {"weighting": "exponential", "beta": 3.0, "unit_norm": True}
    once = attnspec.sdm_attention(q, k, v, **options)
    return attnspec.sdm_attention(q, k, v, n_iters=2, **options), attnspec.sdm_attention(once, k, v, **options)
