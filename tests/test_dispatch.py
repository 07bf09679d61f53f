"""The front door: which backend is taken, layouts, refusals; with a stand-in twin in the place of the Numba kernels."""

import sys
import types

import numpy as np
import pytest

import attnspec
from attnspec.conformance import verify
from attnspec.dispatch import BACKENDS, Backend
from attnspec.reference.formula import twin

RNG = np.random.default_rng(0)
q, k, v = RNG.standard_normal((3, 2, 4, 6, 8))


def softmax_in_the_arrays_own_dtype(q, k, v, scale=None):
    scale = q.dtype.type(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    s = (q @ np.swapaxes(k, -1, -2)) * scale
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e @ v) / e.sum(-1, keepdims=True)


def stand_in(function, **limits):
    """A module in the place of numba_kernels that exports `function` as scaled_dot_product_attention."""
    module = types.ModuleType("stand_in_kernels")
    module.__spec__ = types.SimpleNamespace(name="stand_in_kernels")  # type: ignore[assignment]
    module.scaled_dot_product_attention = twin(dtypes=("float32", "float64"), **limits)(function)  # type: ignore[attr-defined]
    return module


@pytest.fixture
def kernels(monkeypatch):
    def install(function, **limits):
        monkeypatch.setitem(sys.modules, "stand_in_kernels", stand_in(function, **limits))
        monkeypatch.setitem(BACKENDS, "numba", Backend("numba", "stand_in_kernels", "numpy", "pip install numba"))

    return install


LACKS = {"mask": "no masks yet", "causal": "not yet", "window": "not yet", "softcap": "not yet", "bias": "not yet", "sink": "not yet",
         "enable_gqa": "not yet", "return_weights": "never stores them", "return_lse": "not yet"}


class TestAuto:
    def test_without_twins_it_is_the_reference(self, monkeypatch):
        monkeypatch.setitem(BACKENDS, "numba", Backend("numba", "attnspec.numba_kernels", "no_such_library", "pip install numba"))
        selection = attnspec.select("cog_attention")
        assert selection.backend == "reference"
        assert len(selection.why) == 3
        assert selection.why[-1] == "reference: taken"

    def test_twin_is_taken_where_it_has_the_formula(self, kernels):
        kernels(softmax_in_the_arrays_own_dtype, lacks=LACKS)
        assert attnspec.select("scaled_dot_product_attention").backend == "numba"
        assert attnspec.select("cog_attention").backend == "reference"
        out = attnspec.attend("scaled_dot_product_attention", *(x.astype(np.float32) for x in (q, k, v)))
        assert out.dtype == np.float32

    def test_twin_is_passed_over_for_an_option_it_lacks_and_says_so(self, kernels):
        kernels(softmax_in_the_arrays_own_dtype, lacks=LACKS)
        selection = attnspec.select("scaled_dot_product_attention", options={"causal": True})
        assert selection.backend == "reference"
        assert "numba: passed over, its scaled_dot_product_attention lacks causal: not yet" in selection.why
        np.testing.assert_array_equal(
            attnspec.attend("scaled_dot_product_attention", q, k, v, causal=True),
            attnspec.scaled_dot_product_attention(q, k, v, causal=True),
        )

    def test_an_option_at_its_default_passes_nothing_over(self, kernels):
        kernels(softmax_in_the_arrays_own_dtype, lacks=LACKS)
        assert attnspec.select("scaled_dot_product_attention", options={"causal": False, "mask": None}).backend == "numba"

    def test_twin_is_passed_over_for_a_dtype(self, kernels):
        kernels(softmax_in_the_arrays_own_dtype, lacks=LACKS)
        assert attnspec.select("scaled_dot_product_attention", dtype="float16").backend == "reference"

    def test_mlx_is_taken_on_an_apple_gpu_only(self, kernels, monkeypatch):
        kernels(softmax_in_the_arrays_own_dtype, lacks=LACKS)
        monkeypatch.setitem(BACKENDS, "mlx", Backend("mlx", "stand_in_kernels", "numpy", "pip install mlx"))
        assert attnspec.select("scaled_dot_product_attention").backend == "numba"
        monkeypatch.setattr("platform.system", lambda: "Darwin")
        monkeypatch.setattr("platform.machine", lambda: "arm64")
        assert attnspec.select("scaled_dot_product_attention").backend == "mlx"


