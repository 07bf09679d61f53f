"""Cap intersection: the circle intersection of Sparse Distributed Memory on the sphere, for real unit vectors in place of bits.

A neuron reads and writes within the angle theta of its address, theta being the angle whose cosine corresponds to the Hamming radius d:

    cos theta = 1 - 2 d/n,   cos theta_v = <p, xi>

    J = pi^((n-1)/2) / Gamma((n-1)/2) * int_{theta_v/2}^{theta} sin(phi)^(n-2) I_{1 - (tan(theta_v/2)/tan(phi))^2}((n-2)/2, 1/2) dphi

    expected neurons in both caps = r 2J / A_n,   A_n = 2 pi^(n/2) / Gamma(n/2)

where n is the dimension (`n_bits`), d the radius (`radius`), r the number of neurons spread evenly over the unit sphere (`n_locations`),
I_x(a, b) the regularised incomplete beta function and cos theta_v (...) the cosine between pattern and query.

The share of the sphere has a shorter form, which is the one computed here. By Plackett's argument its derivative in theta_v is elementary
(the density at the corner where the two caps' rims cross), and integrating that from the angle 2 theta, where the caps only touch, gives

    2J / A_n = (1/pi) int_0^L rho(psi)^((n-2)/2) dpsi,   rho(psi) = sin(psi) sin(psi + 2 delta) / sin(psi + delta)^2

    L = theta - theta_v/2,   delta = pi/2 - theta

and 0 where L <= 0. rho grows with psi, so that nothing overflows once rho(L) is taken out. For caps larger than a hemisphere
(d > n/2) the two complements have the angle pi - theta; the share is their intersection's plus that of the band between them,
P(|x_1| <= cos(pi - theta)) = I_{cos^2 theta}(1/2, (n-1)/2).

Source: Bricken & Pehlevan, "Attention Approximates Sparse Distributed Memory", arXiv:2111.05498, appendix on continuous vectors, and
the authors' code (cap_intersection); J: Lee & Kim, "Concise Formulas for the Surface Area of the Intersection of Two Hyperspherical
Caps", 2014. The shorter form is derived; it agrees with J to 30 digits.

Conventions. The two pieces that J measures are equal, hence 2J. official=True is the authors' code, which adds 2 to log J instead of
log 2: e^2/2 = 3.69 times too many neurons. That is harmless where weights are normalised over patterns and in the slope of the fit
of beta, and wrong where neurons are counted. n_locations=None stands for r = 2^n, as for bits. cos theta_v = 1 gives the cap itself
(the authors subtract 1e-15). Cosines are clipped to -1 and 1 where they exceed them by up to 1e-4. log(0) = -inf (the authors: -1e30).
The integral is a tanh-sinh sum, exact to rounding.

Identities. theta_v = 0 gives the share of one cap, 1/2 I_{sin^2 theta}((n-1)/2, 1/2). d = n/2 gives (pi - theta_v) / (2 pi) in every
dimension; n = 2 gives (2 theta - theta_v) / (2 pi), an arc. The intersection grows with the cosine. d = n gives r.

Wrong versions met elsewhere: the constant e^2 above; the default tolerance of a quadrature routine, which is far above these integrals
and costs 1e-9 near theta_v = 0; zero for caps larger than a hemisphere whose complements overlap.
"""

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import whole
from attnspec.reference.memory.sdm_circle import bits_and_radius, location_count, log_of

# tanh-sinh rule for int_0^1: nodes s(t) = 1 / (1 + exp(-pi sinh t)), weights s'(t) dt
STEP = 0.025
NODES = np.pi * np.sinh(STEP * np.arange(-136, 137))
SHARES = 1 / (1 + np.exp(-NODES))
WEIGHTS = STEP * np.sqrt(np.pi**2 + NODES**2) * SHARES / (1 + np.exp(NODES))        # pi cosh t = sqrt(pi^2 + (pi sinh t)^2)


