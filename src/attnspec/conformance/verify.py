"""Check a formula on a backend: golden vectors and identities for the reference, error bounds against the reference for a twin."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.cases import cases
from attnspec.conformance.identities import Identity, discrepancy, identities
from attnspec.dispatch import BACKENDS, as_numpy, record_of, select
from attnspec.golden import golden_cases
from attnspec.reference.formula import Formula
from attnspec.reference.inputs import parse_shape

SEEDS = 5


@dataclass(frozen=True)
class Check:
    """One thing checked: its error and the bound on it, or why it was not judged."""

    formula: str
    kind: str                         # golden, identity or bound
    case: str
    error: float = math.nan
    bound: float = math.nan
    skipped: str | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        if self.skipped is not None:
            return math.nan
        return 0.0 if self.error == 0 else self.error / self.bound if self.bound > 0 else math.inf

    @property
    def passed(self) -> bool:
        """Whether it was judged and right; a NaN ratio is wrong."""
        return self.skipped is None and self.ratio <= 1


def verify(name: str, backend: str = "reference") -> Iterator[Check]:
    """Every check of the formula `name` on a backend. Raises ValueError where the backend or the formula does not exist."""
    selection = select(name, backend)
    if selection.backend == "reference":
        yield from verify_reference(name)
    else:
        yield from verify_twin(record_of(name), selection.function)


def verify_reference(name: str) -> Iterator[Check]:
    function = BACKENDS["reference"].function(name)
    for case in golden_cases(name):
        yield guarded(Check(name, "golden", case.name), functools.partial(case.outcome, function))
    for one in identities(name):
        yield guarded(Check(name, "identity", one.text), functools.partial(worst_discrepancy, one))


def worst_discrepancy(one: Identity) -> tuple[float, float]:
    """(error, bound) of the identity on the worst of a few draws."""
    return max((discrepancy(one, seed) for seed in range(SEEDS)), key=lambda pair: pair[0] / pair[1])


def guarded(check: Check, outcome: Callable[[], tuple[float, float]]) -> Check:
    """The check with its outcome; failed, with the reason, where the function under test raises."""
    try:
        error, limit = outcome()
    except Exception as problem:
        return replace(check, error=math.inf, bound=0.0, note=f"{type(problem).__name__}: {problem}")
    return replace(check, error=error, bound=limit)


def verify_twin(record: Formula, twin: Any) -> Iterator[Check]:
    """The twin on the standard cases in each of its dtypes, against the reference fed with the same rounded inputs."""
    for case in cases(record):
        for dtype in twin.limits.dtypes:
            label = f"{case.name}-{dtype}"
            lacking = [option for option in {**case.options, **case.arrays} if option in twin.limits.lacks]
            if lacking:
                yield Check(record.name, "bound", label, skipped=f"lacks {lacking[0]}: {twin.limits.lacks[lacking[0]]}")
                continue
            rounded = {key: as_dtype(value, dtype) if parse_shape(record.shapes[key]).kind == "real" else value
                       for key, value in case.arrays.items()}
            exact = {key: np.asarray(value, dtype=np.float64) if value.dtype.kind in "fV" else value for key, value in rounded.items()}
            try:
                limits = bound(record, exact, case.options, dtype)
            except NoBound as reason:
                yield Check(record.name, "bound", label, skipped=str(reason))
                continue
            try:
                want = record.function(**exact, **case.options)
            except ValueError as reason:
                yield Check(record.name, "bound", label, skipped=f"the reference refuses: {reason}")
                continue
            call = functools.partial(twin, **rounded, **case.options)
            yield guarded(Check(record.name, "bound", label), functools.partial(judged, call, want, limits))


def as_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    import ml_dtypes

    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def as_float64(result: Any) -> np.ndarray:
    """A result of any backend as NumPy's float64."""
    return as_numpy(result).astype(np.float64)


def judged(call: Callable[[], Any], want: Any, limits: dict[str, np.ndarray]) -> tuple[float, float]:
    """(error, bound) of the element, among all outputs of the call, whose error is largest in units of its bound."""
    got = call()
    worst, worst_ratio = (0.0, 1.0), 0.0
    (only, *_) = limits                                  # the name of a result that is no tuple
    outputs, results = (x._asdict() if hasattr(x, "_asdict") else {only: x} for x in (want, got))
    for key, limit in limits.items():
        ours, theirs = np.asarray(outputs[key]), as_float64(results[key])
        if ours.shape != theirs.shape:
            raise ValueError(f"{key}: expected shape {ours.shape}, got {theirs.shape}")
        error, limit = np.abs(theirs - ours), np.broadcast_to(limit, ours.shape)
        ratio = np.where(error == 0, 0.0, error / np.where(limit == 0, 1.0, limit))
        ratio = np.where(np.isnan(ratio) | ((limit == 0) & (error > 0)), np.inf, ratio)
        if ratio.size and ratio.max() >= worst_ratio:
            at = np.unravel_index(np.argmax(ratio), ratio.shape)
            worst_ratio = float(ratio[at])
            worst = (float(np.nan_to_num(error[at], nan=np.inf)), float(limit[at]))
    return worst
