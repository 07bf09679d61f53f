"""The Metal language on the CPU: types, rounding, vectors, simd and quad functions, matrices, atomics, attributes."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from . import metal_kernel, run_kernel, run_metal, skip_reason  # noqa: E402

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))

ORDERS = ["ascending", "descending", "shuffled"]


def run(source, inputs=None, n=32, group=32, shapes=None, dtypes=(np.float32,), names=("o",), **options):
    inputs = inputs or {}
    return run_metal(source, list(inputs.values()), input_names=list(inputs), output_names=list(names),
                     output_shapes=shapes or [(n,)] * len(dtypes), output_dtypes=list(dtypes),
                     grid=n if isinstance(n, tuple) else (n, 1, 1), threadgroup=group if isinstance(group, tuple) else (group, 1, 1),
                     **options)  # fmt: skip


def lane_results(expressions, dtype=np.float32, x=None, n=32, **options):
    """Column j of the result is expression j on every thread; v is this thread's value."""
    x = np.arange(n, dtype=dtype) + 1 if x is None else x
    source = "uint i = thread_position_in_grid.x; uint l = thread_index_in_simdgroup; auto v = x[i];\n"
    source += "\n".join(f"o[i * {len(expressions)} + {j}] = {e};" for j, e in enumerate(expressions))
    return run(source, {"x": x}, n=n, group=n, shapes=[(n, len(expressions))], dtypes=(dtype,), **options)[0]


@pytest.mark.parametrize("t", [mx.float16, mx.bfloat16])
def test_every_operation_rounds_to_the_half_types(t):
    """Against MLX's own element-wise results, over random bit patterns (subnormals, infinities, NaNs among them)."""
    r = np.random.default_rng(1)
    a, b = (mx.array(r.integers(0, 65536, 2048).astype(np.uint16)).view(t) for _ in range(2))
    source = "uint i = thread_position_in_grid.x; s[i] = a[i] + b[i]; d[i] = a[i] - b[i]; p[i] = a[i] * b[i]; q[i] = a[i] / b[i];"
    got = run(source, {"a": a, "b": b}, n=2048, group=256, names="sdpq", dtypes=[t] * 4)
    for mine, theirs in zip(got, (a + b, a - b, a * b, a / b), strict=True):
        assert mx.all((mine == theirs) | (mx.isnan(mine) & mx.isnan(theirs)))


@pytest.mark.parametrize("t", [mx.float16, mx.bfloat16])
def test_casts_round_to_nearest_even(t):
    r = np.random.default_rng(2)
    x = mx.array(r.integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32)).view(mx.float32)
    got = run("uint i = thread_position_in_grid.x; o[i] = T(x[i]);", {"x": x}, n=4096, group=256, dtypes=[t], template=[("T", t)])[0]
    want = x.astype(t)
    assert mx.all((got == want) | (mx.isnan(got) & mx.isnan(want)))


def test_a_chain_of_half_operations_does_not_keep_excess_precision():
    x = np.linspace(0.1, 3, 32).astype(np.float16)
    got = run("uint i = thread_position_in_grid.x; half a = x[i]; o[i] = a * a * a + a * 1.5h - 0.1h;", {"x": x}, dtypes=[np.float16])[0]
    h = np.float16
    assert (got == (x * x * x).astype(h) + (x * h(1.5)).astype(h) - h(0.1)).all()


def test_literals_are_single_precision():
    x = np.linspace(0.1, 3, 32).astype(np.float32)
    got = run("uint i = thread_position_in_grid.x; o[i] = x[i] * 0.1 + 0.3;", {"x": x})[0]
    assert (got == x * np.float32(0.1) + np.float32(0.3)).all()


def test_vectors():
    source = """
    uint i = thread_position_in_grid.x;
    float4 a = float4(x[i], 1.0f, float2(2.0f, 3.0f).x, 4.0f);
    half4 h = half4(a);
    float3 c = float3(float2(a.x, a.y), a.z) * 2.0f - 1.0f;
    float2 m = max(float2(a.x, -a.x), float2(0.5f));
    bool any_big = any(a > 3.5f);
    o[i] = dot(a, a) + float(h.x) + c.z + m.y + (any_big ? 100.0f : 0.0f) + select(1.0f, 2.0f, a.x > 0.25f);
    uint4 bits = uint4(7u, 8u, 9u, 10u) & 3u;
    n[i] = popcount(bits.x) + bits.w + as_type<uint>(1.0f) + as_type<uint2>(ulong(5) << 32).y;
    """
    x = np.linspace(0, 1, 32).astype(np.float32)
    o, n = run(source, {"x": x}, names=("o", "n"), dtypes=(np.float32, np.uint32))
    want = x * x + 1 + 4 + 16 + x.astype(np.float16) + 3 + np.maximum(-x, 0.5) + 100 + np.where(x > 0.25, 2, 1)
    assert np.abs(o - want).max() < 1e-5
    assert (n == 2 + 2 + 0x3F800000 + 5).all()