def log_integral(L, delta, n):
    """Logarithm of (1/pi) int_0^L rho^((n-2)/2) for L > 0."""

    def rho(psi):
        return np.sin(psi) * np.sin(psi + 2 * delta) / np.sin(psi + delta) ** 2

    top, total = rho(L), 0.0
    for s, w in zip(SHARES, WEIGHTS, strict=True):
        total = total + w * (rho(s * L) / top) ** ((n - 2) / 2)
    return np.log(L / np.pi) + (n - 2) / 2 * np.log(top) + np.log(total)


def log_cap_share(c, n, d):
    """Logarithm (...) of the share of the sphere in n dimensions that lies in two caps whose centres have the cosine c (...)."""
    theta, h = np.arccos(1 - 2 * d / n), 1 - 2 * d / n
    delta = np.arcsin(h) if h >= 0 else np.arcsin(-h)                  # of the caps or, beyond a hemisphere, of their complements
    L = np.asarray(np.pi / 2 - delta - np.arccos(c) / 2)
    meet = ~(L.real <= 0)
    log_share = np.full(L.shape, -np.inf, L.dtype)
    log_share[meet] = log_integral(L[meet], delta, n)
    if h >= 0:
        return log_share
    from scipy.special import betainc  # slow to import, and needed here only

    return np.log(betainc(1 / 2, (n - 1) / 2, np.cos(theta) ** 2) + np.exp(log_share))


def draw_cosines(sizes, rng):
    return {"cosine": rng.uniform(-0.3, 0.95, [sizes[axis] for axis in ("b", "h") if axis in sizes] or [25]),
            "n_bits": np.array(16), "radius": np.array(6)}


@formula(
    family="memory",
    shapes={"cosine": "...", "n_bits": "int", "radius": "int", "out": "..."},
    equation="out = r 2J / A_n = (r / pi) int_0^(theta - theta_v/2) rho(psi)^((n-2)/2) dpsi",
    latex=r"\mathrm{out}=r\,\frac{2J}{A_n},\quad J=\frac{\pi^{(n-1)/2}}{\Gamma(\frac{n-1}{2})}\int_{\theta_v/2}^{\theta}\sin^{n-2}\phi\;"
          r"I_{1-\left(\frac{\tan(\theta_v/2)}{\tan\phi}\right)^2}\!\left(\tfrac{n-2}{2},\tfrac12\right)d\phi",
    source="arXiv:2111.05498, appendix; Lee & Kim 2014",
    kinks="cosine = 1 and -1; where the caps only touch, for n = 2",
    draw=draw_cosines,
)
def sdm_cap_intersection(cosine, *, n_bits, radius, n_locations=None, log=False, official=False):
    """Expected number (...) of neurons on the unit sphere that are within the cap angle of both of two unit vectors.

    cosine: product (...) of the two unit vectors, -1 to 1.  n_bits: dimension n >= 2 of the vectors.
    radius: Hamming radius d whose cosine 1 - 2d/n bounds the caps, 0 to n_bits.
    n_locations: number r of neurons, a whole number of any size or a float; None for 2^n; 1 gives the share of the sphere.
    log: return the logarithm.  official: the authors' constant, e^2/2 times too large.
    Raises ValueError where a cosine, radius or number is out of range, naming the argument.

    >>> sdm_cap_intersection([1.0, 0.0, -1.0], n_bits=8, radius=4, n_locations=100).round(9)          # hemispheres
    array([50., 25.,  0.])
    """
    n, d = bits_and_radius(whole("n_bits", int(n_bits), least=2), radius)
    far = (cosine.real > 1 + 1e-4) | (cosine.real < -1 - 1e-4)
    if np.any(far):
        raise ValueError(f"cosine: expected numbers from -1 to 1, got {cosine[far].flat[0]}")
    c = np.where(cosine.real > 1, 1.0, np.where(cosine.real < -1, -1.0, cosine))
    log_neurons = log_cap_share(c, n, d) + log_of(location_count(n_locations, n))
    if official:
        log_neurons = log_neurons + (2 - np.log(2))
    return log_neurons if log else np.exp(log_neurons)
