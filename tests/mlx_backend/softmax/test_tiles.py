"""The Metal kernel of softmax attention, run by the emulator: within the error bound with every option, and special values exact."""

import os

import numpy as np
import pytest

import attnspec
from attnspec.conformance.bounds import bound

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import metal_agreement  # noqa: E402
import metal_emulator  # noqa: E402
from metal_agreement import emulated, worst_gradients  # noqa: E402
from mlx_agreement import in_mlx, in_numpy  # noqa: E402

from attnspec import mlx_backend  # noqa: E402
from attnspec.mlx_backend import metal  # noqa: E402
from attnspec.mlx_backend.softmax import tiles  # noqa: E402

pytestmark = metal_agreement.needs_a_compiler
RNG = np.random.default_rng(0)
SIZES = [(1, 1, 1, 1), (7, 5, 4, 3), (37, 70, 16, 9), (65, 63, 40, 64)]
if os.environ.get("ATTNSPEC_LEVEL") == "full":                         # around the edges of tiles; a documented command of its own
    SIZES += [(n, m, *widths) for n in (1, 8, 9, 31, 33, 65) for m in (1, 31, 33, 64, 130) for widths in ((8, 8), (24, 17))]


def worst_ratio(name, arrays, options, dtype="float32", **emulation):
    n = arrays["state" if name.startswith("hopfield") else "q"].shape[-2]
    kernel = "softmax row" if n <= tiles.FEW else "softmax tiles"
    return metal_agreement.worst_ratio(kernel, name, arrays, options, dtype, **emulation)


def drawn(n, m, d, e, h=4, hk=2):
    return {"q": RNG.standard_normal((h, n, d)), "k": RNG.standard_normal((hk, m, d)), "v": RNG.standard_normal((hk, m, e))}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_within_the_bound(sizes, dtype):
    for options in ({}, {"causal": True}):
        assert worst_ratio("scaled_dot_product_attention", drawn(*sizes), {**options, "enable_gqa": True}, dtype) < 1


def options_of(n, m):
    yield from ({"scale": 0.3}, {"causal": "top-left"}, {"softcap": 2.0}, {"window": (2, 1)}, {"window": (3, None), "causal": True})
    yield from ({"mask": RNG.random((n, m)) < 0.5}, {"mask": RNG.random((4, 1, m)) < 0.5}, {"mask": np.zeros((n, 1), bool)})
    yield from ({"bias": RNG.standard_normal((n, m))}, {"bias": RNG.standard_normal((2, 1, 1, m))}, {"sink": RNG.standard_normal(4)})


@pytest.mark.parametrize("n, options", [(n, options) for n in (3, 37) for options in options_of(n, 70)],
                         ids=lambda x: ", ".join(x) if isinstance(x, dict) else str(x))
def test_every_option(n, options):
    arrays = drawn(n, 70, 16, 9) | {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    options = {name: x for name, x in options.items() if name not in arrays}
    assert worst_ratio("scaled_dot_product_attention", arrays, {**options, "enable_gqa": True}) < 1


@pytest.mark.parametrize("width", [128, 200, 256])
def test_wide_heads(width):
    for n in (2, 9):
        assert worst_ratio("scaled_dot_product_attention", drawn(n, 40, width, width), {"enable_gqa": True}) < 1


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_the_order_of_threads_does_not_matter(order):
    for n in (3, 37):
        assert worst_ratio("scaled_dot_product_attention", drawn(n, 70, 16, 9), {"enable_gqa": True, "causal": True}, order=order) < 1


@pytest.mark.parametrize("n", [7, 37])
def test_what_is_hidden_never_arrives(n):
    """NaN and infinity behind a mask, some of it before the eyes of other queries."""
    arrays = drawn(n, 70, 16, 9, h=2) | {"mask": RNG.random((n, 70)) < 0.5}
    arrays["mask"][:, 3] = False
    arrays["mask"][5] = False
    arrays["k"][:, 3], arrays["v"][:, 3] = np.nan, np.inf
    arrays["v"][:, 8, 2], arrays["v"][:, 9, 1], arrays["q"][:, 5] = np.nan, -np.inf, np.nan
    assert worst_ratio("scaled_dot_product_attention", arrays, {}) < 1


def test_many_keys():
    """Chains of more than 64 terms, and tiles of more keys."""
    for n, m in ((1, 1500), (9, 2100)):
        assert worst_ratio("scaled_dot_product_attention", drawn(n, m, 8, 8, h=1, hk=1), {}) < 1


@pytest.mark.parametrize("n", [4, 9])
def test_sinks_and_softmax_one(n):
    arrays = drawn(n, 40, 8, 8, hk=4)
    assert worst_ratio("softmax_one_attention", arrays, {"causal": True}) < 1
    assert worst_ratio("attention_with_sink", arrays | {"sink": np.array([0.0, -np.inf, 30.0, -3.0])}, {}) < 1


def test_log_sum_exp_and_axes():
    arrays = drawn(9, 12, 8, 8, h=2) | {"v": RNG.standard_normal((5, 2, 12, 8)), "mask": RNG.random((9, 12)) < 0.3}
    record = attnspec.formulas()["scaled_dot_product_attention"]
    given = in_mlx(record, arrays)
    with emulated(), metal.path("metal"):
        got = mlx_backend.scaled_dot_product_attention(**given, return_lse=True)
        mx.eval(*got[::2])
    want = record.function(**in_numpy(record, given), return_lse=True)
    np.testing.assert_allclose(np.array(got.out), want.out, rtol=0, atol=2e-6)
    np.testing.assert_allclose(np.array(got.lse), want.lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "cog_attention"])
