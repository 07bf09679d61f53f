"""The one place that checks what comes in: dtypes, shapes, leading axes, grouped heads, masks, options."""

import ml_dtypes
import numpy as np
import pytest

import attnspec
from attnspec.reference.inputs import as_array, grouped_heads, number, one_of, parse_shape, sum_groups, sum_to_shape, visible_keys, whole

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 6, 8))


class TestShapes:
    def test_language(self):
        shape = parse_shape("bool ... #n m")
        assert (shape.kind, shape.leading, shape.dims) == ("bool", True, (("n", True), ("m", False)))
        assert str(shape) == "(..., n, m)"
        assert str(parse_shape("int")) == "()"

    @pytest.mark.parametrize("arrays, message", [
        ({"k": k[..., :5]}, r"^k: expected shape \(\.\.\., m, d\) with d = 8 as in q, got \(2, 4, 6, 5\)$"),
        ({"v": v[..., :5, :]}, r"^v: expected shape \(\.\.\., m, e\) with m = 6 as in k, got \(2, 4, 5, 8\)$"),
        ({"q": q[0, 0, 0]}, r"^q: expected shape \(\.\.\., n, d\), got \(8,\)$"),
        ({"k": k[:, :2]}, r"^k: leading axes \(2, 2\) do not broadcast against \(2, 4\) of q; for grouped heads set enable_gqa=True$"),
        ({"mask": np.ones((6, 5), bool)}, r"^mask: expected a shape that broadcasts to \(\.\.\., n, m\) with m = 6 as in k, got \(6, 5\)$"),
        ({"mask": np.ones((3, 1, 6, 6), bool)}, r"^mask: leading axes \(3, 1\) do not broadcast against \(2, 4\) of q$"),
        ({"mask": np.ones((6, 6))}, r"^mask: expected booleans \(True = may attend\), got dtype float64; use \.astype\(bool\) on 0 and 1$"),
        ({"sink": np.ones(3)}, r"^sink: expected a shape that broadcasts to \(h,\) with h = 4 as in q, got \(3,\)$"),
        ({"q": None}, r"^q: expected an array of shape \(\.\.\., n, d\), got None$"),
        ({"q": "text"}, r"^q: expected real numbers, got dtype <U4$"),
        ({"q": [[1.0], [1.0, 2.0]]}, r"^q: expected an array of numbers, got a ragged list$"),
    ])
    def test_refusals(self, arrays, message):
        with pytest.raises((ValueError, TypeError), match=message):
            attnspec.scaled_dot_product_attention(**{"q": q, "k": k, "v": v, **arrays})

    def test_optional_arrays_are_checked_against_each_other(self):
        with pytest.raises(ValueError, match=r"^mask: leading axes \(3,\) do not broadcast against \(2,\) of bias$"):
            attnspec.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], bias=np.zeros((2, 1, 1)), mask=np.ones((3, 1, 1), bool))

    def test_a_sink_for_each_head_needs_heads(self):
        with pytest.raises(ValueError, match=r"^sink: expected one number, as q has no axis of heads, got shape \(1,\)$"):
            attnspec.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], sink=[0.0])
        assert attnspec.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], sink=0.0).shape == (6, 8)

    def test_heads_that_a_record_names_must_agree(self):
        arrays = attnspec.formulas()["affine_scaled_attention"].draw({"h": 1, "hk": 4})
        with pytest.raises(ValueError, match=r"^k: expected 1 heads as in q, got 4; for grouped heads set enable_gqa=True$"):
            attnspec.affine_scaled_attention(**arrays)
        arrays = attnspec.formulas()["gated_attention"].draw({"h": 4, "hk": 3})
        with pytest.raises(ValueError, match=r"^k: expected a number of heads that divides the 4 of q, got 3$"):
            attnspec.gated_attention(**arrays, enable_gqa=True)

    def test_grouped_heads_must_divide(self):
        with pytest.raises(ValueError, match=r"^k: expected a number of heads that divides the 4 of q, got 3$"):
            attnspec.scaled_dot_product_attention(q, k[:, :3], v[:, :3], enable_gqa=True)
        with pytest.raises(ValueError, match=r"^k: enable_gqa needs a head axis"):
            attnspec.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], enable_gqa=True)

    def test_parameters_that_must_be_named(self):
        message = r"^cog_weights: too many positional arguments; normaliser must be named, as in normaliser=\.\.\.$"
        with pytest.raises(TypeError, match=message):
            attnspec.cog_weights(np.ones((2, 2)), None, "visible")


