"""The record that every formula carries, and the decorator that attaches it.

    @formula(family="signed", shapes={"q": "... n d", "k": "... m d", "v": "... m e", "out": "... n e"}, ...)
    def cog_attention(q, k, v, *, scale=None, ...):

`cog_attention.record` is then the single source for `attnspec list` and `show`, the tables in the docs, the conformance cases and the
command line. Calling the function first checks and converts its arrays by the record's shapes (inputs.py), so that the body starts with
the mathematics.

The language of shapes. A shape is a list of dimension names: "h d" is an array with two axes. "..." stands for any leading axes, which
broadcast against those of the other arrays. "#n" is an axis of size n or 1, and it may be absent altogether (as in NumPy broadcasting).
A first word "bool", "int", "bits" (0 or 1) or "spins" (-1 or +1) says what the entries are; without one they are real numbers.
Names that are no parameter of the function are its outputs, in order.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnspec.reference import inputs

COMMON_SIZES: dict[str, int | str] = {"n": 12, "m": "n", "d": 8, "e": "d"}

RECORDS: dict[str, "Formula"] = {}


@dataclass(frozen=True)
class Formula:
    """What is known about one formula. `shapes`, `sizes` and `draw` speak the language described in formula.py."""

    name: str
    family: str
    shapes: Mapping[str, str]
    equation: str
    latex: str
    source: str
    status: str                                   # verified-code, verified-paper, secondary, memory-only or derived
    function: Callable[..., Any]
    bound: str | None = None                      # which error bound judges a twin (conformance/bounds); None: none derived yet
    kinks: str | None = None                      # where no derivative exists
    discrete: bool = False                        # integers or bits in or out: no derivative anywhere
    grouped: tuple[str, ...] = ()                 # arrays whose heads `enable_gqa` shares among groups of query heads
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    workspace: str | None = None                  # shape of the largest array made on the way, for the estimate of memory
    draw_arrays: Callable[..., dict[str, np.ndarray]] | None = None

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Parameters that are arrays with a recorded shape."""
        return tuple(name for name in self.parameters if name in self.shapes)

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(name for name in self.arrays if self.parameters[name].default is inspect.Parameter.empty)

    @property
    def options(self) -> dict[str, Any]:
        """Parameters without a recorded shape, with their defaults."""
        return {name: p.default for name, p in self.parameters.items() if name not in self.shapes}

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.shapes if name not in self.parameters)

    @property
    def page(self) -> str:
        """The formula's page of the book: the docstring of the file it stands in."""
        return inspect.getdoc(inspect.getmodule(self.function)) or ""

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names that `draw` takes sizes for, besides b (batch) and h (heads) where leading axes are free."""
        names = [name for shape in self.shapes.values() for name in inputs.parse_shape(shape).names]
        return tuple(dict.fromkeys(names))

    def is_required(self, dim: str) -> bool:
        """Whether a required array or an output has this dimension."""
        return any(dim in inputs.parse_shape(self.shapes[name]).names for name in (*self.required, *self.outputs))

    def complete_sizes(self, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        """`sizes` with a value for every dimension: n=12, m=n, d=8, e=d, others 4 unless the record or the caller says otherwise."""
        given = dict(sizes or {})
        leading = ("b", "h", "hk") if any("..." in shape.split() for shape in self.shapes.values()) else ()
        known = dict.fromkeys(self.dimensions + leading)
        for name, size in given.items():
            if name not in known:
                raise ValueError(f"shape: {self.name} has no dimension {name!r}; it has {', '.join(known)}")
            inputs.whole(f"shape {name}", size, least=0)
        defaults = {**COMMON_SIZES, **self.sizes}
        for name in self.dimensions:
            if name == "h" and not self.is_required(name):             # only an optional array speaks of heads: then so must the caller
                continue
            value: int | str = given.get(name, defaults.get(name, 4))
            while isinstance(value, str):
                value = given.get(value, defaults.get(value, 4))
            given[name] = value
        return given

    def draw(self, sizes: Mapping[str, int] | None = None, rng: np.random.Generator | int = 0) -> dict[str, np.ndarray]:
        """Random arrays for the required parameters: standard normal unless the record draws otherwise.

        sizes: by dimension name; b and h give leading axes to the shapes that start with "...", hk the key heads of grouped arrays.
        """
        full = self.complete_sizes(sizes)
        rng = np.random.default_rng(rng)
        if self.draw_arrays is not None:
            return self.draw_arrays(full, rng)
        return {name: self.draw_one(name, full, rng) for name in self.required}

    def size_of(self, name: str, full: Mapping[str, int]) -> tuple[int, ...]:
        """The recorded shape of one array at the sizes `full`, with the leading axes that these give it."""
        shape = inputs.parse_shape(self.shapes[name])
        has_heads = any("h" in inputs.parse_shape(s).names and "..." in s.split() for s in self.shapes.values())
        lead: tuple[int, ...] = ()
        if shape.leading:
            lead = (full["b"],) if "b" in full else ()
            heads = full.get("hk", full.get("h")) if name in self.grouped else full.get("h")
            if heads is not None and not has_heads:
                lead += (heads,)
        return lead + tuple(full[dim] for dim in shape.names)

    def draw_one(self, name: str, full: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
        """One array of the recorded shape, of sizes `full` (see `complete_sizes`)."""
        shape, size = inputs.parse_shape(self.shapes[name]), self.size_of(name, full)
        if shape.kind == "bool":
            return rng.random(size) < 0.75
        if shape.kind == "bits":
            return rng.integers(0, 2, size)
        if shape.kind == "spins":
            return 2 * rng.integers(0, 2, size) - 1
        if shape.kind == "int":
            return rng.integers(0, 10, size)
        return rng.standard_normal(size)


def quietly(function):
    """`function` without warnings: what overflows is inf in its result, what is undefined NaN.

    Most of that stands where nobody looks, behind a mask, and never arrives.
    """

    @functools.wraps(function)
    def quiet(*args, **kwargs):
        with np.errstate(over="ignore", invalid="ignore"):
            return function(*args, **kwargs)

    return quiet


def checked_arguments(record: Formula, signature: inspect.Signature, args, kwargs, convert=inputs.as_array) -> inspect.BoundArguments:
    """The arguments of a call, its flags checked and its arrays checked and converted by the record's shapes.

    Raises TypeError where the call does not fit the signature, and as `inputs.checked_arrays` does.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(inputs.explain_signature(record, str(error), kwargs)) from None
    for name, parameter in signature.parameters.items():
        if isinstance(parameter.default, bool) and name != "causal" and name in bound.arguments:
            inputs.one_of(name, bound.arguments[name], (True, False))
    bound.arguments.update(inputs.checked_arrays(record, bound.arguments, convert))
    return bound


