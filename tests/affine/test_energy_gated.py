import math

import numpy as np
import pytest

import attnspec

from derivatives import central_difference, complex_step

RNG = np.random.default_rng(0)
LINEAR, CONVOLUTION, MORLET = VARIANTS = ("energy_gated_attention", "convolution_energy_gated_attention", "morlet_energy_gated_attention")
each = pytest.mark.parametrize("name", VARIANTS)


def drawn(name, **sizes):
    return attnspec.formulas()[name].draw({"n": 7, "d": 3, "e": 2, "c": 4, "s": 3, **sizes}, RNG)


def energies_by_loops(name, x, **w):
    """e[s][j] one number at a time."""
    n, channels = x.shape
    if name == LINEAR:
        return [[math.fsum(w_s * x[j]) + b for j in range(n)] for w_s, b in zip(w["w_energy"], w["b_energy"], strict=True)]
    energies = []
    if name == CONVOLUTION:
        for filters, biases in zip(w["filters"], w["biases"], strict=True):
            length = filters.shape[-1]
            energies.append([sum((b + math.fsum(F[c, u] * x[j - length + 1 + u, c] for c in range(channels) for u in range(length)
                                                if j - length + 1 + u >= 0)) ** 2 for F, b in zip(filters, biases, strict=True))
                             for j in range(n)])
        return energies
    for length, omega, sigma in zip((3, 7, 15, 31), w["omega"], w["sigma"], strict=False):
        omega, sigma = min(omega, 0.95 * math.pi), max(sigma, 1e-3)
        omega = 5 / sigma if omega * sigma < 5 else omega
        energies.append([])
        for j in range(n):
            taps = [(t, sum(x[j - length + 1 + t]) / channels) for t in range(length) if j - length + 1 + t >= 0]
            parts = [math.fsum(f(omega * t) * math.exp(-t * t / (2 * sigma**2 + 1e-8)) * y for t, y in taps) for f in (math.cos, math.sin)]
            energies[-1].append(parts[0] ** 2 + parts[1] ** 2)
    return energies


def by_loops(name, x, w_q, w_k, w_v, alpha, tau, mixing, znorm, **w):
    n = len(x)
    e = energies_by_loops(name, x, **w)
    share = [math.exp(c) / sum(math.exp(other) for other in mixing) for c in mixing]
    g = []
    for j in range(n):
        g.append(0.0)
        for s, e_s in enumerate(e):
            among = e_s[: j + 1] if znorm == "prefix" else e_s
            mean = math.fsum(among) / len(among)
            std = math.sqrt(math.fsum((value - mean) ** 2 for value in among) / len(among))
            normalised = (e_s[j] - mean) / max(std, 1e-8)
            g[j] += share[s] / (1 + math.exp(-alpha[s] * (normalised - tau[s])))
    out = np.zeros((n, len(w_v)))
    for i in range(n):
        s = [math.fsum((w_q @ x[i]) * (w_k @ x[j])) / math.sqrt(len(w_q)) for j in range(i + 1)]
        weights = [math.exp(value - max(s)) * g[j] for j, value in enumerate(s)]
        out[i] = sum(weight * (w_v @ x[j]) for j, weight in enumerate(weights)) / sum(weights)
    return out


@each
@pytest.mark.parametrize("znorm", ["sequence", "prefix"])
def test_against_plain_loops(name, znorm):
    arrays = drawn(name)
    got = getattr(attnspec, name)(**arrays, znorm=znorm)
    np.testing.assert_allclose(got, by_loops(name, **arrays, znorm=znorm), rtol=1e-11, atol=1e-12)


