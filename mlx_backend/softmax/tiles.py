"""Softmax attention by the kernels in tiles.metal and row.metal, or by a graph; the softmax twins and their kin come here.

The kernels keep nothing of n * m numbers. Gradients come from kernels too, which compute the weights again from the log-sum-exp.
"""

import functools
import math
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import INF, scale_of, softmax_attention, sum_to_shape
from attnspec.mlx_backend.metal import Kernel
from attnspec.mlx_backend.twin import common_dtype
from attnspec.reference.inputs import CAUSAL, number, one_of, window_sides

INPUTS = ("q", "k", "v", "bias", "mask", "sink", "of", "sizes", "factors")
TILES = Kernel("softmax tiles", "attnspec.mlx_backend.softmax", "tiles.metal", INPUTS, ("out", "lse"))
ROW = Kernel("softmax row", "attnspec.mlx_backend.softmax", "row.metal", INPUTS, ("out", "lse"))
GIVEN = ("q", "k", "v", "bias", "mask", "of", "sizes", "factors", "dout", "lse", "delta")
QUERIES_BACKWARD = Kernel("softmax gradients", "attnspec.mlx_backend.softmax", "tiles_backward_queries.metal", GIVEN, ("dq", "dbias"))
KEYS_BACKWARD = Kernel("softmax gradients", "attnspec.mlx_backend.softmax", "tiles_backward_keys.metal", GIVEN, ("dk", "dv"))
NONZERO = 2                          # a kind of signed attention that has no gradients by kernel
FEW = 8                              # queries up to which each has a threadgroup to itself
SIMDGROUPS = {TILES: 4, ROW: 8}      # of a threadgroup; those of TILES have 8 queries each
MEMORY = 32768                       # bytes of a threadgroup's memory
WIDEST = 256
PAYS = 2**16                         # logits from which on a kernel is taken; a guess, not measured yet
LONG = 2048                          # keys from which on tiles are twice as long: their sums are added in one chain
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
    return kernel_for_rows(q.shape[-2])


def kernel_for_rows(n: int) -> Kernel:
    return ROW if n <= FEW else TILES


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
) -> tuple[mx.array, mx.array]:
    """(out, lse) by a kernel, and gradients by kernels or the graph, which gives out and for softmax the log-sum-exp."""
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    given = {name: x for name, x in arrays.items() if x is not None}
    options = {"scale": scale, "softcap": softcap, "mask": mask, "causal": causal, "window": window, "enable_gqa": enable_gqa}

    @mx.custom_function
    def forward(*primals):
        return list(launch(Layout.of_call(dtype, signed, **dict(zip(given, primals, strict=True)), **options)))

    @forward.vjp
    def backward(primals, cotangents, results):
        primals = dict(zip(given, primals, strict=True))
        if signed != NONZERO and gradients_taken():
            found = gradients(Layout.of_call(dtype, signed, **primals, **options), primals, *cotangents, *results)
            return [found[name] for name in given]
        cotangents = [cotangents[0][..., : v.shape[-1]], cotangents[1]][: 1 if signed else 2]
        return mx.vjp(lambda *x: graph(**dict(zip(given, x, strict=True)), **options), list(primals.values()), cotangents)[1]

    out, lse = forward(*given.values())
    return out[..., : v.shape[-1]], lse


