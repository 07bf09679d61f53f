"""Metal kernels or graphs: which of the two a call takes, and how a kernel is launched.

    with metal.path("metal"):          # or "graph"; "auto" by default, or what the environment variable ATTNSPEC_MLX_PATH says
        scaled_dot_product_attention(q, k, v)
    metal.taken()                      # {"softmax tiles": "metal"}

"auto" takes a kernel where there is a Metal GPU, the kernel can do the call and it pays. "metal" takes it or raises, also where a function
has none.
The first time a process uses a kernel in a dtype, it is compared with the graph on a small case; one that disagrees is not used again,
and a warning names it.
"""

import contextlib
import contextvars
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

import mlx.core as mx

from attnspec.reference.inputs import one_of

PATHS = ("auto", "graph", "metal")
_path: str | None = None
_make: Callable[..., Any] | None = None                    # what stands in for mx.fast.metal_kernel, an emulator for one
_taken: dict[str, str] = {}
_here: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("kernels taken in this call", default=None)
_trusted: dict[tuple[Any, ...], bool] = {}


@contextlib.contextmanager
def path(name: str) -> Iterator[None]:
    """Take this path inside a with block, in the whole process. Raises ValueError for any but "auto", "graph" and "metal"."""
    global _path
    before, _path = _path, one_of("name", name, PATHS)
    try:
        yield
    finally:
        _path = before


@contextlib.contextmanager
def made_by(metal_kernel: Callable[..., Any]) -> Iterator[None]:
    """Launch kernels by a stand-in for mx.fast.metal_kernel inside a with block: how they run where there is no GPU."""
    global _make
    before, _make = _make, metal_kernel
    try:
        yield
    finally:
        _make = before


@contextlib.contextmanager
def call_of(name: str) -> Iterator[None]:
    """A call of the twin `name`. Raises ValueError at its end where the path is "metal" and no kernel was taken."""
    token = _here.set([])
    try:
        yield
        if wanted() == "metal" and not _here.get():
            raise ValueError(f"path: 'metal' was asked for, but {name} has no kernel for this call; 'auto' and 'graph' take its graph")
    finally:
        _here.reset(token)


def taken() -> dict[str, str]:
    """For each kernel that was thought of: "metal", or "graph" and why."""
    return dict(_taken)


def wanted() -> str:
    return _path or one_of("ATTNSPEC_MLX_PATH", os.environ.get("ATTNSPEC_MLX_PATH", "auto"), PATHS)


def objection() -> str | None:
    """Why no kernel can run here, or None."""
    return None if _make is not None or mx.metal.is_available() else "there is no Metal GPU here"


class Kernel(NamedTuple):
    """A kernel: the text of its body is in a .metal file beside the graph twin."""

    name: str
    package: str
    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def launch(
        self, inputs: Sequence[mx.array], template: dict[str, Any], grid: tuple[int, int, int], threadgroup: tuple[int, int, int],
        results: Sequence[tuple[tuple[int, ...], mx.Dtype]], fill: float | None = None,
    ) -> list[mx.array]:
        """The results, of these shapes and dtypes. grid: all threads.  fill: what stands in the results before."""
        source = resources.files(self.package).joinpath(self.file).read_text(encoding="utf-8")
        make = _make or mx.fast.metal_kernel
        kernel = make(name="attnspec_" + self.name.replace(" ", "_"), input_names=list(self.inputs), output_names=list(self.outputs),
                      source=source)
        shapes, dtypes = zip(*results, strict=True)
        return kernel(inputs=list(inputs), template=list(template.items()), grid=grid, threadgroup=threadgroup,
                      output_shapes=list(shapes), output_dtypes=list(dtypes), init_value=fill)

    def chosen(self, reason: str | None, pays: bool, key: tuple[Any, ...] = (), check: Callable[[], bool] | None = None) -> bool:
        """Whether to take the kernel for a call that it cannot do for a `reason`, or can (None) and which pays or does not.

        check: compares it with the graph on a small case, once for each key.
        Raises ValueError where the path is "metal" and the kernel cannot be taken.
        """
        asked = wanted()
        reason = reason or objection()
        if reason is None and asked != "graph" and (pays or asked == "metal") and not self.trusted(key, check):
            reason = "it failed or disagreed with the graph here"
        if asked == "metal" and reason is not None:
            raise ValueError(f"path: 'metal' cannot be taken by the kernel {self.name}: {reason}")
        why = "it was asked for" if asked == "graph" else reason or (None if pays or asked == "metal" else "it does not pay for so little")
        _taken[self.name] = "metal" if why is None else f"graph: {why}"
        here = _here.get()
        if why is None and here is not None:
            here.append(self.name)
        return why is None

    def trusted(self, key: tuple[Any, ...], check: Callable[[], bool] | None) -> bool:
        key = (self.name, *key)
        if check is not None and key not in _trusted:
            _trusted[key] = True                           # the check itself takes the kernel
            try:
                _trusted[key], problem = check(), "disagrees with the graph"
            except RuntimeError as error:                  # it does not compile, for one
                _trusted[key], problem = False, f"failed ({error})"
            if not _trusted[key]:
                warnings.warn(f"attnspec: the Metal kernel {self.name} {key[1:]} {problem} on this machine and is not used",
                              RuntimeWarning, stacklevel=2)
        return _trusted.get(key, True)
