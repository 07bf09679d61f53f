"""Softmax attention by the kernels in tiles.metal and row.metal, or by a graph; the softmax twins and their kin come here.

The kernels keep nothing of n * m numbers. Their gradients are those of the graph, which computes the weights again.
"""

import functools
import math
from typing import Any

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import INF, scale_of, softmax_attention
from attnspec.mlx_backend.metal import Kernel
from attnspec.mlx_backend.twin import common_dtype
from attnspec.reference.inputs import CAUSAL, number, one_of, window_sides

INPUTS = ("q", "k", "v", "bias", "mask", "sink", "of", "sizes", "factors")
TILES = Kernel("softmax tiles", "attnspec.mlx_backend.softmax", "tiles.metal", INPUTS, ("out", "lse"))
ROW = Kernel("softmax row", "attnspec.mlx_backend.softmax", "row.metal", INPUTS, ("out", "lse"))
FEW = 8                              # queries up to which each has a threadgroup to itself
SIMDGROUPS = {TILES: 4, ROW: 8}      # of a threadgroup; those of TILES have 8 queries each
MEMORY = 32768                       # bytes of a threadgroup's memory
WIDEST = 256
PAYS = 2**16                         # logits from which on a kernel is taken; a guess, not measured yet
FAR = 2**30
LOG2_E = math.log2(math.e)


def attention(q, k, v, *, return_weights=False, own=False, **options) -> tuple[mx.array, mx.array | None, mx.array]:
    """Output (..., n, e), weights (..., n, m) where they are asked for, log-sum-exp (..., n); options: of graph.softmax_attention.

    own: the arrays are the caller's as they came, and go to the kernel in the dtype in which they did.
    """
    if not takes(q, k, v, return_weights):
        return softmax_attention(q, k, v, **options)
    out, lse = attend(q, k, v, dtype=common_dtype() if own else mx.float32, **options)
    return out, None, lse


def takes(q, k, v, return_weights=False) -> bool:
    """Whether the kernel is taken for a call."""
    kernel = kernel_for(q)
    return kernel.chosen(refusal(q, k, v, return_weights), pays(q, k), (str(common_dtype()),), functools.partial(check, kernel))


def kernel_for(q) -> Kernel:
    return ROW if q.shape[-2] <= FEW else TILES


def refusal(q, k, v, return_weights) -> str | None:
    """Why the kernel cannot do this call."""
    if return_weights:
        return "it does not write weights"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"heads are at most {WIDEST} wide, got {q.shape[-1]} and {v.shape[-1]}"
    return None if all(x.size for x in (q, k, v)) else "there are no queries, no keys or no features"


def pays(q, k) -> bool:
    return math.prod(q.shape[:-1]) * k.shape[-2] >= PAYS


def softmax_graph(**arrays_and_options) -> list[mx.array]:
    out, _, lse = softmax_attention(**arrays_and_options)
    return [out, lse]


def small_case(dtype: mx.Dtype) -> list[mx.array]:
    rng = np.random.default_rng(0)
    return [mx.array(rng.standard_normal((2, n, 16)).astype(np.float32)).astype(dtype).astype(mx.float32) for n in (33, 40, 40)]


def check(kernel: Kernel) -> bool:
    """Whether kernel and graph agree on a small causal case."""
    q, k, v = small_case(common_dtype())
    q = q[:, :FEW] if kernel is ROW else q
    out, lse = attend(q, k, v, dtype=common_dtype(), causal=True)
    want, _, L = softmax_attention(q, k, v, causal=True)
    tolerance = {4: 1e-5, 2: 2e-2}[common_dtype().size]
    return bool(mx.all(mx.abs(out - want) < tolerance)) and bool(mx.all(mx.abs(lse - L) < 1e-4))


def attend(
    q, k, v, *, dtype=mx.float32, signed=0, graph=softmax_graph, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None,
    sink=None, enable_gqa=False,
) -> list[mx.array]:
    """What `graph` gives, out and for softmax the log-sum-exp, by the kernel; its gradients by the graph."""
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    given = {name: x for name, x in arrays.items() if x is not None}
    options = {"scale": scale, "softcap": softcap, "mask": mask, "causal": causal, "window": window, "enable_gqa": enable_gqa}

    @mx.custom_function
    def forward(*primals):
        results = launch(dtype, signed, **dict(zip(given, primals, strict=True)), **options)
        return list(results[:1] if signed else results)

    @forward.vjp
    def backward(primals, cotangents, _):
        return mx.vjp(lambda *primals: graph(**dict(zip(given, primals, strict=True)), **options), list(primals), list(cotangents))[1]

    return forward(*given.values())


