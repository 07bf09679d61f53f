"""Which backends exist here, and which of them computes a formula.

A backend is a package that exports functions under the reference's names. `numba_kernels` and `mlx_backend` are twins: each function of
theirs declares its limits (reference/formula.py, `twin`). Nothing is imported before it is asked for.
"""

import difflib
import importlib
import importlib.util
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspec.reference.formula import Formula
from attnspec.reference.inputs import parse_shape, shown

LAYOUTS = ("bhtd", "bthd", "thd")
RANK = {"bthd": 4, "thd": 3}


@dataclass(frozen=True)
class Backend:
    """One place to compute: its package here, the library it needs, and how to get that library."""

    name: str
    package: str
    needs: str
    how: str

    def missing(self) -> str | None:
        """Why this backend cannot be used here, or None if it can."""
        if importlib.util.find_spec(self.package) is None:
            return f"this version of attnspec has no {self.name} functions"
        if importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed ({self.how})"
        return None

    def has(self, name: str) -> bool:
        """Whether this backend has a function of that name; its library is not imported to find out."""
        package = importlib.import_module(self.package)
        return name in getattr(package, "__all__", vars(package))

    def function(self, name: str) -> Callable[..., Any] | None:
        """This backend's function of that name, or None."""
        return getattr(importlib.import_module(self.package), name, None)


BACKENDS = {
    "mlx": Backend("mlx", "attnspec.mlx_backend", "mlx", "pip install mlx on Apple silicon, pip install 'mlx[cpu]' on Linux"),
    "numba": Backend("numba", "attnspec.numba_kernels", "numba", "pip install numba"),
    "reference": Backend("reference", "attnspec.reference", "numpy", "pip install numpy"),
}


@dataclass(frozen=True)
class Selection:
    """The backend that computes a formula, and why: one line for every backend that was looked at."""

    backend: str
    function: Callable[..., Any]
    why: tuple[str, ...]


def formulas(family: str | None = None) -> dict[str, Formula]:
    """The records of all formulas by name, family by family, or of one family's. Raises ValueError for a family that does not exist."""
    from attnspec.reference import FAMILIES, RECORDS

    if family is not None and family not in FAMILIES:
        raise ValueError(f"family: expected one of {', '.join(FAMILIES)}, got {family!r}{nearest(family, FAMILIES)}")
    wanted = list(FAMILIES) if family is None else [family]
    return {name: record for one in wanted for name, record in sorted(RECORDS.items()) if record.family == one}


def record_of(name: str) -> Formula:
    """The record of the formula `name`. Raises ValueError with the nearest name where there is none."""
    records = formulas()
    if not isinstance(name, str) or name not in records:
        raise ValueError(f"formula: no {shown(name)} here{nearest(str(name), records)}")
    return records[name]


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at the names that `name` may have stood for: those that it begins, else the most similar one."""
    names = list(names)
    close = [one for one in names if name and one.lower().startswith(name.lower())]
    close = close or difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close[:6]))}?" if close else ""


def backends() -> dict[str, str | None]:
    """Every backend and why it cannot be used here; None if it can.

    >>> attnspec.backends()["reference"] is None
    True
    """
    return {name: backend.missing() for name, backend in BACKENDS.items()}


def on_apple_gpu() -> bool:
    """Whether MLX is installed on Apple silicon. A Mac's MLX always has its GPU; elsewhere MLX runs on the CPU."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def objection(backend: Backend, record: Formula, options: dict[str, Any], dtype: str | None) -> str | None:
    """Why this backend cannot answer this call, or None if it can."""
    reason = backend.missing()
    if reason is not None:
        return reason
    function = backend.function(record.name)
    if function is None:
        return f"it has no {record.name}"
    limits = getattr(function, "limits", None)
    if limits is None:
        return None
    if dtype is not None and dtype not in limits.dtypes:
        return f"its {record.name} takes {', '.join(limits.dtypes)}, not {dtype}"
    for lacking, reason in limits.lacks.items():
        name, _, only = lacking.partition("=")
        value: Any = options.get(name)
        if only:
            if isinstance(value, str) and value == only:
                return f"its {record.name} lacks {name} {only!r}: {reason}"
            continue
        default = record.parameters[name].default
        if name in options and not (value is default or (np.ndim(value) == 0 and value == default)):
            return f"its {record.name} lacks {name}: {reason}"
    return None


