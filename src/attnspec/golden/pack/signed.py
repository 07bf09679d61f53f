"""Golden vectors of the signed family."""

from attnspec.golden import GoldenCase
from attnspec.golden.pack import packs


@packs("cog_attention__CogAttn__*", formula="cog_attention", source="trestad/CogAttn @efecf29, Cogformer/attention.py, in float64",
       edits="RoPE replaced by the identity")
def _(z, case):
    options = {"causal": True} if case.endswith("causal") and "mask" not in z.files else {}
    masks = {"mask": z["mask"]} if "mask" in z.files else {}
    return GoldenCase({"q": z["q"], "k": z["k"], "v": z["v"], **masks}, {"out": z["out_heads"], "weights": z["weights"]},
                      {**options, "return_weights": True})


@packs("cog_attention__CogAttn_EasyTransformer__causal", formula="cog_attention",
       source="trestad/CogAttn @efecf29, Easy-Transformer2/easy_transformer/components.py, in float64")
def _(z, case):
    return GoldenCase({"q": z["q"], "k": z["k"], "v": z["v"]}, {"weights": z["weights"]},
                      {"causal": True, "normaliser": "nonzero", "return_weights": True})


@packs("cog_attention_backward__torch__causal", formula="cog_attention_backward", source="torch 2.13.0, autograd of the formula in float64")
def _(z, case):
    return GoldenCase({name: z[name] for name in ("q", "k", "v", "do")}, {name: z[name] for name in ("dq", "dk", "dv")}, {"causal": True})