class Layout(NamedTuple):
    """A call as the kernels take it: heads flattened, and for each array which of its entries a head uses."""

    dtype: mx.Dtype
    lead: tuple[int, ...]
    of_lse: tuple[int, ...]            # the leading axes of what does not depend on the values
    arrays: list[mx.array]             # q, k, v, bias, mask
    sink: mx.array
    of: np.ndarray                     # (6, heads): of these and of the sink
    sizes: list[int]                   # n, m, low, high, rows and columns of bias and mask
    scale: float
    cap: float
    flags: dict[str, Any]

    @property
    def heads(self) -> int:
        return math.prod(self.lead)

    @property
    def widths(self) -> tuple[int, int]:
        """D, E"""
        return self.arrays[0].shape[-1], self.arrays[2].shape[-1]

    @classmethod
    def of_call(
        cls, dtype, signed, q, k, v, *, bias=None, sink=None, scale, softcap, mask, causal, window, enable_gqa,
    ) -> "Layout":
        group = q.shape[-3] // k.shape[-3] if enable_gqa else 1
        groups, biased, masked, sunk = (1, group, group, 1, 1), bias is not None, mask is not None, sink is not None
        bias, mask = (mx.zeros((1, 1), kind) if x is None else x for x, kind in ((bias, mx.float32), (mask, mx.bool_)))
        sink = mx.zeros(()) if sink is None else sink
        fronts = [front(x, shared) for x, shared in zip((q, k, v, bias, mask), groups, strict=True)]
        lead = np.broadcast_shapes(*fronts, sink.shape)
        of = [entries(shape, lead, shared) for shape, shared in zip(fronts, groups, strict=True)]
        wide = [padded(x).astype(dtype) for x in (q, k, v)]
        bias, mask = flat(bias), flat(mask)
        cap = 0.0 if softcap is None or not 0 < number("softcap", softcap, least=0) < INF else float(softcap)
        sizes = [q.shape[-2], k.shape[-2], *band(q.shape[-2], k.shape[-2], causal, window), *bias.shape[1:], *mask.shape[1:]]
        flags = {"CAPPED": cap > 0, "BIASED": biased, "MASKED": masked, "SIGNED": signed, "SUNK": sunk}
        return cls(dtype, lead, np.broadcast_shapes(*fronts[:2], *fronts[3:], sink.shape), [*wide, bias, mask], sink.reshape(-1),
                   np.stack([*of, entries(sink.shape, lead, 1)]), sizes, scale_of(scale, q), cap, flags)