class TestByHand:
    def test_gate(self):
        # Energies 0, 2, 4: mean 2, population std sqrt(8/3).
        u = 2 / math.sqrt(8 / 3)
        want = [1 / (1 + math.exp(-3 * (e - 0.5))) for e in (-u, 0.0, u)]
        np.testing.assert_allclose(attnspec.energy_gate([[0.0, 2.0, 4.0]], [3.0], [0.5], [9.0]), want, rtol=1e-14)

    def test_prefix_gate(self):
        # Normalised within (0), (0, 2), (0, 2, 4): 0, 1, sqrt(3/2).
        want = [1 / (1 + math.exp(-e)) for e in (0.0, 1.0, math.sqrt(1.5))]
        np.testing.assert_allclose(attnspec.energy_gate([[0.0, 2.0, 4.0]], [1.0], [0.0], [0.0], znorm="prefix"), want, rtol=1e-14)

    def test_scales_are_mixed_by_a_softmax(self):
        got = attnspec.energy_gate([[1.0, 3.0], [3.0, 1.0]], np.log([3.0, 3.0]), [0.0, 0.0], np.log([3.0, 1.0]))
        np.testing.assert_allclose(got, [0.75 * 0.25 + 0.25 * 0.75, 0.75 * 0.75 + 0.25 * 0.25], rtol=1e-14)

    def test_weights(self):
        one, zero = [[1.0]], [[0.0]]
        result = attnspec.energy_gated_attention([[1.0], [3.0]], zero, zero, one, one, [0.0], [math.log(3.0)], [0.0], [0.0],
                                                 causal=False, return_weights=True)
        np.testing.assert_allclose(result.weights, [[0.25, 0.75], [0.25, 0.75]], rtol=1e-14)

    def test_convolution_looks_back(self):
        x, filters = [[1.0], [2.0], [4.0]], [[[[1.0, 10.0]], [[0.0, 0.0]]]]         # previous + 10 present
        np.testing.assert_array_equal(attnspec.convolution_energy(x, filters, [[0.0, 3.0]]), [[109.0, 450.0, 1773.0]])

    def test_morlet_peak_meets_the_oldest_sample(self):
        # omega sigma = 5 exactly; of an impulse, tap t has energy exp(-2 t^2 / (2 sigma^2)), t = 2 at the impulse itself.
        x, sigma = np.zeros((5, 3)), 2.5
        x[1] = 3.0
        got = attnspec.morlet_energy(x, [2.0], [sigma], lengths=(3,), eps=0.0)
        np.testing.assert_allclose(got, [9 * np.array([0, math.exp(-4 / sigma**2), math.exp(-1 / sigma**2), 1, 0])], rtol=1e-14)

    def test_morlet_limits(self):
        x = RNG.standard_normal((6, 2))
        for given, used in (((3.1, 4.0), (0.95 * math.pi, 4.0)), ((0.1, 10.0), (0.5, 10.0)), ((1.0, 1e-9), (5e3, 1e-3))):
            t = np.arange(3)
            kernel = np.exp(1j * used[0] * t - t**2 / (2 * used[1] ** 2 + 1))      # with eps = 1 taps remain at sigma = 1e-3
            want = np.abs(np.convolve(x.mean(1), kernel[::-1])[:6]) ** 2
            np.testing.assert_allclose(attnspec.morlet_energy(x, [given[0]], [given[1]], eps=1.0)[0], want, rtol=1e-11, atol=1e-13)

    def test_morlet_eps(self):
        got = attnspec.morlet_energy([[1.0], [0.0]], [1.0], [1.0], lengths=(2,), eps=3.0)
        np.testing.assert_allclose(got, [[math.exp(-2 / 5), 1.0]], rtol=1e-14)

    def test_wavelets_are_3_7_15_31_63_long(self):
        x = np.zeros((70, 1))
        x[0] = 1.0
        energy = attnspec.morlet_energy(x, np.full(5, 1.0), np.full(5, 1e6))
        np.testing.assert_array_equal((energy > 0.5).sum(-1), [3, 7, 15, 31, 63])


def test_parameter_count_of_the_paper():
    arrays = attnspec.formulas()[LINEAR].draw({"c": 256, "s": 1, "d": 32})
    assert 6 * 8 * sum(arrays[name].size for name in ("w_energy", "b_energy", "alpha", "tau", "mixing")) == 12_480


class TestSpecialValues:
    @each
    def test_one_token(self, name):
        arrays = drawn(name, n=1)
        for std_floor in ("clamp", "add"):
            got = getattr(attnspec, name)(**arrays, std_floor=std_floor)
            np.testing.assert_allclose(got, arrays["x"] @ arrays["w_v"].T, rtol=1e-14)
        gate = attnspec.energy_gate([[7.0]], [2.0], [0.3], [0.0])
        np.testing.assert_allclose(gate, [1 / (1 + math.exp(0.6))], rtol=1e-14)

    @each
    def test_no_tokens(self, name):
        np.testing.assert_array_equal(getattr(attnspec, name)(**drawn(name, n=0)), np.zeros((0, 2)))

    def test_equal_energies_have_gate_sigma_of_minus_alpha_tau(self):
        for std_floor in ("clamp", "add"):
            gate = attnspec.energy_gate([[0.5] * 4], [2.0], [0.25], [0.0], std_floor=std_floor)
            np.testing.assert_allclose(gate, np.full(4, 1 / (1 + math.exp(0.5))), rtol=1e-14)

    def test_floors_of_the_standard_deviation(self):
        energy = np.array([[0.0, 2e-8]])                               # std 1e-8
        clamped, added = (attnspec.energy_gate(energy, [1.0], [0.0], [0.0], std_floor=floor)[1] for floor in ("clamp", "add"))
        np.testing.assert_allclose([clamped, added], [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-0.5))], rtol=1e-9)

    def test_closed_gates(self):
        # g = sigmoid(-1000) = 0 for both tokens: the floor of the normaliser leaves zeros instead of 0/0.
        one, zero = [[1.0]], [[0.0]]
        out = attnspec.energy_gated_attention([[1.0], [3.0]], zero, zero, one, one, [0.0], [1.0], [1e3], [0.0])
        np.testing.assert_array_equal(out, np.zeros((2, 1)))

    def test_huge_logits(self):
        one = [[1.0]]
        out = attnspec.energy_gated_attention([[100.0], [-200.0]], one, one, one, one, [0.0], [0.0], [0.0], [0.0], causal=False)
        np.testing.assert_array_equal(out, [[100.0], [-200.0]])        # logits 1e4 and -2e4, then -2e4 and 4e4

    @each
    def test_a_later_nan_leaves_prefix_statistics_alone(self, name):
        arrays = drawn(name)
        want = getattr(attnspec, name)(**arrays, znorm="prefix")
        arrays["x"][5:] = np.nan
        got = getattr(attnspec, name)(**arrays, znorm="prefix")
        np.testing.assert_allclose(got[:5], want[:5], rtol=1e-12, atol=1e-14)
        assert np.all(np.isnan(got[5:]))


