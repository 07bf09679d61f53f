"""Kernels on several threads.

A kernel works on the tasks `range(first, tasks, step)` and takes first and step as its last arguments; it lets go of the GIL. Which thread
does a task changes nothing about its result, so results do not depend on the number of threads. The pool is Python's own: Numba's
layers abort when two threads use them at once.
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba.core import config

from attnspec.reference.inputs import whole

LONG = 1e8      # operations from which on threads may get out of step, and each gets many small parts; handing one over takes some 20 us

_pool: ThreadPoolExecutor | None = None
# The processors this process may use, or what NUMBA_NUM_THREADS says.
_count: int = config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


def thread_count() -> int:
    """How many threads the kernels use."""
    return _count


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let the kernels use `count` threads inside a with block, in the whole process. Raises ValueError for less than 1."""
    global _count
    before, _count = _count, whole("count", count, least=1)
    _forget_pool()
    try:
        yield
    finally:
        _count = before
        _forget_pool()


def _forget_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)      # a child has none of its parent's threads


def in_parallel(kernel, tasks: int, *arguments, work: float = 1e9) -> None:
    """Run a kernel on all its tasks. work: roughly how many operations; little of it is done at once on the caller's thread."""
    global _pool
    arguments = tuple(unlocked(x) if isinstance(x, np.ndarray) else x for x in arguments)
    parts = min(tasks, (16 if work > LONG else 2) * _count)
    if parts < 2 or _count == 1 or work < 1e6:
        kernel(*arguments, 0, 1)
        return
    pool = _pool
    if pool is None:
        pool = _pool = ThreadPoolExecutor(_count, "attnspec")
    for future in [pool.submit(kernel, *arguments, part, parts) for part in range(parts)]:
        future.result()


class _Memory:
    """The memory of a read-only array, said to be writable."""

    def __init__(self, x: np.ndarray):
        self.owner = x
        self.__array_interface__ = {**x.__array_interface__, "data": (x.ctypes.data, False)}


def unlocked(x: np.ndarray) -> np.ndarray:
    """x, or the same memory in an array that is not read-only: for read-only ones Numba compiles a kernel anew, though none writes into
    what it is given to read."""
    return x if x.flags.writeable else np.asarray(_Memory(x))
