"""What is timed: sizes, our call, and the peers, each the way its users would write it.

A peer is prepared once (arrays handed over, threads set), then called. Torch peers are eager PyTorch on the CPU; a peer whose library is
not installed is listed without a time.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Call = Callable[[], Any]

HEADS, TOKENS, FEATURES = 8, 2048, 64


class MissingPeer(Exception):
    """The peer's library is not installed."""


@dataclass(frozen=True)
class Peer:
    """Something to be compared with. reach: how many times faster ours should be."""

    name: str
    prepare: Callable[[Arrays, int], Call]
    reach: float | None = None


@dataclass(frozen=True)
class Workload:
    """A computation at fixed sizes. products: operations of its matrix products, for the physical limit."""

    name: str
    formula: str
    arrays: Callable[[], Arrays]
    ours: Callable[[Arrays], Call]
    peers: tuple[Peer, ...]
    products: float | None = None


# --- arrays --------------------------------------------------------------------------------------------------------------------------


def heads_first(*names: str, heads: int = HEADS, n: int = TOKENS, d: int = FEATURES, **shapes: tuple[int, ...]) -> Callable[[], Arrays]:
    """A function that draws float32 arrays (heads, n, d) for the names, and others of the shapes given by name."""

    def draw() -> Arrays:
        rng = np.random.default_rng(0)
        wanted = {**dict.fromkeys(names, (heads, n, d)), **shapes}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in wanted.items()}

    return draw


def five_sets(n: int) -> Callable[[], Arrays]:
    """A function that draws queries and two sets of keys and values (n, d)."""

    def draw() -> Arrays:
        drawn = np.random.default_rng(0).standard_normal((5, n, FEATURES)).astype(np.float32)
        return dict(zip(("q", "k1", "v1", "k2", "v2"), drawn, strict=True))

    return draw


def ours(name: str, **options: Any) -> Callable[[Arrays], Call]:
    """Our kernel of that name on all the arrays."""

    def prepare(arrays: Arrays) -> Call:
        from attnspec import numba_kernels

        function = getattr(numba_kernels, name)
        return lambda: function(**arrays, **options)

    return prepare


def own_softmax(reach: float) -> Peer:
    """Our softmax kernel on the same q, k, v: `reach` is the longest time allowed, in units of its time."""

    def prepare(arrays: Arrays, threads: int) -> Call:
        from attnspec.numba_kernels import scaled_dot_product_attention

        return lambda: scaled_dot_product_attention(arrays["q"], arrays["k"], arrays["v"])

    return Peer("our softmax", prepare, 1 / reach)


def torch_peer(name: str, function: Callable[..., Any], reach: float | None = None) -> Peer:
    """`function(torch, tensors)` as a peer; the tensors share the arrays' memory."""

    def prepare(arrays: Arrays, threads: int) -> Call:
        if importlib.util.find_spec("torch") is None:
            raise MissingPeer("torch is not installed")
        import torch

        torch.set_num_threads(threads)
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        return function(torch, tensors)

    return Peer(name, prepare, reach)


# --- peers ---------------------------------------------------------------------------------------------------------------------------


def torch_sdpa(torch: Any, x: dict[str, Any], **options: Any) -> Call:
    q, k, v = (x[name][None] for name in "qkv")
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def torch_cog(torch: Any, x: dict[str, Any]) -> Call:
    def call() -> Any:
        p = x["q"] @ x["k"].mT / math.sqrt(FEATURES)
        return p.sign() * torch.softmax(p.abs(), -1) @ x["v"]

    return call


def torch_sinkhorn_log(torch: Any, x: dict[str, Any], steps: int) -> Call:
    def call() -> Any:
        s = x["q"] @ x["k"].mT / math.sqrt(FEATURES)
        v = torch.zeros_like(s[..., :1, :])
        u = torch.zeros_like(s[..., :1])
        for t in range(steps):
            if t % 2 == 0:
                u = -torch.logsumexp(s + v, -1, keepdim=True)
            else:
                v = -torch.logsumexp(s + u, -2, keepdim=True)
        return torch.exp(s + u + v) @ x["v"]

    return call


def torch_sinkhorn_multiplicative(torch: Any, x: dict[str, Any], steps: int) -> Call:
    def call() -> Any:
        s = x["q"] @ x["k"].mT / math.sqrt(FEATURES)
        K = torch.exp(s - s.amax(-1, keepdim=True))
        v = torch.ones_like(K[..., :1, :]).mT
        u = v
        for t in range(steps):
            if t % 2 == 0:
                u = 1 / (K @ v)
            else:
                v = 1 / (K.mT @ u)
        return u * (K @ (v * x["v"]))

    return call