def test_gradients_within_the_bound(name, sizes, dtype):
    arrays = drawn(*sizes)
    arrays["do"] = RNG.standard_normal((4, sizes[0], sizes[3]))
    for options in ({}, {"causal": True}):
        assert worst_gradients(name, arrays, {**options, "enable_gqa": True}, dtype) < 1


@pytest.mark.parametrize("options", list(options_of(37, 70)), ids=lambda options: ", ".join(options))
def test_gradients_with_every_option(options):
    arrays = drawn(37, 70, 16, 9) | {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    arrays["do"] = RNG.standard_normal((4, 37, 9))
    if arrays.get("bias") is not None and arrays["bias"].ndim > 2:
        arrays["bias"] = arrays["bias"][0]                             # one more axis would be one of the result
    options = {name: x for name, x in options.items() if name not in arrays}
    assert worst_gradients("scaled_dot_product_attention", arrays, {**options, "enable_gqa": True}) < 1


def test_gradients_do_not_see_what_is_hidden():
    arrays = drawn(19, 37, 16, 9, h=2) | {"mask": RNG.random((19, 37)) < 0.5, "do": RNG.standard_normal((2, 19, 9))}
    arrays["mask"][:, 3], arrays["mask"][5] = False, False
    arrays["k"][:, 3], arrays["v"][:, 3], arrays["q"][:, 5], arrays["do"][:, 5] = np.nan, np.inf, np.nan, np.nan
    for name in ("scaled_dot_product_attention", "cog_attention"):
        assert worst_gradients(name, arrays, {}) < 1


def test_gradients_of_the_log_sum_exp():
    q, k, v = (mx.array(x.astype(np.float32)) for x in drawn(9, 12, 8, 8, h=2).values())

    def loss(q, k, v):
        out, _, lse = mlx_backend.scaled_dot_product_attention(q, k, v, causal=True, return_lse=True)
        return mx.sum(out**2) + mx.sum(mx.sin(mx.where(mx.isinf(lse), 0.0, lse)))

    with emulated(order="shuffled", seed=1), metal.path("metal"):
        ours = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
        mx.eval(ours)
    with metal.path("graph"):
        theirs = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=0, atol=1e-5)