def test_vector_loads_through_pointers():
    x = np.arange(128, dtype=np.float16)
    source = "uint i = thread_position_in_grid.x; half4 v = ((const device half4*)x)[i]; o[i] = float(v.x) + float(v.w);"
    got = run(source, {"x": x})[0]
    assert (got == 8 * np.arange(32) + 3).all()


def test_simd_functions():
    x = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    names = ["simd_sum(v)", "simd_max(v)", "simd_min(v)", "simd_product(v)", "simd_prefix_inclusive_sum(v)",
             "simd_prefix_exclusive_sum(v)", "simd_shuffle(v, 5)", "simd_shuffle_xor(v, 3)", "simd_shuffle_down(v, 4)",
             "simd_shuffle_up(v, 4)", "simd_broadcast(v, 31)",
             "simd_shuffle_rotate_down(v, 9)", "simd_shuffle_and_fill_up(v, 7.0f, 2)", "simd_broadcast_first(v)"]  # fmt: skip
    got = lane_results(names, x=x)
    lanes = np.arange(32)
    want = [x.sum(), x.max(), x.min(), x.prod(), np.cumsum(x), np.cumsum(x) - x, x[5], x[lanes ^ 3],
            np.where(lanes < 28, x[(lanes + 4) % 32], x),
            np.where(lanes >= 4, x[lanes - 4], x), x[31], x[(lanes + 9) % 32], np.where(lanes >= 2, x[lanes - 2], 7), x[0]]  # fmt: skip
    for j, name in enumerate(names):
        assert np.allclose(got[:, j], want[j], rtol=1e-5, atol=1e-5), name


def test_quad_functions_and_votes():
    x = np.arange(32, dtype=np.int32)
    names = ["quad_sum(v)", "quad_max(v)", "quad_shuffle_xor(v, 1)", "quad_broadcast(v, 2)", "simd_or(v)", "simd_xor(v)",
             "simd_and(v | 64)",
             "int(simd_any(v > 30))", "int(simd_all(v > 0))", "int(popcount(simd_vote::vote_t(simd_ballot(v < 5))))"]  # fmt: skip
    got = lane_results(names, dtype=np.int32, x=x)
    quads = x.reshape(8, 4)
    want = [np.repeat(quads.sum(1), 4), np.repeat(quads.max(1), 4), x ^ 1, np.repeat(quads[:, 2], 4), 31, 0, 64, 1, 0, 5]
    for j, name in enumerate(names):
        assert (got[:, j] == want[j]).all(), name


def test_bfloat_reduction_accumulates_in_float():
    x = mx.full((32,), 1.0078125, mx.bfloat16)
    got = run("uint i = thread_position_in_grid.x; o[i] = simd_sum(x[i]);", {"x": x}, dtypes=[mx.bfloat16])[0]
    assert float(got[0]) == 32.25