def torch_hopfield(torch: Any, x: dict[str, Any], updates: int) -> Call:
    def call() -> Any:
        state, stored = x["state"], x["stored"]
        for _ in range(updates):
            state = torch.softmax(state @ stored.mT / math.sqrt(FEATURES), -1) @ stored
        return state

    return call


def torch_tensor_einsum(torch: Any, x: dict[str, Any]) -> Call:
    def call() -> Any:
        s = torch.einsum("il,jl,kl->ijk", x["q"], x["k1"], x["k2"]) / x["q"].shape[-1]
        P = torch.softmax(s.flatten(1), -1).view(s.shape)
        return torch.einsum("ijk,jc,kc->ic", P, x["v1"], x["v2"])

    return call


def torch_tensor_products(torch: Any, x: dict[str, Any]) -> Call:
    """One matrix product for each key of the first set, then a softmax over all pairs and the same for the values."""

    def call() -> Any:
        q, k1, k2, v1, v2 = (x[name] for name in ("q", "k1", "k2", "v1", "v2"))
        s = torch.matmul(q * k1[:, None], k2.T) / q.shape[-1]                                # (m1, n, m2)
        top = s.amax((0, 2), keepdim=True)
        e = torch.exp(s - top)
        return ((e @ v2) * v1[:, None]).sum(0) / e.sum((0, 2))[:, None]

    return call


def torch_backward(torch: Any, x: dict[str, Any], forward: Callable[..., Any]) -> Call:
    """Forward and backward together."""
    leaves = {name: x[name][None].clone().requires_grad_() for name in "qkv"}

    def call() -> Any:
        for leaf in leaves.values():
            leaf.grad = None
        forward(torch, leaves)().backward(x["do"][None])

    return call


def torch_sdpa_of_leaves(torch: Any, x: dict[str, Any]) -> Call:
    return lambda: torch.nn.functional.scaled_dot_product_attention(x["q"], x["k"], x["v"])


def numpy_sdm(arrays: Arrays, threads: int) -> Call:
    """Sparse distributed memory with NumPy: packed bits and bitwise_count, a pattern at a time, counters of 16 bits."""
    locations, patterns, query = (packed_words(arrays[name]) for name in ("locations", "patterns", "queries"))
    counters = np.zeros(arrays["locations"].shape, np.int16)
    counts = np.zeros(len(counters), np.int16)
    distance = np.empty(len(counters), np.uint16)

    def near(point: np.ndarray) -> np.ndarray:
        np.sum(np.bitwise_count(locations ^ point), axis=-1, dtype=np.uint16, out=distance)
        return np.flatnonzero(distance <= RADIUS)

    def call() -> Any:
        counters[:], counts[:] = 0, 0
        for point, bits in zip(patterns, arrays["patterns"], strict=True):
            written = near(point)
            counters[written] += bits
            counts[written] += 1
        read = near(query[0])
        return 2 * counters[read].sum(axis=0, dtype=np.int64) > counts[read].sum(dtype=np.int64)

    return call


def packed_words(bits: np.ndarray) -> np.ndarray:
    """Bits (..., d) as 64-bit words."""
    padded = np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 64)])
    return np.packbits(padded, axis=-1).view(np.uint64)


# --- the table -----------------------------------------------------------------------------------------------------------------------

RADIUS = 451          # of 1000 bits: activates 1e-3 of the locations, near Kanerva's best for 1e6 of them
ATTENTION = 4.0 * HEADS * TOKENS**2 * FEATURES      # operations of q k^T and P v
QKV = heads_first("q", "k", "v")


def our_gradients(signed: int) -> Callable[[Arrays], Call]:
    """Our backward pass alone, from what the forward pass saved."""

    def prepare(arrays: Arrays) -> Call:
        from attnspec.numba_kernels.softmax.tiles import flattened, forward
        from attnspec.numba_kernels.softmax.tiles_backward import gradients

        call = flattened(arrays["q"], arrays["k"], arrays["v"])
        out, _, _, saved = forward(call, signed=signed, save=True)
        return lambda: gradients(call, arrays["do"], out, saved, signed=signed)

    return prepare


