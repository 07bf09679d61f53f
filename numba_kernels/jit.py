"""How kernels are compiled: without the GIL, with products and sums fused but never reordered, and cached on disk.

The cache is keyed by the text of every file of this package, since a kernel is compiled together with the helpers it calls, and Numba by
itself notices a change in the kernel's own file only. Where no folder can be written, kernels are compiled anew in each process.
"""

import contextlib
import functools
import hashlib
import os
from pathlib import Path

import numba
import platformdirs
from numba.core import caching, config

# No other flag: reassoc turns (x + c) - c into x, which is how 2^x rounds x; with nnan and ninf, isnan is always false. Where the order of
# a sum may change for speed, the kernel says so with registers (simd.py).
FAST = {"contract"}

HERE = Path(__file__).parent


@functools.cache
def package_stamp() -> str:
    """A digest of every source file of the kernels."""
    digest = hashlib.sha256()
    for path in sorted(HERE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class KernelLocator(caching._CacheLocator):
    """Numba's cache of one kernel in NUMBA_CACHE_DIR if that is set, else in the user's cache folder."""

    def __init__(self, function, path):
        self._py_file = path
        self._name = f"{hashlib.sha256(path.encode()).hexdigest()[:16]}-{function.__code__.co_firstlineno}"

    def get_cache_path(self):
        chosen = config.CACHE_DIR  # type: ignore[attr-defined]
        return os.path.join(chosen or platformdirs.user_cache_dir("attnspec"), "numba_kernels")

    def get_source_stamp(self):
        return package_stamp() + hashlib.sha256(Path(self._py_file).read_bytes()).hexdigest()

    def get_disambiguator(self):
        return self._name

    @classmethod
    def from_function(cls, function, path):
        locator = cls(function, path)
        try:
            locator.ensure_cache_path()
        except (OSError, RuntimeError):                # nowhere to write, or no home directory
            return None
        return locator


class KernelCacheImpl(caching.CompileResultCacheImpl):
    def __init__(self, function):
        self._lineno = function.__code__.co_firstlineno
        self._locator = KernelLocator.from_function(function, function.__code__.co_filename)
        if self._locator is None:
            raise OSError("no folder for the cache")
        self._filename_base = self.get_filename_base(function.__qualname__, "")


class KernelCache(caching.FunctionCache):
    """A cache that is never worse than none: what cannot be read is compiled again, what cannot be written is not kept."""

    _impl_class = KernelCacheImpl

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except Exception:
            with contextlib.suppress(Exception):
                self.flush()                            # an index that cannot be read is in the way of a new one
                super().save_overload(sig, data)


def kernel(function):
    """Compile `function` when it is first called with arguments of a type."""
    dispatcher = numba.njit(nogil=True, fastmath=FAST, error_model="numpy")(function)
    with contextlib.suppress(OSError):
        dispatcher._cache = KernelCache(function)  # type: ignore[attr-defined]
    return dispatcher


def helper(function):
    """Compile `function` as a part of the kernels that call it."""
    return numba.njit(nogil=True, fastmath=FAST, error_model="numpy")(function)