def formula(*, family: str, shapes: Mapping[str, str], equation: str, latex: str, source: str, status: str = "verified-code", **facts: Any):
    """Attach a record to a reference function (see `Formula`) and check and convert its arrays before each call.

    `draw=` may be given as a function (sizes, rng) -> {parameter: array}.
    """

    def attach(function):
        @functools.wraps(function)
        def checked(*args, **kwargs):
            bound = checked_arguments(record, signature, args, kwargs)
            return quietly(function)(*bound.args, **bound.kwargs)

        signature = inspect.signature(function)
        record = Formula(
            name=function.__name__, family=family, shapes=dict(shapes), equation=equation, latex=latex, source=source, status=status,
            function=checked, draw_arrays=facts.pop("draw", None), **facts,
        )
        checked.record = record  # type: ignore[attr-defined]
        RECORDS[record.name] = record
        return checked

    return attach


@dataclass(frozen=True)
class Limits:
    """What a twin can do: the dtypes of its inputs, and the options it lacks, each with the reason."""

    dtypes: tuple[str, ...]
    lacks: Mapping[str, str] = field(default_factory=dict)


def twin(*, dtypes: tuple[str, ...], lacks: Mapping[str, str] | None = None):
    """Declare what a twin supports. A twin exports the name, parameters and defaults of its reference function.

    lacks: {option: reason}; a call that sets such an option away from its default goes to another backend or is refused. "option=value"
    lacks that value only.
    """

    def attach(function):
        function.limits = Limits(tuple(dtypes), dict(lacks or {}))
        return function

    return attach