def launch(
    dtype, signed, q, k, v, *, bias=None, sink=None, scale, softcap, mask, causal, window, enable_gqa,
) -> tuple[mx.array, mx.array]:
    n, m, e = q.shape[-2], k.shape[-2], v.shape[-1]
    group = q.shape[-3] // k.shape[-3] if enable_gqa else 1
    groups, biased, masked = (1, group, group, 1, 1), bias is not None, mask is not None
    bias, mask = (mx.zeros((1, 1), kind) if x is None else x for x, kind in ((bias, mx.float32), (mask, mx.bool_)))
    fronts = [front(x, shared) for x, shared in zip((q, k, v, bias, mask), groups, strict=True)]
    of_sink = () if sink is None else sink.shape
    lead = np.broadcast_shapes(*fronts, of_sink)
    heads = math.prod(lead)
    of = [entries(shape, lead, shared) for shape, shared in zip(fronts, groups, strict=True)]
    of.append(entries(of_sink, lead, 1))

    wide_q, wide_k, wide_v = (padded(x).astype(dtype) for x in (q, k, v))
    bias, mask = flat(bias), flat(mask)
    D, E = wide_q.shape[-1], wide_v.shape[-1]
    low, high = band(n, m, causal, window)
    cap = 0.0 if softcap is None or not 0 < number("softcap", softcap, least=0) < INF else float(softcap)
    keys = 32 if 32 * (max(D, E) + 16 // dtype.size) * dtype.size < MEMORY - 64 else 16
    kernel = kernel_for(q)
    simds = SIMDGROUPS[kernel]
    rows, more = (8 * simds, {"KEYS": keys, "ROWS": 8 * simds}) if kernel is TILES else (1, {})
    out, lse = kernel.launch(
        [wide_q, wide_k, wide_v, bias, mask, mx.zeros(1) if sink is None else sink.reshape(-1), mx.array(np.stack(of).astype(np.int32)),
         mx.array([n, m, low, high, *bias.shape[1:], *mask.shape[1:]], mx.int32), mx.array([scale_of(scale, q) * LOG2_E, cap * LOG2_E])],
        {"T": dtype, "D": D, "E": E, **more, "SIMDS": simds, "CAPPED": cap > 0, "BIASED": biased, "MASKED": masked, "SIGNED": signed,
         "SUNK": sink is not None},
        (32 * simds * -(-n // rows), heads, 1), (32 * simds, 1, 1), [((heads, n, E), dtype), ((heads, n), mx.float32)],
    )
    of_lse = np.broadcast_shapes(*(shape for shape, x in zip(fronts, "qkvbm", strict=True) if x != "v"), of_sink)
    lse = lse.reshape(*lead, n)[(0,) * (len(lead) - len(of_lse))]                # not repeated along axes that only the values have
    lse = lse[tuple(slice(1) if size == 1 else slice(None) for size in of_lse)]
    return out[..., :e].reshape(*lead, n, e).astype(mx.float32), lse


def front(x: mx.array, group: int) -> tuple[int, ...]:
    """Leading axes of an array, its heads counted as often as they are shared."""
    shape = tuple(x.shape[:-2])
    return shape if group == 1 else (*shape[:-1], shape[-1] * group)


def entries(shape: tuple[int, ...], lead: tuple[int, ...], group: int) -> np.ndarray:
    """Which entry of an array, its leading axes flattened, each flattened head of `lead` uses; shape: with heads as often as shared."""
    own = shape if group == 1 else (*shape[:-1], shape[-1] // group)
    index = np.arange(math.prod(own)).reshape(own)
    return np.broadcast_to(np.repeat(index, group, axis=-1) if group > 1 else index, lead).reshape(-1)


def padded(x: mx.array) -> mx.array:
    """x (b, rows, columns), filled up with zeros to a multiple of 8 columns."""
    x = flat(x)
    return mx.pad(x, [(0, 0), (0, 0), (0, -x.shape[-1] % 8)])


def flat(x: mx.array) -> mx.array:
    """x (b, rows, columns)."""
    rows, columns = ((1, 1) + tuple(x.shape))[-2:]
    return x.reshape(-1, rows, columns)


def band(n: int, m: int, causal: Any, window: Any) -> tuple[int, int]:
    """Query i sees the keys from i + low to i + high, as in graph.visible_keys."""
    corner = m - n if one_of("causal", causal, CAUSAL) in (True, "bottom-right") else 0
    left, right = (None, None) if window is None else window_sides(window)
    high = FAR if causal is False else corner
    return -FAR if left is None else corner - left, high if right is None else min(high, corner + right)
