"""Golden vectors: outputs of the authors' own code or of an independent library, one file per formula (see PROVENANCE.md).

A file holds, for every case, arrays named case/args/NAME and case/options/NAME (what to call the formula with), case/expect/NAME
(what must come back, by field; "out" for a plain array), case/only/NAME (bool, where only part of it is to be compared) and case/tol.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

FOLDER = resources.files("attnspec.golden")


@dataclass
class GoldenCase:
    """One call of a formula with what an independent implementation returned for it.

    tol bounds |got - expect| relative to the larger of 1 and |expect|: 1e-12, 1e-6 where the source computes in float32, and in
    between where the source's own arithmetic is no better (its row in PROVENANCE.md says why).
    """

    args: dict[str, Any]
    expect: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    only: dict[str, Any] = field(default_factory=dict)
    tol: float = 1e-12
    formula: str = ""
    name: str = ""

    def outcome(self, function) -> tuple[float, float]:
        """(largest error of `function` on this case, tolerance); an infinite error where a shape differs or a field is missing."""
        result = function(**self.args, **self.options)
        fields = result._asdict() if hasattr(result, "_asdict") else {"out": result}
        worst = 0.0
        for key, want in self.expect.items():
            got = fields.get(key)
            if got is None or np.shape(got) != np.shape(want):
                return np.inf, self.tol
            chosen = np.asarray(self.only.get(key, True))
            with np.errstate(invalid="ignore"):
                error = np.abs(got - want) / np.maximum(1.0, np.abs(want))
            error = np.where(np.asarray(got) == want, 0.0, error)        # equal infinities
            error = np.where(np.isnan(error), np.inf, error)
            worst = max(worst, float(np.max(np.where(chosen, error, 0.0), initial=0.0)))
        return worst, self.tol


def save(path, cases: Iterable[GoldenCase]) -> None:
    """Write cases of one formula to a compressed .npz."""
    arrays: dict[str, Any] = {}
    for case in cases:
        for group in ("args", "options", "expect", "only"):
            for key, value in getattr(case, group).items():
                arrays[f"{case.name}/{group}/{key}"] = value
        arrays[f"{case.name}/tol"] = case.tol
    np.savez_compressed(path, allow_pickle=False, **arrays)


def golden_cases(formula: str) -> list[GoldenCase]:
    """The golden cases of a formula; an empty list where there are none."""
    path = FOLDER / f"{formula}.npz"
    if not path.is_file():
        return []
    cases: dict[str, GoldenCase] = {}
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        for key in stored.files:
            name, group, *rest = key.split("/")
            case = cases.setdefault(name, GoldenCase({}, {}, formula=formula, name=name))
            value = stored[key]
            if group == "tol":
                case.tol = float(value)
            elif group == "options":
                case.options[rest[0]] = value.item() if value.ndim == 0 else tuple(value.tolist())
            else:
                getattr(case, group)[rest[0]] = value
    return list(cases.values())