def torch_backward_alone(torch: Any, x: dict[str, Any], forward: Callable[..., Any]) -> Call:
    """The backward pass alone, of a graph that is kept."""
    leaves = {name: x[name][None].clone().requires_grad_() for name in "qkv"}
    out = forward(torch, leaves)()
    return lambda: torch.autograd.grad(out, list(leaves.values()), x["do"][None], retain_graph=True)


def draw_memory() -> Arrays:
    rng = np.random.default_rng(0)
    return {
        "locations": rng.integers(0, 2, (10**6, 1000), dtype=np.uint8),
        "patterns": rng.integers(0, 2, (1000, 1000), dtype=np.uint8),
        "queries": rng.integers(0, 2, (1, 1000), dtype=np.uint8),
    }


def our_memory(arrays: Arrays) -> Call:
    from attnspec.numba_kernels import sdm_read, sdm_write

    def call() -> Any:
        written = sdm_write(arrays["locations"], arrays["patterns"], arrays["patterns"], radius=RADIUS)
        return sdm_read(arrays["queries"], arrays["locations"], written.storage, written.counts, radius=RADIUS)

    return call


def our_sinkhorn(steps: int, scratch: bool) -> Callable[[Arrays], Call]:
    """Our Sinkhorn attention with or without its scratch matrix."""

    def prepare(arrays: Arrays) -> Call:
        from attnspec.numba_kernels.transport import sinkhorn

        limit = sinkhorn.SCRATCH_BYTES if scratch else 0
        return lambda: sinkhorn.attention(**arrays, n_iters=steps, scratch_bytes=limit)

    return prepare


def sinkhorn_rows(steps: int) -> list[Workload]:
    by_log = torch_peer("torch, log domain", lambda torch, x: torch_sinkhorn_log(torch, x, steps), 3.0)
    by_log_8 = torch_peer("torch, log domain", lambda torch, x: torch_sinkhorn_log(torch, x, steps), 8.0)
    by_scaling = torch_peer("torch, multiplicative", lambda torch, x: torch_sinkhorn_multiplicative(torch, x, steps), 1.0)
    name = f"Sinkhorn, {steps} half-steps"
    fast = (by_log_8, by_scaling) if steps > 5 else (by_log, by_scaling)
    return [
        Workload(f"{name}, streaming", "sinkhorn_attention", QKV, our_sinkhorn(steps, False), (by_log,), (steps + 1) / 2 * ATTENTION),
        Workload(f"{name}, scratch matrix", "sinkhorn_attention", QKV, our_sinkhorn(steps, True), fast, ATTENTION),
    ]


def workloads() -> list[Workload]:
    """All of them, in the order of the table."""
    x, gate = (TOKENS, 512), (HEADS, FEATURES, 512)
    causal = torch_peer("torch SDPA, causal", lambda torch, x: torch_sdpa(torch, x, is_causal=True), 1.0)
    sdpa = torch_peer("torch SDPA", torch_sdpa, 1.0)
    table = [
        Workload("softmax", "scaled_dot_product_attention", QKV, ours("scaled_dot_product_attention"), (sdpa,), ATTENTION),
        Workload("softmax, causal", "scaled_dot_product_attention", QKV, ours("scaled_dot_product_attention", causal=True),
                 (causal, own_softmax(0.6)), ATTENTION / 2),
        Workload("softmax, gradients", "scaled_dot_product_attention_backward", heads_first("q", "k", "v", "do"), our_gradients(0),
                 (torch_peer("torch SDPA, backward", lambda torch, x: torch_backward_alone(torch, x, torch_sdpa_of_leaves), 1.0),),
                 2.5 * ATTENTION),
        Workload("softmax, output and gradients", "scaled_dot_product_attention_backward", heads_first("q", "k", "v", "do"),
                 ours("scaled_dot_product_attention_backward"),
                 (torch_peer("torch SDPA, forward and backward", lambda torch, x: torch_backward(torch, x, torch_sdpa_of_leaves), 1.0),),
                 3.5 * ATTENTION),
        Workload("Cog", "cog_attention", QKV, ours("cog_attention"),
                 (torch_peer("torch eager", torch_cog, 4.0), own_softmax(1.2)), ATTENTION),
        Workload("Cog, gradients", "cog_attention_backward", heads_first("q", "k", "v", "do"), our_gradients(1),
                 (torch_peer("torch eager, backward", lambda torch, x: torch_backward_alone(torch, x, torch_cog), 5.0),), 2.5 * ATTENTION),
        Workload("affine-scaled", "affine_scaled_attention",
                 heads_first("q", "k", "v", x=x, w_a=(HEADS, x[1]), alpha_ma=(HEADS,)), ours("affine_scaled_attention"),
                 (own_softmax(1.15),), ATTENTION),
        Workload("gated", "gated_attention", heads_first("q", "k", "v", x=x, w_gate=gate), ours("gated_attention"),
                 (own_softmax(1.15),), ATTENTION),
        Workload("GOAT, the heads' attention", "goat_head_attention",
                 heads_first("q", "k", "v", a=(HEADS, 8), b=(HEADS, 8), u=(HEADS, TOKENS)), ours("goat_head_attention"),
                 (own_softmax(1.15),), ATTENTION),
        Workload("sink", "attention_with_sink", heads_first("q", "k", "v", sink=(HEADS,)), ours("attention_with_sink"),
                 (own_softmax(1.15),), ATTENTION),
        *sinkhorn_rows(5),
        *sinkhorn_rows(21),
        Workload("Hopfield, 3 updates", "hopfield_retrieve", heads_first("state", "stored"),
                 ours("hopfield_retrieve", n_iters=2, tol=None),
                 (torch_peer("torch eager", lambda torch, x: torch_hopfield(torch, x, 3), 3.0),), 3 * ATTENTION),
        Workload("tensor, n = 256", "tensor_attention", five_sets(256),
                 ours("tensor_attention"),
                 (torch_peer("torch einsum", torch_tensor_einsum, 2.0), torch_peer("torch, a product a key", torch_tensor_products, 2.0)),
                 4.0 * 256**3 * FEATURES),
        Workload("tensor, n = 1024", "tensor_attention", five_sets(1024),
                 ours("tensor_attention"), (), 4.0 * 1024**3 * FEATURES),
        Workload("SDM, 1e6 locations, 1000 patterns", "sdm_read", draw_memory, our_memory, (Peer("NumPy, packed bits", numpy_sdm, 3.0),)),
    ]
    return table


