"""What every Numba twin takes: layouts, dtypes, threads; and that it refuses in the reference's words."""

import concurrent.futures

import ml_dtypes
import numpy as np
import pytest

from attnspec import numba_kernels, reference
from attnspec.numba_kernels import scaled_dot_product_attention, threads
from attnspec.numba_kernels.softmax import tiles

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, 4, n, 12)) for n in (70, 90, 90))
WANTED = reference.scaled_dot_product_attention(Q, K, V)


def test_any_layout():
    for make in (np.asfortranarray, lambda x: np.repeat(x, 2, axis=-1)[..., ::2], lambda x: x[::-1][::-1], lambda x: x.astype(">f8")):
        np.testing.assert_allclose(scaled_dot_product_attention(make(Q), make(K), make(V)), WANTED, rtol=0, atol=1e-14)
    locked = [x.copy() for x in (Q, K, V)]
    for x in locked:
        x.setflags(write=False)
    before = [x.copy() for x in locked]
    np.testing.assert_array_equal(scaled_dot_product_attention(*locked), scaled_dot_product_attention(Q, K, V))
    assert all(np.array_equal(x, y) for x, y in zip(locked, before, strict=True))


def test_read_only_arrays_compile_nothing_again():
    arrays = {name: x.astype(np.float32) for name, x in zip("qkv", (Q, K, V), strict=True)}
    scaled_dot_product_attention(**arrays, mask=np.ones((70, 90), np.bool_))
    compiled = len(tiles.attend_blocks.signatures)
    for name in arrays:
        locked = arrays[name].copy()
        locked.setflags(write=False)
        scaled_dot_product_attention(**{**arrays, name: locked}, mask=np.broadcast_to(np.True_, (70, 90)))
    assert len(tiles.attend_blocks.signatures) == compiled


def test_broadcast_axes_and_strides_of_zero():
    k, v = (np.broadcast_to(x[:1, :1], Q.shape[:2] + x.shape[2:]) for x in (K, V))
    wanted = reference.scaled_dot_product_attention(Q, K[:1, :1], V[:1, :1])
    np.testing.assert_allclose(scaled_dot_product_attention(Q, k, v), wanted, rtol=0, atol=1e-14)
    np.testing.assert_allclose(scaled_dot_product_attention(Q, K[0, 0], V[0, 0]), wanted, rtol=0, atol=1e-14)
    mask = np.broadcast_to(RNG.random((1, 90)) < 0.5, (2, 4, 70, 90))
    wanted = reference.scaled_dot_product_attention(Q, K, V, mask=mask)
    np.testing.assert_allclose(scaled_dot_product_attention(Q, K, V, mask=mask), wanted, rtol=0, atol=1e-14)
    tokens = np.broadcast_to(Q[:, :, :1], Q.shape)                     # a repeated token, not a repeated head
    wanted = reference.scaled_dot_product_attention(tokens, K, V)
    np.testing.assert_allclose(scaled_dot_product_attention(tokens, K, V), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_results_have_the_dtype_of_the_arrays(dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    result = scaled_dot_product_attention(q, k, v, return_lse=True)
    assert result.out.dtype == result.lse.dtype == dtype
    mixed = scaled_dot_product_attention(q, k.astype(np.float32), v)
    assert mixed.dtype == (np.float64 if dtype == np.float64 else np.float32)


def test_whole_numbers_lists_and_bools_are_float64():
    got = scaled_dot_product_attention([[1, 0]], [[0, 0], [0, 1]], [[2], [4]])
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [[3.0]])


def test_results_do_not_depend_on_the_number_of_threads():
    q, k, v = (RNG.standard_normal((3, n, 33)).astype(np.float32) for n in (500, 700, 700))
    do = RNG.standard_normal((3, 500, 33)).astype(np.float32)
    found = []
    for count in (1, 2, 3, 7):
        with threads(count):
            assert numba_kernels.thread_count() == count
            found.append((scaled_dot_product_attention(q, k, v, causal=True),
                          *numba_kernels.scaled_dot_product_attention_backward(q, k, v, do, causal=True)[:3]))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, same)
    with pytest.raises(ValueError, match=r"^count: expected a whole number >= 1, got 0$"), threads(0):
        pass


def test_calls_from_several_threads():
    q, k, v = (RNG.standard_normal((8, 300, 32)).astype(np.float32) for _ in range(3))
    wanted = scaled_dot_product_attention(q, k, v)
    with threads(2), concurrent.futures.ThreadPoolExecutor(6) as pool:
        for got in pool.map(lambda _: scaled_dot_product_attention(q, k, v), range(24)):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("call", [
    lambda f: f(Q, K[..., :5], V), lambda f: f(Q, K, V[:, :3]), lambda f: f(Q, K), lambda f: f(Q, K, V, casual=True),
    lambda f: f(Q, K, V, causal="left"), lambda f: f(Q, K, V, mask=np.ones((70, 90))), lambda f: f(Q, K[:, :3], V[:, :3], enable_gqa=True),
    lambda f: f(Q, K, V, softcap=-1), lambda f: f(Q, K, V, scale=np.inf), lambda f: f(Q, K, V, window=3), lambda f: f(Q, "k", V),
    lambda f: f(Q, K, V, enable_gqa=1), lambda f: f(Q, K, V, sink=np.ones(3)), lambda f: f(Q, K, V, bias=np.ones((70, 80))),
])
def test_refusals_are_those_of_the_reference(call):
    with pytest.raises((ValueError, TypeError)) as theirs:
        call(reference.scaled_dot_product_attention)
    with pytest.raises(type(theirs.value)) as ours:
        call(scaled_dot_product_attention)
    assert str(ours.value) == str(theirs.value)


def test_complex_numbers_are_refused():
    with pytest.raises(TypeError, match=r"^q: expected real numbers, got dtype complex128"):
        scaled_dot_product_attention(Q + 1e-30j, K, V)