@each
def test_statistics_of_the_sequence_see_the_future(name):
    """The official normalisation is not causal: the last token changes earlier outputs."""
    arrays = drawn(name)
    other = {**arrays, "x": np.concatenate([arrays["x"][:-1], arrays["x"][-1:] + 3.0])}
    moved = np.abs(getattr(attnspec, name)(**arrays) - getattr(attnspec, name)(**other))[1:-1].max()
    assert moved > 1e-3
    before, after = (getattr(attnspec, name)(**a, znorm="prefix")[:-1] for a in (arrays, other))
    np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-14)


@each
def test_heads_are_leading_axes_of_the_weights(name):
    arrays = drawn(name, h=3)
    arrays["x"] = RNG.standard_normal((2, 1, 7, 4))
    got = getattr(attnspec, name)(**arrays)
    assert got.shape == (2, 3, 7, 2)
    one = {key: value[2] for key, value in arrays.items() if key != "x"}
    np.testing.assert_allclose(got[1, 2], getattr(attnspec, name)(**one, x=arrays["x"][1, 0]), rtol=1e-12, atol=1e-13)


@each
@pytest.mark.parametrize("options", [{"znorm": "prefix"}, {"std_floor": "add", "causal": False}, {"scale": 0.3}])
def test_derivatives_of_all_arrays(name, options):
    arrays = drawn(name)

    def function(**a):
        return getattr(attnspec, name)(**a, **options)

    for key, array in arrays.items():
        direction = RNG.standard_normal(array.shape)
        exact, rough = (derivative(function, arrays, key, direction) for derivative in (complex_step, central_difference))
        np.testing.assert_allclose(exact, rough, rtol=1e-5, atol=1e-7, err_msg=key)


def test_lengths_option():
    arrays = drawn(MORLET, s=2)
    got = attnspec.morlet_energy_gated_attention(**arrays, lengths=(3, 7))
    np.testing.assert_array_equal(got, attnspec.morlet_energy_gated_attention(**arrays))
    assert np.abs(got - attnspec.morlet_energy_gated_attention(**arrays, lengths=(7, 3))).max() > 1e-3


@each
@pytest.mark.parametrize("option, message", [
    ({"znorm": "batch"}, r"^znorm: expected 'sequence' or 'prefix', got 'batch'$"),
    ({"std_floor": 1e-5}, r"^std_floor: expected 'clamp' or 'add', got 1e-05$"),
    ({"causal": "yes"}, r"^causal: "),
    ({"scale": "big"}, r"^scale: "),
    ({"tau": np.ones(5)}, r"^tau: expected shape \(\.\.\., s\) with s = 3"),
])
def test_wrong_options_are_refused(name, option, message):
    with pytest.raises(ValueError, match=message):
        getattr(attnspec, name)(**{**drawn(name), **option})


@pytest.mark.parametrize("option, message", [
    ({"lengths": (3, 7)}, r"^lengths: expected 3 whole numbers, as many as omega, got \(3, 7\)$"),
    ({"lengths": 3}, r"^lengths: expected 3 whole numbers, got 3$"),
    ({"lengths": (3, 7, 0)}, r"^lengths: expected a whole number >= 1, got 0$"),
    ({"eps": -1.0}, r"^eps: expected a number >= 0, got -1.0$"),
])
def test_wrong_wavelets_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        attnspec.morlet_energy_gated_attention(**drawn(MORLET), **option)


@each
@pytest.mark.parametrize("late", [np.inf, 1e200])
def test_a_later_inf_or_huge_token_leaves_prefix_statistics_alone(name, late):
    arrays = drawn(name)
    spoilt = arrays["x"].copy()
    spoilt[-1] = late
    got, want = (getattr(attnspec, name)(**{**arrays, "x": x}, znorm="prefix") for x in (spoilt, arrays["x"]))
    np.testing.assert_allclose(got[:-1], want[:-1], rtol=1e-13)


@pytest.mark.parametrize("std_floor", ["clamp", "add"])
def test_a_later_infinite_energy_leaves_earlier_gates_alone(std_floor):
    options = {"znorm": "prefix", "std_floor": std_floor}
    for late in (np.inf, 1e200):
        got = attnspec.energy_gate([[1.0, 3.0, late]], [np.log(3.0)], [0.0], [0.0], **options)
        np.testing.assert_allclose(got[:2], [0.5, 0.75], rtol=1e-8)    # normalised energies 0 and 1, to 1e-8 with the floor added
    assert np.isnan(attnspec.energy_gate([[1.0, 3.0, np.inf]], [1.0], [0.0], [0.0], **options)[2])