# --- MLX -----------------------------------------------------------------------------------------------------------------------------


def in_mlx(function: Callable[..., Any], path: str = "auto", **options: Any) -> Callable[[Arrays], Call]:
    """A function of mx.arrays, which are made beforehand, and whose result is computed before the clock stops."""
    import mlx.core as mx

    from attnspec.mlx_backend import metal

    def prepare(given: Arrays) -> Call:
        arrays = {name: mx.array(array) for name, array in given.items()}

        def call() -> None:
            with metal.path(path):
                mx.eval(function(**arrays, **options))

        return call

    return prepare


def mlx_workloads() -> list[Workload]:
    """Our MLX functions, by Metal kernels where there is a GPU, beside their graphs and MLX's own attention."""
    import mlx.core as mx

    from attnspec import mlx_backend

    def fast(**options: Any) -> Callable[..., Any]:
        def attend(q: Any, k: Any, v: Any, sink: Any = None) -> Any:
            q, k, v = (x[None] for x in (q, k, v))
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=FEATURES**-0.5, sinks=sink, **options)

        return attend

    def row(work: str, name: str, arrays: Callable[[], Arrays], own: Callable[..., Any] | None = None, products: float = ATTENTION,
            **options: Any) -> Workload:
        function = getattr(mlx_backend, name)
        peers = [Peer("our graph", lambda given, threads: in_mlx(function, "graph", **options)(given))]
        if own is not None:
            peers.insert(0, Peer("mx.fast", lambda given, threads: in_mlx(own)(given)))
        return Workload(f"{work}, MLX", name, arrays, in_mlx(function, **options), tuple(peers), products)

    one = heads_first("q", "k", "v", q=(HEADS, 1, FEATURES))
    return [
        row("softmax", "scaled_dot_product_attention", QKV, fast()),
        row("softmax, causal", "scaled_dot_product_attention", QKV, fast(mask="causal"), ATTENTION / 2, causal=True),
        row("softmax, one query", "scaled_dot_product_attention", one, fast(), ATTENTION / TOKENS),
        row("sink", "attention_with_sink", heads_first("q", "k", "v", sink=(HEADS,)), fast()),
        row("Cog", "cog_attention", QKV),
        row("prior", "prior_attention", heads_first("q", "k", "v", log_prior=(TOKENS, TOKENS))),
        row("gated", "gated_attention", heads_first("q", "k", "v", x=(TOKENS, 512), w_gate=(HEADS, FEATURES, 512))),
        row("Hopfield, 3 updates", "hopfield_retrieve", heads_first("state", "stored"), None, 3 * ATTENTION, n_iters=2, tol=None),
    ]