def launch(call: Layout) -> tuple[mx.array, mx.array]:
    """(out, lse)"""
    (D, E), (n, m, *_), kernel = call.widths, call.sizes, kernel_for_rows(call.sizes[0])
    keys = fitting(max(D, E), call.dtype, 64 if m > LONG else 32)
    simds = SIMDGROUPS[kernel]
    rows, more = (8 * simds, {"KEYS": keys, "ROWS": 8 * simds}) if kernel is TILES else (1, {})
    out, lse = kernel.launch(
        [*call.arrays, call.sink, mx.array(call.of, mx.int32), mx.array(call.sizes, mx.int32),
         mx.array([call.scale * LOG2_E, call.cap * LOG2_E])],
        {"T": call.dtype, "D": D, "E": E, **more, "SIMDS": simds, **call.flags},
        (32 * simds * -(-n // rows), call.heads, 1), (32 * simds, 1, 1), [((call.heads, n, E), call.dtype), ((call.heads, n), mx.float32)],
    )
    lse = lse.reshape(*call.lead, n)[(0,) * (len(call.lead) - len(call.of_lse))]      # not repeated along axes that only the values have
    lse = lse[tuple(slice(1) if size == 1 else slice(None) for size in call.of_lse)]
    return out.reshape(*call.lead, n, E).astype(mx.float32), lse


def fitting(width: int, dtype: mx.Dtype, most: int = 32) -> int:
    """Rows of a tile, which with the gap between them fit the memory of a threadgroup beside a few flags."""
    return next(rows for rows in (64, 32, 16, 8) if rows <= most and rows * (width * dtype.size + 16) <= MEMORY - 64)


# --- gradients -----------------------------------------------------------------------------------------------------------------------


def gradients_taken() -> bool:
    return QUERIES_BACKWARD.chosen(None, True, (str(common_dtype()),), check_gradients)


def check_gradients() -> bool:
    """Whether kernels and graph agree on the gradients of a small causal case."""
    arrays, dtype = small_case(common_dtype()), common_dtype()
    ours = mx.grad(lambda q, k, v: mx.sum(attend(q, k, v, dtype=dtype, causal=True)[0] ** 2), argnums=(0, 1, 2))(*arrays)
    theirs = mx.grad(lambda q, k, v: mx.sum(softmax_attention(q, k, v, causal=True)[0] ** 2), argnums=(0, 1, 2))(*arrays)
    tolerance = {4: 1e-4, 2: 1e-1}[dtype.size]
    return all(bool(mx.all(mx.abs(one - other) < tolerance)) for one, other in zip(ours, theirs, strict=True))


def gradients(call: Layout, primals, do, dlse, out, lse) -> dict[str, mx.array]:
    """The cotangents of q, k, v, bias and sink, from what forward gave and those of its results.

    That of the log-sum-exp is taken off delta = <do, out>, as the derivatives of lse by the logits are the weights.
    """
    (D, E), (n, m, *_), heads = call.widths, call.sizes, call.heads
    simds, dtype = SIMDGROUPS[TILES], call.dtype
    lse_of = mx.broadcast_to(lse, (*call.lead, n))
    delta = mx.where(mx.any(out != 0, axis=-1), mx.sum(do * out, axis=-1), 0.0) - mx.broadcast_to(dlse, lse_of.shape)
    of = np.concatenate([call.of, np.arange(heads)[None]])
    inputs = [*call.arrays, mx.array(of, mx.int32), mx.array(call.sizes, mx.int32),
              mx.array([call.scale * LOG2_E, call.cap * LOG2_E, call.scale]), flat(do).astype(dtype), lse_of.reshape(heads, n),
              delta.reshape(heads, n)]
    flags = {name: value for name, value in call.flags.items() if name != "SUNK"}
    common = {"T": dtype, "D": D, "E": E, "SIMDS": simds, **flags}
    biased = call.flags["BIASED"]
    dq, dbias = QUERIES_BACKWARD.launch(
        inputs, {**common, "KEYS": fitting(max(D, E), dtype), "ROWS": 8 * simds, "DBIAS": biased},
        (32 * simds * -(-n // (8 * simds)), heads, 1), (32 * simds, 1, 1),
        [((heads, n, D), mx.float32), ((heads, n, m) if biased else (1, 1, 1), mx.float32)], fill=0.0,
    )
    dk, dv = KEYS_BACKWARD.launch(
        inputs, {**common, "KEYS": 8 * simds, "ROWS": fitting(D + E, dtype)}, (32 * simds * -(-m // (8 * simds)), heads, 1),
        (32 * simds, 1, 1), [((heads, m, D), mx.float32), ((heads, m, E), mx.float32)],
    )
    found = {name: shaped(x.reshape(*call.lead, *x.shape[1:]), primals[name]) for name, x in (("q", dq), ("k", dk), ("v", dv))}
    if biased:
        found["bias"] = sum_to_shape(dbias.reshape(*call.lead, n, m), primals["bias"].shape)
    if call.flags["SUNK"]:
        z = mx.broadcast_to(primals["sink"], call.lead)[..., None]
        share = mx.where(lse_of == -INF, 0.0, mx.exp(z - mx.where(lse_of == -INF, 0.0, lse_of)))
        found["sink"] = sum_to_shape(-mx.sum(share * delta, axis=-1), primals["sink"].shape)
    return found


def shaped(gradient: mx.array, like: mx.array) -> mx.array:
    """The gradient of all heads (..., h, rows, width) for an array of fewer, which some share, and narrower."""
    gradient = gradient[..., : like.shape[-1]]
    if like.ndim > 2 and gradient.shape[-3] != like.shape[-3] != 1:
        *lead, heads, rows, width = gradient.shape
        gradient = mx.sum(gradient.reshape(*lead, like.shape[-3], heads // like.shape[-3], rows, width), axis=-3)
    return sum_to_shape(gradient, like.shape)


# --- layouts -------------------------------------------------------------------------------------------------------------------------


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
