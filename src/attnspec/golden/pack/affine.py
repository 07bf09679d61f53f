"""Golden vectors of the affine family."""

import numpy as np

from attnspec.golden import GoldenCase
from attnspec.golden.pack import packs

AFFINE = "affine_scaled_attention__own-torch_after_BlaGPT__*"
AFFINE_SOURCE = "torch 2.13.0, transcription of the forward pass in erogol/BlaGPT (an independent re-implementation), in float64"


@packs(AFFINE, formula="affine_scaled_attention", source=AFFINE_SOURCE,
       edits="none; in training that code updates alpha_ma before it forms beta, so that the updated one is the argument")
def _(z, case):
    args = {**{name: z[name] for name in ("q", "k", "v", "x")}, "w_a": z["w_alpha"], "alpha_ma": z["alpha_ma_used"]}
    return GoldenCase(args, {"out": z["out"], "weights": z["weights"]}, {"causal": True, "phi": "sigmoid", "return_weights": True})


@packs(AFFINE, formula="affine_alpha", source=AFFINE_SOURCE)
def _(z, case):
    return GoldenCase({"x": z["x"], "w_a": z["w_alpha"]}, {"out": z["alpha"]}, {"phi": "sigmoid"})


@packs(f"{AFFINE}_train", formula="affine_moving_average", source=AFFINE_SOURCE)
def _(z, case):
    return GoldenCase({"alpha_ma": z["alpha_ma_before"], "alpha": z["alpha"]}, {"out": z["alpha_ma_used"]}, {"rho": float(z["rho"])})


@packs("gated_attention__qwen3_gated__*", formula="gated_attention",
       source="qiuzh20/gated_attention @49645df, modeling_qwen3.py, Qwen3Attention in float64", edits="RoPE replaced by the identity")
def _(z, case):
    headwise = {
        "qwen3_gated__elementwise_H4_KV4": False, "qwen3_gated__elementwise_H6_KV2": False,
        "qwen3_gated__headwise_H4_KV4": True, "qwen3_gated__headwise_H6_KV2": True,
    }[case]
    (heads, d), key_heads = z["q"].shape[1::2], z["k"].shape[1]
    lanes = 1 if headwise else d

    # Per key head: the query lanes of its group, then their gate lanes.
    def gate_lanes(rows):
        groups = rows.reshape(key_heads, -1, *rows.shape[1:])
        return groups[:, heads // key_heads * d :].reshape(heads, lanes, *rows.shape[1:])

    args = {**{name: z[name] for name in ("q", "k", "v", "x")}, "w_gate": gate_lanes(z["q_proj_weight"]),
            "b_gate": gate_lanes(z["q_proj_bias"])}
    options = {"causal": True, "enable_gqa": True}
    projection = {"w_o": z["o_proj_weight"].reshape(-1, heads, d), "b_o": z["o_proj_bias"]}
    return {"": GoldenCase(args, {"out": z["out_heads"]}, options),
            "__layer": GoldenCase({**args, **projection}, {"out": z["out"]}, options)}


@packs("energy_gated_attention__energy-gated-attention__nscales*", formula="energy_gated_attention",
       source="AthanasiosZeris/energy-gated-attention @3425b81, paper1_ega/phase2_ablation.py, in float64")
def _(z, case):
    scales = {"energy-gated-attention__nscales1": 1, "energy-gated-attention__nscales3": 3}[case]
    w_energy = np.concatenate([z[f"scale_proj_{s}_weight"] for s in range(scales)])
    b_energy = np.concatenate([z[f"scale_proj_{s}_bias"] for s in range(scales)])
    return GoldenCase({**energy_head(z), "w_energy": w_energy, "b_energy": b_energy}, {"out": z["out"]})


@packs("energy_gated_attention__energy-gated-attention__conv*", formula="convolution_energy_gated_attention",
       source="AthanasiosZeris/energy-gated-attention @3425b81, paper1_ega/phase2_ablation.py, in float64",
       edits="none; the shorter filter has zeros in front")
def _(z, case):
    lengths = {"energy-gated-attention__conv35": (3, 5)}[case]
    filters = [z[f"conv_filters_{s}_weight"] for s in range(len(lengths))]
    biases = np.stack([z[f"conv_filters_{s}_bias"] for s in range(len(lengths))])
    padded = np.stack([np.pad(F, ((0, 0), (0, 0), (max(lengths) - length, 0))) for F, length in zip(filters, lengths, strict=True)])
    return GoldenCase({**energy_head(z), "filters": padded, "biases": biases}, {"out": z["out"]})


def energy_head(z):
    return {"x": z["x"], "w_q": z["query_weight"], "w_k": z["key_weight"], "w_v": z["value_weight"], "alpha": z["alpha"], "tau": z["tau"],
            "mixing": z["scale_w"]}


@packs("context_broadcasting__torch__*", formula="context_broadcasting", source="torch 2.13.0, the line that public ports share")
def _(z, case):
    return GoldenCase({"x": z["x"]}, {"out": z["out"]})
