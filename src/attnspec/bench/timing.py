"""Timing side by side: in every round each contestant runs once, so that what slows the machine down slows all of them."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspec.bench.workloads import MissingPeer, Peer, Workload, in_mlx
from attnspec.dispatch import BACKENDS, select
from attnspec.reference.formula import Formula

LONGEST = 60.0      # seconds that the rounds of one workload take, about: slow ones make fewer


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant: the median and the shortest over the rounds, and of the first call."""

    median: float
    best: float
    first: float
    rounds: int


@dataclass(frozen=True)
class Row:
    """One line of the table: our kernel beside one peer on one workload."""

    work: str
    formula: str
    ours: Timing
    peer: str
    other: Timing | None              # None where the peer is not installed, then `missing` says so
    reach: float | None               # the ratio that was asked for
    limit: float | None               # seconds that the matrix products alone take at the machine's own rate
    missing: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times faster ours is, by medians."""
        return None if self.other is None else self.other.median / self.ours.median


def measure(work: Workload, rounds: int, threads: int, rate: float) -> Iterator[Row]:
    """The rows of one workload: every contestant timed in turn, on the same arrays."""
    from attnspec.numba_kernels import threads as kernel_threads

    arrays = work.arrays()
    peers, absent = [], {}
    for peer in work.peers:
        try:
            peers.append((peer, peer.prepare(arrays, threads)))
        except MissingPeer as reason:
            absent[peer] = str(reason)
    with kernel_threads(threads):
        ours, *others = time_in_turn([work.ours(arrays), *(call for _, call in peers)], rounds)
    limit = None if work.products is None else work.products / rate
    timed = dict(zip([peer for peer, _ in peers], others, strict=True))
    if not work.peers:
        yield Row(work.name, work.formula, ours, "", None, None, limit)
    for peer in work.peers:
        yield Row(work.name, work.formula, ours, peer.name, timed.get(peer), peer.reach, limit, absent.get(peer, ""))


def time_in_turn(calls: list[Callable[[], Any]], rounds: int) -> list[Timing]:
    first = [seconds(call) for call in calls]
    rounds = max(1, min(rounds, int(LONGEST / sum(first))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            found.append(seconds(call))
    return [Timing(statistics.median(found), min(found), start, rounds) for found, start in zip(times, first, strict=True)]


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def general_workload(record: Formula, backend: str, sizes: dict[str, int] | None, dtype: str) -> Workload:
    """Any formula on a backend beside the reference, on its drawn arrays."""
    function = select(record.name, backend, dtype=dtype).function

    def arrays() -> dict[str, np.ndarray]:
        drawn = record.draw(sizes)
        return {name: array.astype(dtype) if array.dtype.kind == "f" else array for name, array in drawn.items()}

    shape = ",".join(f"{name}={size}" for name, size in record.complete_sizes(sizes).items())
    reference = BACKENDS["reference"].function(record.name)
    assert reference is not None
    return Workload(
        name=f"{record.name}, {shape}", formula=record.name, arrays=arrays,
        ours=in_mlx(function) if backend == "mlx" else lambda given: lambda: function(**given),
        peers=(Peer("reference", lambda given, threads: lambda: reference(**given)),),
    )