@pytest.mark.parametrize("t", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("transpose", [False, True])
def test_simdgroup_matrix_product(t, transpose):
    r = np.random.default_rng(4)
    a, b, c = (mx.array(r.standard_normal((8, 8)).astype(np.float32)).astype(t) for _ in range(3))
    source = f"""
    threadgroup T shared[8 * 12];
    simdgroup_matrix<T, 8, 8> ma, mb; simdgroup_matrix<float, 8, 8> mc, md;
    simdgroup_load(ma, a, 8);
    simdgroup_load(mb, b, 8, ulong2(0, 0), {str(transpose).lower()});
    for (uint e = thread_index_in_simdgroup; e < 64; e += 32) shared[(e / 8) * 12 + e % 8] = c[e];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<T, 8, 8> small; simdgroup_load(small, shared, 12);
    mc.thread_elements()[0] = float(small.thread_elements()[0]); mc.thread_elements()[1] = float(small.thread_elements()[1]);
    simdgroup_multiply_accumulate(md, ma, mb, mc);
    simdgroup_store(md, o, 8);
    """
    got = run(source, {"a": a, "b": b, "c": c}, shapes=[(8, 8)], template=[("T", t)])[0]
    f = mx.float32
    want = np.array(a.astype(f)) @ (np.array(b.astype(f)).T if transpose else np.array(b.astype(f))) + np.array(c.astype(f))
    assert np.abs(got - want).max() < 1e-5


def test_matrix_origin_and_diagonal():
    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    source = """
    simdgroup_float8x8 m, two(2.0f), r;
    simdgroup_load(m, x, 16, ulong2(8, 4));
    simdgroup_multiply(r, m, two);
    simdgroup_store(r, o, 16, ulong2(0, 8));
    """
    got = run(source, {"x": x}, shapes=[(16, 16)])[0]
    assert (got[8:, :8] == 2 * x[4:12, 8:]).all()
    assert np.isnan(got[:8]).all()


@pytest.mark.parametrize("order", ORDERS)
def test_atomic_outputs(order):
    x = np.random.default_rng(5).integers(0, 8, 512).astype(np.int32)
    source = "uint i = thread_position_in_grid.x; atomic_fetch_add_explicit(&o[x[i]], 1, memory_order_relaxed);"
    got = run(source, {"x": x}, n=512, group=64,
              shapes=[(8,)], dtypes=[np.int32], init_value=0, atomic_outputs=True, order=order)[0]  # fmt: skip
    assert (got == np.bincount(x, minlength=8)).all()


def test_atomic_float_and_compare_exchange():
    source = """
    uint i = thread_position_in_grid.x;
    atomic_fetch_add_explicit(&o[0], x[i], memory_order_relaxed);
    float seen = atomic_load_explicit(&o[1], memory_order_relaxed);
    while (seen < x[i] && !atomic_compare_exchange_weak_explicit(&o[1], &seen, x[i], memory_order_relaxed, memory_order_relaxed)) {}
    """
    x = np.arange(100, dtype=np.float32)
    got = run(source, {"x": x}, n=100, group=50, shapes=[(2,)], init_value=0, atomic_outputs=True)[0]
    assert got.tolist() == [4950, 99]


def test_attributes_with_partial_edge_groups():
    source = """
    uint3 g = thread_position_in_grid;
    uint at = ((g.z * threads_per_grid.y + g.y) * threads_per_grid.x + g.x) * 8;
    o[at] = threads_per_threadgroup.x; o[at + 1] = dispatch_threads_per_threadgroup.x; o[at + 2] = threadgroup_position_in_grid.x;
    o[at + 3] = thread_index_in_threadgroup; o[at + 4] = simdgroup_index_in_threadgroup * 100 + thread_index_in_simdgroup;
    o[at + 5] = threadgroups_per_grid.x; o[at + 6] = simdgroups_per_threadgroup; o[at + 7] = thread_position_in_threadgroup.y;
    """
    got = run(source, n=(70, 3, 2), group=(32, 2, 1), shapes=[(2, 3, 70, 8)], dtypes=[np.uint32], require_written=True)[0]
    z, y, x = np.meshgrid(np.arange(2), np.arange(3), np.arange(70), indexing="ij")
    width, ty = np.where(x < 64, 32, 6), y % 2
    height = np.where(y < 2, 2, 1)
    index = ty * width + x % 32
    want = [width, 32 + 0 * x, x // 32, index, index // 32 * 100 + index % 32, 3 + 0 * x, (width * height + 31) // 32, ty]
    for j, column in enumerate(want):
        assert (got[..., j] == column).all(), j
    assert z.shape == got.shape[:3]


def test_threadgroup_arrays_whose_size_is_an_expression():
    source = """threadgroup float a[R * (D + 2)];
    uint i = thread_position_in_grid.x;
    a[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = a[31 - i];"""
    x = np.arange(32, dtype=np.float32)
    np.testing.assert_array_equal(run(source, {"x": x}, template=[("R", 4), ("D", 8)])[0], x[::-1])


def test_threadgroup_is_clamped_to_the_grid():
    got = run("o[thread_position_in_grid.x] = threads_per_threadgroup.x * 1000 + dispatch_threads_per_threadgroup.x;", n=5, group=256)[0]
    assert (got == 5005).all()


def test_shapes_strides_and_scalars():
    x = np.arange(24, dtype=np.float32).reshape(4, 6).T
    source = "uint i = thread_position_in_grid.x; o[i] = x[i] + 1000 * x_shape[0] + 10000 * x_ndim + (i == 0 ? x_strides[1] : 0) + k * s;"
    got = run(source, {"x": x, "k": 2, "s": 0.25}, n=24)[0]
    want = np.ascontiguousarray(x).reshape(-1) + 26000.5
    want[0] += 1
    assert (got == want).all()
    seen = run(source, {"x": x, "k": 2, "s": 0.25}, n=24, ensure_row_contiguous=False)[0]
    assert seen[:2].tolist() == [26000.5 + 6, 26000.5 + 1]


@pytest.mark.parametrize("order", ORDERS)
def test_block_sum_in_every_order(order):
    """A tree over threadgroup memory, with two-dimensional arrays, several declarators and a pointer into the arena."""
    source = """
    constexpr int W = 64;
    threadgroup float tile[2][W];
    threadgroup float other[W], more[1];
    uint l = thread_index_in_threadgroup;
    threadgroup float* row = tile[0] + l;
    *row = x[thread_position_in_grid.x];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = W / 2; s > 0; s /= 2) {
        if (l < s) tile[0][l] += tile[0][l + s];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    other[l] = tile[0][0];
    if (l == 0) { more[0] = 1; o[threadgroup_position_in_grid.x] = other[0] + more[0]; }
    """
    x = np.random.default_rng(6).standard_normal(256).astype(np.float32)
    got = run(source, {"x": x}, n=256, group=64, shapes=[(4,)], order=order, seed=3)[0]
    assert np.abs(got - x.reshape(4, 64).sum(1) - 1).max() < 1e-5


def test_order_of_threadgroups_follows_the_request():
    text = """
    kernel void f(device int* o [[buffer(0)]], device atomic_int* c [[buffer(1)]], uint group [[threadgroup_position_in_grid]],
                  ushort thread_index [[thread_index_in_threadgroup]]) {
      if (thread_index == 0) o[group] = atomic_fetch_add_explicit(&c[0], 1, memory_order_relaxed);
    }
    """
    out = {"o": ((4,), np.int32), "c": ((1,), np.int32)}
    got = {o: run_kernel(text, "f", {}, out, (8,), (2,), order=o, init_value=0)["o"].tolist() for o in ORDERS}
    assert got["ascending"] == [0, 1, 2, 3]
    assert got["descending"] == [3, 2, 1, 0]
    assert sorted(got["shuffled"]) == [0, 1, 2, 3]


def test_special_values_of_the_maths():
    inf, nan = np.inf, np.nan
    x = np.array([0.0, -0.0, 1.0, -1.0, inf, -inf, nan, 1e-40], dtype=np.float32)
    source = """
    uint i = thread_position_in_grid.x; float v = x[i];
    e[i] = exp(v); f[i] = fast::exp(v); l[i] = precise::log(v); m[i] = max(v, 2.0f); s[i] = metal::isnan(v) + 2 * isinf(v);
    """
    e, f, logs, m, s = run(source, {"x": x}, n=8, names="eflms", dtypes=[np.float32] * 5)
    with np.errstate(all="ignore"):
        assert np.allclose(e, np.exp(x), rtol=2e-7, equal_nan=True)
        assert np.array_equal(e, f, equal_nan=True)
        assert np.allclose(logs, np.log(x), equal_nan=True)
    assert m.tolist() == [2, 2, 2, 2, inf, 2, 2, 2]  # a NaN loses, as on the GPU
    assert s.tolist() == [0, 0, 0, 0, 2, 2, 1, 0]


def test_flush_denormals_is_a_choice():
    source = "uint i = thread_position_in_grid.x; o[i] = x[i] * 0.5f;"
    x = np.full(8, 2e-38, dtype=np.float32)
    assert (run(source, {"x": x}, n=8)[0] > 0).all()
    flushed = run(source, {"x": x}, n=8, flush_denormals=True)[0]
    assert (flushed == 0).all() or (flushed > 0).all()  # x86-64 only


def test_header_functions_and_macros():
    header = """
    #define TWICE(v) ((v) + \\
                      (v))
    template <typename U> inline U add(const thread U& a, device const U* b, uint i) { return a + b[i]; }
    constant float TABLE[3] = {1.0f, 2.0f, 4.0f};
    """
    got = run("uint i = thread_position_in_grid.x; float a = TWICE(1.5f); o[i] = add(a, x, i) + TABLE[i % 3];",
              {"x": np.arange(32, dtype=np.float32)}, header=header)[0]  # fmt: skip
    assert (got == 3 + np.arange(32) + np.array([1, 2, 4])[np.arange(32) % 3]).all()


def test_metal_kernel_stands_in_for_the_mlx_one():
    source = "uint i = thread_position_in_grid.x; o[i] = T(2) * x[i];"
    kernel = metal_kernel(name="double", input_names=["x"], output_names=["o"], source=source)
    for t in (mx.float32, mx.float16, mx.bfloat16, mx.int32):
        x = mx.arange(12).astype(t).reshape(3, 4)
        out = kernel(inputs=[x], template=[("T", t)], grid=(12, 1, 1), threadgroup=(8, 1, 1), output_shapes=[x.shape],
                     output_dtypes=[t])[0]  # fmt: skip
        assert out.dtype == t
        assert mx.all(out == 2 * x)


def test_empty_grid_and_zero_size_arrays():
    got = run("o[thread_position_in_grid.x] = 1;", {"x": np.zeros((0,), np.float32)}, n=0, shapes=[(0,)])[0]
    assert got.shape == (0,)