class TestNamedBackend:
    def test_missing_library_is_an_error_that_lists_what_is_there(self, monkeypatch):
        monkeypatch.setitem(BACKENDS, "mlx", Backend("mlx", "attnspec.reference", "no_such_library", "pip install mlx"))
        message = r"^backend: mlx cannot compute cog_attention: no_such_library is not installed .*; available: numba, reference$"
        with pytest.raises(ValueError, match=message):
            attnspec.attend("cog_attention", q, k, v, backend="mlx")

    def test_missing_formula_is_an_error(self, kernels):
        kernels(softmax_in_the_arrays_own_dtype, lacks=LACKS)
        message = r"^backend: numba cannot compute cog_attention: it has no cog_attention; available: reference$"
        with pytest.raises(ValueError, match=message):
            attnspec.attend("cog_attention", q, k, v, backend="numba")

    def test_missing_option_is_an_error_that_names_it(self, kernels):
        kernels(softmax_in_the_arrays_own_dtype, lacks=LACKS)
        with pytest.raises(ValueError, match=r"lacks mask: no masks yet; available: reference$"):
            attnspec.attend("scaled_dot_product_attention", q, k, v, backend="numba", mask=np.ones((6, 6), bool))

    def test_unknown_backend(self):
        with pytest.raises(ValueError, match=r"^backend: expected auto, mlx, numba, reference, got 'cuda'$"):
            attnspec.attend("cog_attention", q, k, v, backend="cuda")


class TestVerifyATwin:
    def test_a_correct_twin_passes_and_unsupported_is_apart(self, kernels):
        kernels(softmax_in_the_arrays_own_dtype, lacks=LACKS)
        checks = list(verify("scaled_dot_product_attention", "numba"))
        judged = [check for check in checks if check.skipped is None]
        assert judged
        assert all(check.passed for check in judged)
        assert {check.skipped for check in checks if check.skipped} >= {"lacks mask: no masks yet"}

    @pytest.mark.parametrize("mistake", [
        lambda q, k, v, scale=None: softmax_in_the_arrays_own_dtype(q, k, v, scale=1 / q.shape[-1]),
        lambda q, k, v, scale=None: softmax_in_the_arrays_own_dtype(q, k, v, scale=1.0),
        lambda q, k, v, scale=None: softmax_in_the_arrays_own_dtype(-q, k, v, scale),
        lambda q, k, v, scale=None: softmax_in_the_arrays_own_dtype(q, k[..., ::-1, :], v, scale),
        lambda q, k, v, scale=None: softmax_in_the_arrays_own_dtype(q, k, v, scale) * np.float32(1.0001),
        lambda q, k, v, scale=None: np.full_like(softmax_in_the_arrays_own_dtype(q, k, v), np.nan),
        lambda q, k, v, scale=None: softmax_in_the_arrays_own_dtype(q, k, v, scale)[..., :1],
        lambda q, k, v, scale=None: np.broadcast_to(v.mean(-2, keepdims=True), (*q.shape[:-1], v.shape[-1])),
    ], ids=["scale 1/d", "no scale", "sign", "keys reversed", "1e-4 off", "NaN", "cut short", "ignores q and k"])
    def test_a_wrong_twin_fails(self, kernels, mistake):
        kernels(mistake, lacks=LACKS)
        assert any(not check.passed for check in verify("scaled_dot_product_attention", "numba") if check.skipped is None)


