"""Kernels with one known mistake each: every mistake must be reported, with what and where."""

from __future__ import annotations

import numpy as np
import pytest

from . import MetalBuildError, MetalError, run_kernel, run_metal, skip_reason
from .launch import default_include_folders

pytestmark = [
    pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason())),
    pytest.mark.skipif(not default_include_folders(), reason="needs the headers of the mlx wheel"),
]

LANE = "uint i = thread_position_in_grid.x; uint l = thread_index_in_threadgroup;\n"


def run(source, n=64, group=64, x=None, out=64, dtype=np.float32, **options):
    x = np.arange(64, dtype=np.float32) if x is None else x
    return run_metal(LANE + source, [x], input_names=["x"], output_names=["o"], output_shapes=[(out,)], output_dtypes=[dtype],
                     grid=(n, 1, 1), threadgroup=(group, 1, 1), **options)[0]  # fmt: skip


MISTAKES = {
    "read past the end": (
        "o[i] = x[i + 1];",
        r"out of bounds: read of 4 bytes at buffer 0 'x'\[64\], which has 64 elements .* at emulated.metal:7",
    ),
    "read before the start": ("o[i] = x[int(i) - 1];", r"out of bounds: read .* buffer 0 'x'\[-1\]"),
    "far past the end": ("o[i] = x[i + 400000000];", r"out of bounds: read .* buffer 0 'x'\[4000000"),
    "write past the end": ("o[i * 2] = x[i];", r"out of bounds: write .* buffer 1 'o'\[64\]"),
    "threadgroup array overrun": (
        "threadgroup float s[32]; s[l] = 1; o[i] = s[l];",
        r"out of bounds: (write .* threadgroup array 's'\[32\]|index 32)",
    ),
    "threadgroup pointer overrun": (
        "threadgroup float s[32]; threadgroup float* p = s + l; *p = 1; o[i] = *p;",
        r"out of bounds: write .* threadgroup array 's'\[32\]",
    ),
    "thread array overrun": ("float t[4] = {1, 2, 3, 4}; o[i] = t[i];", r"out of bounds: index 4 of an array"),
    "null pointer": ("device float* p = 0; if (x[0] < 0) p = o; p[i] = 1;", r"null pointer"),
    "wild pointer": (
        "device float* p = (device float*)(size_t(x[1]) * 81985529216486895ul & 0x7FFFFFFFFFF0ul); p[i] = 1;",
        r"unmapped address|outside every",
    ),
    "too much threadgroup memory": (
        "threadgroup float s[8193]; s[l] = 0; o[i] = s[l];",
        r"threadgroup memory: 32784 bytes .*'s'.*limit is 32768",
    ),
    "too much in two arrays": (
        "threadgroup float s[8000]; threadgroup half t[1000]; s[l] = 0; t[l] = 0; o[i] = s[l];",
        r"threadgroup memory: 34000 bytes .*'t'",
    ),
    "race: no barrier": ("threadgroup float s[64]; s[l] = x[i]; o[i] = s[63 - l];", r"race: threadgroup array 's'\[\d+\]"),
    "race: barrier without the memory flag": (
        "threadgroup float s[64]; s[l] = x[i]; threadgroup_barrier(mem_flags::mem_none); o[i] = s[63 - l];",
        r"race: threadgroup array 's'",
    ),
    "race: simdgroup barrier across simdgroups": (
        "threadgroup float s[64]; s[l] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[63 - l];",
        r"race: threadgroup array 's'",
    ),
    "race: missing barrier before reuse": (
        "threadgroup float s[64]; float t = 0; for (int k = 0; k < 2; k++) { s[l] = x[i] + k;"
        " threadgroup_barrier(mem_flags::mem_threadgroup); t += s[(l + 1) % 64]; } o[i] = t;",
        r"race: threadgroup array 's'\[\d+\]: a (write|read) here",
    ),
    "race: all threads write one element": (
        "threadgroup float s[1]; s[0] = l; threadgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[0];",
        r"race: threadgroup array 's'\[0\]: a write here, a write by thread",
    ),
    "race: simd operation is no barrier": (
        "threadgroup float s[64]; s[l] = x[i]; float t = simd_sum(x[i]); o[i] = t + s[l ^ 1];",
        r"race: threadgroup array 's'",
    ),
    "race: output of one threadgroup": ("o[i / 2] = x[i];", r"race: buffer 1 'o'\[\d+\]: a write here, a write by thread"),
    "divergent barrier": (
        "if (l < 40) threadgroup_barrier(mem_flags::mem_threadgroup); o[i] = 1;",
        r"divergence: threadgroup_barrier \(line 7\) is reached by 40 of 64 threads of threadgroup 0; thread 40 has returned",
    ),
    "barrier after an early return": (
        "if (l == 63) return; threadgroup_barrier(mem_flags::mem_threadgroup); o[i] = 1;",
        r"reached by 63 of 64",
    ),
    "two different barriers": (
        "if (l < 32) {\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n} else {\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n}",
        r"divergence: threadgroup_barrier \(line \d+\) is reached by 32 of 64.*is at threadgroup_barrier",
    ),
    "divergent simd_sum": (
        "float t = 0; if (l % 2) t = simd_sum(x[i]); o[i] = t;",
        r"divergence: simd_sum \(line 7\) is reached by 16 of 32 threads of simdgroup 0",
    ),
    "divergent shuffle": ("float t = 0; for (uint k = 0; k <= l; k++) t += simd_shuffle(x[i], k); o[i] = t;", r"divergence: simd_shuffle"),
    "barrier against simd operation": (
        "if (l < 32) { o[i] = simd_sum(x[i] * (l < 16 ? 1 : 0)); } if (l % 32 < 16) threadgroup_barrier(mem_flags::mem_none);",
        r"divergence: threadgroup_barrier",
    ),
    "misaligned vector": ("device const float4* p = (device const float4*)(x + 1); o[i] = p[i / 8].x;", r"misaligned access"),
    "integer division by zero": ("o[i] = 64 / int(i);", r"integer division by zero"),
    "spin without progress": (
        "if (l == 0) { threadgroup atomic_int f[1]; while (atomic_load_explicit(&f[0], memory_order_relaxed) != 3) {} }",
        r"no progress",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_reported(name):
    source, pattern = MISTAKES[name]
    with pytest.raises(MetalError, match=pattern):
        run(source)


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_a_race_shows_in_every_order(order):
    with pytest.raises(MetalError, match="race"):
        run(MISTAKES["race: no barrier"][0], order=order)


def test_threadgroups_that_share_an_output_race():
    with pytest.raises(MetalError, match="by another threadgroup"):
        run("o[l] = x[i];", group=32)


def test_write_to_an_input_is_reported():
    with pytest.raises(MetalError, match="write to read-only buffer 0 'x'"):
        run("((device float*)x)[i] = 1; o[i] = 1;")


def test_too_many_threads():
    with pytest.raises(MetalError, match="1056 threads in a threadgroup; the limit is 1024"):
        run("if (i < 64) o[i] = 1;", n=2112, group=1056)


COPY = """kernel void f(device const T* a [[buffer(0)]], device float* o [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  o[i] = a[i];
}"""


def test_unbound_buffer():
    text = COPY.replace("T", "float")
    with pytest.raises(MetalError, match="buffer 0 'a', which is not bound"):
        run_kernel(text, "f", {}, {"o": ((4,), np.float32)}, (4, 1, 1), (4, 1, 1))


def test_wrong_element_size():
    text = COPY.replace("T", "half")
    with pytest.raises(MetalError, match="buffer 0 'a' holds elements of 4 bytes, the kernel takes elements of 2"):
        run_kernel(text, "f", {"a": np.zeros(4, np.float32)}, {"o": ((4,), np.float32)}, (4, 1, 1), (4, 1, 1))


def test_missed_writes_are_poison_and_can_be_an_error():
    got = run("if (i % 2) o[i] = x[i];")
    assert np.isnan(got[::2]).all()
    assert (got[1::2] == np.arange(1, 64, 2)).all()
    with pytest.raises(MetalError, match=r"buffer 1 'o': 32 of 64 elements never written, the first at index 0"):
        run("if (i % 2) o[i] = x[i];", require_written=True)


def test_uninitialised_threadgroup_memory_is_poison():
    assert np.isnan(run("threadgroup float s[64]; o[i] = s[l];")).all()


def test_missing_matrix_initialisation_is_poison():
    got = run("simdgroup_float8x8 a, b, c; b = make_filled_simdgroup_matrix<float, 8>(1.0f); c = b;"
              " simdgroup_multiply_accumulate(a, b, c, a); simdgroup_store(a, o, 8);", n=32, group=32)  # fmt: skip
    assert np.isnan(got).all()


@pytest.mark.parametrize("source", ["o[i] = y[i];", "bfloat b = x[i]; o[i] = b;", "atomic_float a; o[i] = 1", "int n = max(1.0f, x);"])
def test_text_that_metal_rejects_does_not_compile(source):
    with pytest.raises(MetalBuildError):
        run(source)


def test_a_loop_without_end_is_stopped():
    with pytest.raises(MetalError, match="no end after 1 seconds of processor time"):
        run("float t = x[0]; while (t < 1) { t = t * 0.5f; } o[i] = t;", seconds=1)


def test_an_uninitialised_variable_is_absurd():
    assert (np.abs(run("float t[4]; if (x[0] > 0) t[i % 4] = 1; o[i] = t[(i + 1) % 4];")) > 1e38).all()


def test_emulator_survives_an_error():
    with pytest.raises(MetalError):
        run("o[i] = x[i + 1];")
    assert (run("o[i] = x[i] * 2;") == 2 * np.arange(64)).all()
