"""Golden vectors of the higher_order family."""

from typing import Any

from attnspec.golden import GoldenCase
from attnspec.golden.pack import packs

REPOSITORY = "lucidrains/simplicial-attention @2c507855"
ARRAYS = ("q", "k1", "k2", "v1", "v2", "k3", "v3")
PRESCALED = "query multiplied by 1/sqrt(d), which turns the code's scale 1/sqrt(d) into 1/d"


def case_of(z, default_scale):
    """The arrays of a file; its scale goes with the call only where it is not the formula's default, so that the default is tested."""
    scale = float(z["scale"])
    options: dict[str, Any] = {"causal": True} if z["causal"] else {}
    if abs(scale - default_scale(z["q"].shape[-1])) > 1e-15:
        options["scale"] = scale
    return GoldenCase({name: z[name] for name in ARRAYS if name in z.files}, {"out": z["out"]}, options)


@packs("tensor_attention__lucidrains_simplicial_attention__*", formula="tensor_attention",
       source=f"{REPOSITORY}, naive_two_simplicial_attend, in float64", edits=PRESCALED)
@packs("tensor_attention__lucidrains_simplicial_attention__*", formula="tensor_attention_blocked",
       source=f"{REPOSITORY}, naive_two_simplicial_attend, in float64", edits=PRESCALED)
@packs("tensor_attention__lucidrains_nth_order__*", formula="tensor_attention",
       source=f"{REPOSITORY}, nth_order_attend with three sets of keys, in float64", edits=PRESCALED)
def _(z, case):
    return case_of(z, lambda d: 1 / d)


@packs("two_simplicial_attention__lucidrains_simplicial_attention__*", formula="two_simplicial_attention",
       source=f"{REPOSITORY}, naive_two_simplicial_attend, in float64")
def _(z, case):
    return case_of(z, lambda d: d**-0.5)