class TestArrays:
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, ">f4", np.longdouble, ml_dtypes.bfloat16, np.int8, np.uint64, bool])
    def test_any_real_dtype_becomes_float64(self, dtype):
        got = as_array("x", np.array([0, 1], dtype))
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, [0.0, 1.0])

    def test_kinds(self):
        assert as_array("x", [0.0, 1.0], "bits").dtype == np.int64
        with pytest.raises(ValueError, match=r"^x: expected entries 0 or 1, got 2$"):
            as_array("x", [0, 2], "bits")
        with pytest.raises(ValueError, match=r"^x: expected entries -1 or 1, got 0$"):
            as_array("x", [0, 1], "spins")
        with pytest.raises(ValueError, match=r"^x: expected whole numbers"):
            as_array("x", [0.5], "int")
        with pytest.raises(ValueError, match=r"^x: expected whole numbers"):
            as_array("x", [np.nan], "int")


class TestVisibleKeys:
    def test_alignments(self):
        np.testing.assert_array_equal(visible_keys(2, 4, causal=True), [[1, 1, 1, 0], [1, 1, 1, 1]])
        np.testing.assert_array_equal(visible_keys(2, 4, causal="top-left"), [[1, 0, 0, 0], [1, 1, 0, 0]])
        np.testing.assert_array_equal(visible_keys(3, 1, causal="bottom-right"), [[0], [0], [1]])

    def test_windows_lie_around_the_queries_own_position(self):
        np.testing.assert_array_equal(visible_keys(2, 4, window=(1, 1)), [[1, 1, 0, 0], [1, 1, 1, 0]])
        np.testing.assert_array_equal(visible_keys(2, 4, causal=True, window=(1, 0)), [[0, 1, 1, 0], [0, 0, 1, 1]])
        np.testing.assert_array_equal(visible_keys(2, 4, window=(None, -1)), np.ones((2, 4)))
        np.testing.assert_array_equal(visible_keys(2, 4, causal="top-left", window=(0, 5)), [[1, 0, 0, 0], [0, 1, 0, 0]])

    @pytest.mark.parametrize("window", [3, (1,), (1, 2, 3), (1.5, 0), (-2, 0), "ab"])
    def test_windows_that_are_none(self, window):
        with pytest.raises(ValueError, match=r"^window: expected"):
            visible_keys(2, 2, window=window)

    def test_unknown_alignment(self):
        with pytest.raises(ValueError, match=r"^causal: expected False or True or 'bottom-right' or 'top-left', got 'left'$"):
            visible_keys(2, 2, causal="left")

    def test_blocks(self):
        whole_mask = visible_keys(5, 7, causal=True, window=(2, 0))
        block = visible_keys(5, 7, causal=True, window=(2, 0), queries=slice(1, 4), keys=slice(2, 6))
        np.testing.assert_array_equal(block, whole_mask[1:4, 2:6])


class TestOptions:
    def test_whole(self):
        assert whole("n", np.int32(3)) == 3
        for bad in (True, 1.0, -1, "1", None):
            with pytest.raises(ValueError, match=r"^n: expected a whole number >= 0, got"):
                whole("n", bad)

    def test_number(self):
        assert number("x", 2) == 2.0
        for bad in ("a", None, [1.0], np.nan):
            with pytest.raises(ValueError, match=r"^x: expected a number, got"):
                number("x", bad)
        with pytest.raises(ValueError, match=r"^x: expected a number > 0, got 0$"):
            number("x", 0, above=0)
        with pytest.raises(ValueError, match=r"^x: expected a number >= 0, got -1$"):
            number("x", -1, least=0)

    def test_one_of(self):
        assert one_of("x", "a", ("a", "b")) == "a"
        with pytest.raises(ValueError, match=r"^x: expected 'a' or 'b', got 'c'$"):
            one_of("x", "c", ("a", "b"))


class TestAdjoints:
    def test_of_broadcasting(self):
        rng = np.random.default_rng(1)
        x, y = rng.standard_normal((3, 1)), rng.standard_normal((2, 3, 4))
        np.testing.assert_allclose(np.sum(np.broadcast_to(x, y.shape) * y), np.sum(x * sum_to_shape(y, x.shape)), rtol=1e-13)

    def test_of_grouping(self):
        rng = np.random.default_rng(2)
        x, y = rng.standard_normal((2, 5, 3)), rng.standard_normal((6, 5, 3))
        (copies,) = grouped_heads(np.empty((6, 1, 3)), x)
        np.testing.assert_array_equal(copies[2], x[0])
        np.testing.assert_array_equal(copies[3], x[1])
        np.testing.assert_allclose(np.sum(copies * y), np.sum(x * sum_groups(y, 2)), rtol=1e-13)
