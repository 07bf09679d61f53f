"""What must hold whatever the numbers are: the identities of every formula, as checks that can be run.

    @identity("sum_j |A_ij| = 1", "cog_attention")
    def _(x):
        A = attnspec.cog_attention(*x.qkv(), return_weights=True).weights
        return abs(A).sum(-1), np.ones(x.n)

A check draws its inputs from `x` and returns what it got and what the identity says, or (got, wanted, bound) where the identity itself is
an approximation with a known error. An inequality got <= limit is the identity got = minimum(got, limit).
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attnspec.dispatch import record_of
from attnspec.reference import FAMILIES


@dataclass
class Drawn:
    """Sizes and random numbers that an identity is tried on."""

    rng: np.random.Generator
    n: int = 5          # queries
    m: int = 7          # keys
    d: int = 4          # features of queries and keys
    e: int = 3          # features of values
    h: int = 2          # heads

    @classmethod
    def from_seed(cls, seed: int) -> "Drawn":
        rng = np.random.default_rng(seed)
        n, m, d, e, h = (int(size) for size in rng.integers(1, 9, 5))
        return cls(rng, n, m, d, e, h)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape)

    def qkv(self, *lead: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Standard normal q (*lead, n, d), k (*lead, m, d), v (*lead, m, e)."""
        return self.normal(*lead, self.n, self.d), self.normal(*lead, self.m, self.d), self.normal(*lead, self.m, self.e)

    def arrays(self, name: str, **sizes: int) -> dict[str, np.ndarray]:
        """What the record of the formula `name` draws, at these sizes where it has such dimensions."""
        record = record_of(name)
        own: dict[str, int] = {dim: getattr(self, dim) for dim in ("n", "m", "d", "e") if dim in record.dimensions}
        return record.draw({**own, **sizes}, self.rng)


class Identity(NamedTuple):
    text: str
    formulas: tuple[str, ...]
    check: Callable[[Drawn], tuple[Any, ...]]


IDENTITIES: list[Identity] = []


def identity(text: str, *formulas: str):
    """Register a check as an identity of the formulas named."""

    def register(check):
        IDENTITIES.append(Identity(text, formulas, check))
        return check

    return register


def identities(name: str | None = None) -> Iterable[Identity]:
    """The identities of the formula `name`, or all of them."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
    return [one for one in IDENTITIES if name is None or name in one.formulas]


def directional(x: Drawn, function, gradients: dict[str, Any], arrays: dict[str, np.ndarray], do: np.ndarray) -> tuple[Any, Any]:
    """sum over arrays of <gradient, direction>, and the derivative of sum(do * function(**arrays)) along these random directions.

    gradients: what a backward function gave, by the name of the array; arrays without one stay where they are. The derivative is by
    complex step, exact to rounding: the functions are analytic wherever they have a derivative.
    """
    directions = {name: x.normal(*arrays[name].shape) for name in gradients}
    moved = {name: array + 1e-30j * directions[name] if name in directions else array for name, array in arrays.items()}
    got = sum(np.sum(gradients[name] * directions[name]) for name in gradients)
    return got, np.sum(do * function(**moved)).imag / 1e-30


def discrepancy(one: Identity, seed: int) -> tuple[float, float]:
    """Largest difference between what an identity got and says on inputs drawn from `seed`, and the largest it may be.

    The bound is 1e-11 of the larger of 1 and the wanted values, float64 rounding through a few hundred operations, plus the identity's own.
    """
    got, want, *bound = one.check(Drawn.from_seed(seed))
    got, want = np.asarray(got), np.asarray(want)
    np.broadcast_shapes(got.shape, want.shape)
    if got.size == 0 and want.size == 0:
        return 0.0, 1e-11
    same = (got == want) | (np.isnan(got) & np.isnan(want))               # infinities and NaN agree exactly or not at all
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - want))
    error = np.where(np.isnan(error), np.inf, error)
    size = np.abs(np.where(np.isfinite(want), want, 0.0)).max(initial=1.0)
    return float(error.max()), 1e-11 * float(size) + float(bound[0] if bound else 0.0)