def select(name: str, backend: str = "auto", *, options: dict[str, Any] | None = None, dtype: str | None = None) -> Selection:
    """Choose the backend for a formula, and say why.

    backend: "auto" takes MLX on an Apple GPU, else Numba, else the reference: the first that is installed and has the formula with these
    options and this dtype. A named backend is taken or refused, never replaced.
    Raises ValueError for an unknown formula or backend, and for a named backend that is missing, lacks the formula, an option or the
    dtype; the message lists the backends that could answer.
    """
    record = record_of(name)
    options = options or {}
    if not isinstance(backend, str) or (backend != "auto" and backend not in BACKENDS):
        raise ValueError(f"backend: expected auto, {', '.join(BACKENDS)}, got {shown(backend)}")
    objections = {b.name: objection(b, record, options, dtype) for b in BACKENDS.values()}
    able = [b for b, reason in objections.items() if reason is None]
    if backend != "auto" and objections[backend] is not None:
        raise ValueError(f"backend: {backend} cannot compute {name}: {objections[backend]}; available: {', '.join(able)}")
    why = []
    for candidate, reason in objections.items():
        if backend not in ("auto", candidate):
            continue
        if reason is None and candidate == "mlx" and backend == "auto" and not on_apple_gpu():
            reason = "no Apple GPU here; ask for backend='mlx' to run it on the CPU"
        if reason is None:
            why.append(f"{candidate}: taken" + (", as asked" if backend != "auto" else ""))
            function = BACKENDS[candidate].function(name)
            assert function is not None
            return Selection(candidate, function, tuple(why))
        why.append(f"{candidate}: passed over, {reason}")
    raise AssertionError(f"the reference lacks {name}")      # it is where the records come from


def attend(name: str, *arrays: Any, backend: str = "auto", layout: str = "bhtd", **options: Any) -> Any:
    """Compute a formula: `attend("cog_attention", q, k, v, causal=True)`.

    name: a formula of `attnspec.formulas()`.  arrays: its array parameters, in the order of its record; they may also be named.
    backend: "auto", or a backend of `attnspec.backends()`; `attnspec.select(name, backend)` says what is taken and why.
    layout: how queries, keys, values and outputs are laid out. "bhtd" (..., heads, tokens, features) is the reference's own; "bthd" is
    (..., tokens, heads, features) and "thd" (tokens, heads, features). Masks, biases and weights always have heads before tokens.
    options: the formula's other parameters.
    Raises ValueError and TypeError as the formula does, and where the formula, backend or layout does not exist.
    """
    record = record_of(name)
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected {', '.join(LAYOUTS)}, got {layout!r}")
    dtype = str(getattr(arrays[0], "dtype", "")).rpartition(".")[2] if arrays else None
    selection = select(name, backend, options=options, dtype=dtype or None)
    if layout == "bhtd":
        return selection.function(*arrays, **options)

    if headed(record).isdisjoint(record.arrays):
        raise ValueError(f"layout: {name} takes no arrays with heads, so only 'bhtd' fits, got {layout!r}")
    named = dict(zip(record.parameters, arrays, strict=False))
    transposed = {
        key: swap_heads(key, value, layout) if key in headed(record) else value for key, value in {**named, **options}.items()
    }
    result = selection.function(*[transposed[key] for key in named], **{key: transposed[key] for key in options})

    def laid_out(key: str, value: Any) -> Any:
        """An output in the caller's layout; one whose heads were joined by a projection has an axis less, and stays."""
        has_heads = key in headed(record) and value is not None and value.ndim == RANK[layout]
        return swap_heads(key, value, layout) if has_heads else value

    if not isinstance(result, tuple):
        return laid_out(record.outputs[0], result)
    return type(result)(*(laid_out(key, value) for key, value in result._asdict().items()))  # type: ignore[attr-defined]


def as_numpy(result: Any) -> np.ndarray:
    """A result of any backend as a NumPy array of its dtype; it is computed if it was not yet."""
    if str(getattr(result, "dtype", "")) != "mlx.core.bfloat16":
        return np.asarray(result)
    import ml_dtypes
    import mlx.core as mx

    return np.asarray(result.astype(mx.float32)).astype(ml_dtypes.bfloat16)      # NumPy cannot read MLX's own


def headed(record: Formula) -> set[str]:
    """The arrays of a formula that have a head axis before tokens and features, and follow the layout.

    A record that names heads says which; elsewhere it is every (..., tokens, features) but those of the model's width c, which is not
    split into heads.
    """
    shapes = {name: parse_shape(text) for name, text in record.shapes.items()}
    shapes = {name: shape for name, shape in shapes.items() if shape.leading and shape.kind == "real"}
    tokens = [dim for dim in record.dimensions if dim == "n" or dim.rstrip("0123456789") == "m"]

    def ends_in_features(names: tuple[str, ...]) -> bool:
        return len(names) == 2 and names[0] in tokens and names[1] not in (*tokens, "c")

    named = {name for name, shape in shapes.items() if shape.names[:1] in (("h",), ("hk",)) and ends_in_features(shape.names[1:])}
    return named or {name for name, shape in shapes.items() if ends_in_features(shape.names)}


def swap_heads(name: str, array: Any, layout: str) -> Any:
    """`array` with its token and head axes exchanged."""
    shape = getattr(array, "shape", None)
    if shape is None:
        array = np.asarray(array)
        shape = array.shape
    if len(shape) != RANK[layout]:
        raise ValueError(f"{name}: layout {layout} expects {RANK[layout]} axes, got {tuple(shape)}")
    return array.swapaxes(-3, -2)
