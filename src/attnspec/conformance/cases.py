"""Standard calls of a formula: inputs that show mistakes, at awkward sizes, with each option in turn."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from attnspec.reference.formula import Formula

SIZES = tuple(dict(zip("nmde", sizes, strict=True)) for sizes in ((1, 1, 1, 1), (2, 3, 8, 3), (7, 5, 4, 4), (63, 65, 16, 7)))
KINDS = ("normal", "peaky", "offset")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "scale": (0.3,), "causal": ("bottom-right", "top-left"), "softcap": (2.0,), "window": ((2, 1),), "enable_gqa": (True,),
    "n_iters": (1, 4), "eps": (0.5,), "tau": (2.0,), "cost": ("squared_distance",), "output_scaling": ("cols", "none"),
    "gradient": ("detached",), "key_marginal": ("all",), "rho": (0.5,),
}
DRAWN = ("mask", "key_mask", "bias", "sink")


class Case(NamedTuple):
    """One call, with a name that says how it was made."""

    name: str
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]


def cases(record: Formula, seed: int = 0) -> Iterator[Case]:
    """Calls of the formula: normal, peaky (logits x16) and offset (values + 30) inputs at every size, then each option on normal ones."""
    for wanted in SIZES:
        sizes = own_sizes(record, wanted)
        for kind in KINDS:
            arrays = drawn(record, sizes, kind, seed)
            yield Case(f"{kind}{label(sizes)}", arrays, {})
    sizes = own_sizes(record, SIZES[2])
    rng = np.random.default_rng(seed + 1)
    for option in record.parameters:
        for value in OPTIONS.get(option, ()) if option not in record.shapes else ():
            grouped = {"h": 4, "hk": 2} if option == "enable_gqa" and "hk" not in record.dimensions else {}
            options = {option: value}
            if option == "n_iters" and "tol" in record.options:            # so many, and no fewer
                options["tol"] = None
            yield Case(f"{option}={value}{label(sizes)}", record.draw({**sizes, **grouped}, seed), options)
        if option in DRAWN and option not in record.required:
            lead = {"h": 2} if option == "sink" else {}
            full = {**record.complete_sizes({**sizes, **lead}), **lead}
            arrays = record.draw({**sizes, **lead}, seed)
            yield Case(f"{option}{label(sizes)}", {**arrays, option: record.draw_one(option, full, rng)}, {})


def own_sizes(record: Formula, sizes: dict[str, int]) -> dict[str, int]:
    return {dim: size for dim, size in sizes.items() if dim in record.dimensions}


def label(sizes: dict[str, int]) -> str:
    return "-" + "".join(f"{dim}{size}" for dim, size in sizes.items()) if sizes else ""


def drawn(record: Formula, sizes: dict[str, int], kind: str, seed: int) -> dict[str, np.ndarray]:
    arrays = record.draw(sizes, seed)
    for name, array in arrays.items():
        if kind == "peaky" and name in ("q", "k"):
            arrays[name] = 4 * array
        if kind == "offset" and name in ("v", "v1"):
            arrays[name] = array + 30
    return arrays