OTHERS = [
    ("cog_attention", {}), ("cog_attention", {"causal": True}), ("cog_attention", {"normaliser": "nonzero"}),
    ("gated_attention", {}), ("gated_attention", {"position": "G4"}), ("prior_attention", {}), ("prior_attention", {"tau": 2.0}),
    ("goat_head_attention", {}), ("goat_head_attention", {"causal": True}), ("hopfield_update", {"beta": 0.7}),
    ("hopfield_retrieve", {"n_iters": 2, "tol": None}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, options", OTHERS, ids=str)
def test_every_function_that_takes_the_kernel(name, options, dtype):
    record = attnspec.formulas()[name]
    arrays = record.draw({dim: size for dim, size in {"n": 19, "m": 37, "d": 12, "e": 12, "h": 4}.items() if dim in record.dimensions})
    assert worst_ratio(name, arrays, options, dtype) < 1


@pytest.mark.parametrize("n", [5, 19])
def test_signed_weights_and_masks(n):
    arrays = drawn(n, 37, 8, 8, hk=4) | {"mask": RNG.random((n, 37)) < 0.4}
    arrays["k"][:, 5] = 0.0                                            # logits of 0: without a value, but counted
    arrays["mask"][3] = False
    arrays["v"][:, 7] = np.where(arrays["mask"][:, 7].any(), arrays["v"][:, 7], np.nan)
    for normaliser in ("visible", "nonzero"):
        assert worst_ratio("cog_attention", arrays, {"normaliser": normaliser}) < 1


def test_a_prior_of_zero_hides_what_stands_there():
    arrays = drawn(9, 20, 8, 8, h=2) | {"log_prior": np.where(RNG.random((9, 20)) < 0.3, -np.inf, RNG.standard_normal((9, 20)))}
    arrays["log_prior"][:, 4] = -np.inf
    arrays["v"][:, 4], arrays["k"][:, 4] = np.nan, np.inf
    assert worst_ratio("prior_attention", arrays, {}) < 1


class TestChoice:
    def test_a_kernel_that_was_asked_for_is_taken_or_refused(self):
        q = mx.zeros((2, 9, 4))
        with metal.path("metal"), pytest.raises(ValueError, match=r"^path: 'metal' cannot be .* softmax tiles: there is no Metal"):
            mlx_backend.scaled_dot_product_attention(q, q, q)
        with emulated(), metal.path("metal"), pytest.raises(ValueError, match=r"it does not write weights$"):
            mlx_backend.scaled_dot_product_attention(q, q, q, return_weights=True)
        with emulated(), metal.path("metal"), pytest.raises(ValueError, match=r"heads are at most 256 wide, got 300 and 4$"):
            mlx_backend.scaled_dot_product_attention(mx.zeros((9, 300)), mx.zeros((9, 300)), q[0])
        with pytest.raises(ValueError, match=r"^name: expected 'auto' or 'graph' or 'metal', got 'gpu'$"), metal.path("gpu"):
            pass

    def test_what_is_taken_is_said(self, monkeypatch):
        q = mx.zeros((1, 9, 4))
        mlx_backend.scaled_dot_product_attention(q, q, q)
        assert metal.taken()["softmax tiles"] == "graph: there is no Metal GPU here"
        with emulated():
            mlx_backend.scaled_dot_product_attention(q, q, q)
            assert metal.taken()["softmax tiles"] == "graph: it does not pay for so little"
            monkeypatch.setenv("ATTNSPEC_MLX_PATH", "graph")
            mlx_backend.scaled_dot_product_attention(q, q, q)
            assert metal.taken()["softmax tiles"] == "graph: it was asked for"
            monkeypatch.setenv("ATTNSPEC_MLX_PATH", "gpu")
            with pytest.raises(ValueError, match=r"^ATTNSPEC_MLX_PATH: expected 'auto' or 'graph' or 'metal', got 'gpu'$"):
                mlx_backend.scaled_dot_product_attention(q, q, q)

    def test_a_kernel_that_disagrees_is_not_used(self, monkeypatch):
        """One that forgets the scale, say; a warning names it."""
        def wrong(**what):
            make = metal_emulator.metal_kernel(**{**what, "source": what["source"].replace("* factors[0]", "* 1.0f")})
            return lambda **call: make(**call)

        q = mx.array(RNG.standard_normal((1, 300, 8)).astype(np.float32))
        monkeypatch.setattr(metal, "_trusted", {})
        with metal.made_by(wrong):
            with pytest.warns(RuntimeWarning, match=r"softmax tiles .* disagrees with the graph on this machine"):
                mlx_backend.scaled_dot_product_attention(q, q, q)
            assert metal.taken()["softmax tiles"] == "graph: it failed or disagreed with the graph here"
            with metal.path("metal"), pytest.raises(ValueError, match=r"it failed or disagreed with the graph here$"):
                mlx_backend.scaled_dot_product_attention(q, q, q)

    def test_a_kernel_that_does_not_compile_is_not_used(self, monkeypatch):
        def broken(**what):
            def call(**_):
                raise RuntimeError("error: no matching function")
            return call

        q = mx.array(RNG.standard_normal((1, 300, 8)).astype(np.float32))
        monkeypatch.setattr(metal, "_trusted", {})
        with metal.made_by(broken), pytest.warns(RuntimeWarning, match=r"softmax tiles .* failed \(error: no matching function\)"):
            out = mlx_backend.scaled_dot_product_attention(q, q, q)
        with metal.path("graph"):
            assert mx.array_equal(out, mlx_backend.scaled_dot_product_attention(q, q, q))

    def test_no_graph_is_taken_in_silence(self):
        arrays = {name: mx.array(x.astype(np.float32)) for name, x in attnspec.formulas()["flow_attention"].draw().items()}
        with emulated(), metal.path("metal"), pytest.raises(ValueError, match=r"^path: 'metal' .* flow_attention has no kernel"):
            mlx_backend.flow_attention(**arrays)


@pytest.mark.parametrize("name", ["scaled_dot_product_attention_backward", "cog_attention_backward"])
def test_backward_functions_take_the_kernels(name):
    record = attnspec.formulas()[name]
    given = in_mlx(record, drawn(19, 37, 16, 9, hk=4) | {"do": RNG.standard_normal((4, 19, 9))})
    exact = in_numpy(record, given)
    with emulated(), metal.path("metal"):
        got = getattr(mlx_backend, name)(**given, causal=True)
        mx.eval(got[:3])
    want, limits = record.function(**exact, causal=True), bound(record, exact, {"causal": True}, "float32")
    for key, limit in limits.items():
        assert np.all(np.abs(np.array(getattr(got, key)).astype(float) - getattr(want, key)) <= limit)