class TestLayouts:
    def test_bthd_and_thd_are_the_same_numbers(self):
        want = attnspec.attend("cog_attention", q, k, v, causal=True, backend="reference")
        swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
        got = attnspec.attend("cog_attention", *swapped, layout="bthd", backend="reference", causal=True)
        np.testing.assert_array_equal(got.swapaxes(1, 2), want)
        got = attnspec.attend("cog_attention", *(x[0] for x in swapped), layout="thd", backend="reference", causal=True)
        np.testing.assert_array_equal(got.swapaxes(0, 1), want[0])

    def test_arrays_may_be_named(self):
        named = {"q": q.swapaxes(1, 2), "k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2)}
        out = attnspec.attend("cog_attention", layout="bthd", backend="reference", **named)
        np.testing.assert_array_equal(out.swapaxes(1, 2), attnspec.cog_attention(q, k, v))

    def test_weights_keep_heads_first(self):
        result = attnspec.attend("cog_attention", *(x.swapaxes(1, 2) for x in (q, k, v)), layout="bthd", return_weights=True)
        assert result.out.shape == (2, 6, 4, 8)
        assert result.weights.shape == (2, 4, 6, 6)

    def test_gradients_follow_the_layout(self):
        do = RNG.standard_normal(q.shape)
        want = attnspec.cog_attention_backward(q, k, v, do)
        got = attnspec.attend("cog_attention_backward", *(x.swapaxes(1, 2) for x in (q, k, v, do)), layout="bthd", backend="reference")
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(got, name).swapaxes(1, 2), getattr(want, name))

    def test_every_set_of_keys_follows_the_layout(self):
        arrays = [RNG.standard_normal((2, 3, size, 3)) for size in (4, 5, 3, 5, 3)]
        got = attnspec.attend("tensor_attention", *(x.swapaxes(1, 2) for x in arrays), layout="bthd", backend="reference")
        np.testing.assert_array_equal(got.swapaxes(1, 2), attnspec.tensor_attention(*arrays))

    def test_layers_inputs_have_no_heads_and_stay(self):
        arrays = attnspec.formulas()["affine_scaled_attention"].draw({"b": 2, "n": 5})
        swapped = {name: x.swapaxes(1, 2) if name in ("q", "k", "v") else x for name, x in arrays.items()}
        got = attnspec.attend("affine_scaled_attention", layout="bthd", backend="reference", **swapped)
        np.testing.assert_array_equal(got.swapaxes(1, 2), attnspec.affine_scaled_attention(**arrays))

    def test_an_output_whose_heads_were_joined_stays(self):
        arrays = attnspec.formulas()["gated_attention"].draw({"b": 2, "n": 5})
        w_o = RNG.standard_normal((6, 4, 8))
        swapped = {name: x.swapaxes(1, 2) if name in ("q", "k", "v") else x for name, x in arrays.items()}
        got = attnspec.attend("gated_attention", layout="bthd", backend="reference", w_o=w_o, **swapped)
        np.testing.assert_array_equal(got, attnspec.gated_attention(w_o=w_o, **arrays))

    def test_formulas_without_heads_have_one_layout(self):
        with pytest.raises(ValueError, match=r"^layout: context_broadcasting takes no arrays with heads, so only 'bhtd' fits, got 'bthd'$"):
            attnspec.attend("context_broadcasting", q, layout="bthd", backend="reference")

    def test_wrong_rank_and_unknown_layout(self):
        with pytest.raises(ValueError, match=r"^q: layout thd expects 3 axes, got \(2, 4, 6, 8\)$"):
            attnspec.attend("cog_attention", q, k, v, layout="thd")
        with pytest.raises(ValueError, match=r"^layout: expected bhtd, bthd, thd, got 'bdht'$"):
            attnspec.attend("cog_attention", q, k, v, layout="bdht")


def test_unknown_formula_gets_the_nearest_name():
    with pytest.raises(ValueError, match=r"^formula: no 'cog_atention' here; did you mean 'cog_attention'\?$"):
        attnspec.attend("cog_atention", q, k, v)
    with pytest.raises(ValueError, match=r"^family: expected one of .*, got 'sign'"):
        attnspec.formulas("sign")
    with pytest.raises(AttributeError, match=r"has no attribute 'cog'"):
        _ = attnspec.cog
