"""Golden vectors of the transport family."""

from typing import Any

import numpy as np

from attnspec.golden import GoldenCase
from attnspec.golden.pack import packs


def sinkformers(z):
    return {"n_iters": int(z["n_iter"]), "eps": float(z["eps"])}


VIT = "michaelsdr/sinkformers @045d933, vit-pytorch/vit_pytorch/sinkhorn.py, in float64"
MARGINALS_IN_FLOAT64 = "the marginals made in float64 instead of float32"


@packs("sinkhorn_attention__sinkformers__*", formula="sinkhorn_attention", source=VIT, edits=MARGINALS_IN_FLOAT64)
def _(z, case):
    return GoldenCase({name: z[name] for name in ("q", "k", "v")}, {"out": z["out"], "weights": z["plan"] * z["k"].shape[-2]},
                      {**sinkformers(z), "output_scaling": "cols", "return_weights": True})


@packs("sinkhorn_attention__sinkformers__*", formula="sinkhorn_plan", source=VIT, edits=MARGINALS_IN_FLOAT64)
def _(z, case):
    return GoldenCase({"scores": z["scores"]}, {"plan": z["plan"], "u": z["u"], "v": z["v_pot"]}, {**sinkformers(z), "return_info": True})


@packs("sinkhorn_attention__sinkformers__*", formula="sinkhorn_potentials", source=VIT, edits=MARGINALS_IN_FLOAT64)
def _(z, case):
    return GoldenCase({"scores": z["scores"]}, {"u": z["u"], "v": z["v_pot"]}, sinkformers(z))


@packs("sinkhorn_attention__sinkformers_nlp_padmask__*", formula="sinkhorn_attention",
       source="michaelsdr/sinkformers @045d933, nlp-tutorial/text-classification-transformer, in float64",
       edits=f"{MARGINALS_IN_FLOAT64}; keys and values are unit vectors, so that queries are scores and outputs weights")
def _(z, case):
    unit = np.eye(z["scores"].shape[-1])
    return GoldenCase({"q": z["scores"], "k": unit, "v": unit, "key_mask": ~z["pad"]}, {"out": z["attn"]},
                      {"n_iters": int(z["n_iter"]), "scale": 1.0, "output_scaling": "cols", "key_marginal": "all"})


@packs("sinkhorn_attention_backward__sinkformers_vit__*", formula="sinkhorn_plan_backward", source=f"{VIT}, torch autograd",
       edits=MARGINALS_IN_FLOAT64)
def _(z, case):
    def gradient(**options):
        return GoldenCase({"scores": z["scores"], "dplan": z["dplan"]}, {"out": z["dscores"]}, {"n_iters": int(z["n_iter"]), **options})

    return {"": gradient(), "_implicit": gradient(gradient="implicit")} if case.endswith("converged") else gradient()


POT = "POT 0.9.7.post1, ot.bregman.sinkhorn_log"


@packs("sinkhorn_plan__pot__transposed_*", formula="sinkhorn_plan", source=POT,
       edits="none; called with the transposed cost, as it begins with columns, and its plan transposed back")
def _(z, case):
    return GoldenCase({"scores": z["scores"]}, {"out": z["plan"]}, {"n_iters": int(z["half_steps"]), "eps": float(z["eps"])})


@packs("sinkhorn_plan__pot__converged_*", formula="sinkhorn_plan", source=POT, edits="none; iterated to convergence on both sides")
def _(z, case):
    return GoldenCase({"scores": z["scores"]}, {"out": z["plan"]}, {"n_iters": 4001, "eps": float(z["eps"])})


@packs("sinkhorn_plan__pot__converged_*", formula="sinkhorn_dual_value", source=POT,
       edits="its potentials times eps; expected is the primal value of its plan, -<P, S> + eps sum P log P")
def _(z, case):
    eps, P = float(z["eps"]), z["plan"]
    return GoldenCase({"scores": z["scores"], "u": eps * z["log_u"], "v": eps * z["log_v"]},
                      {"out": np.sum(-P * z["scores"] + eps * P * np.log(P))}, {"eps": eps})


@packs("sinkhorn_plan__pot__converged_*", formula="sinkhorn_primal_value", source=POT,
       edits="expected is the dual value of its potentials, eps (mean of log_u + mean of log_v)")
def _(z, case):
    eps = float(z["eps"])
    return GoldenCase({"plan": z["plan"], "scores": z["scores"]}, {"out": eps * (z["log_u"].mean() + z["log_v"].mean())}, {"eps": eps})


@packs("sinkhorn_unbalanced_plan__sinkformers__*", formula="sinkhorn_unbalanced_plan",
       source="michaelsdr/sinkformers @045d933, vit-pytorch/vit_pytorch/unbalanced.py, in float64", edits=MARGINALS_IN_FLOAT64)
def _(z, case):
    return GoldenCase({"scores": z["scores"]}, {"out": z["plan"]}, {**sinkformers(z), "rho": float(z["rho"])})


@packs("goat_attention__goat-attention-0.1.1__*", formula="goat_attention", source="goat-attention 0.1.1, GoatAttention, in float64")
def _(z, case):
    return goat_case(z, case, tol=1e-6)                                # its positional features are float32


@packs("goat_attention__goat-attention-f64patched__*", formula="goat_attention", source="goat-attention 0.1.1, GoatAttention, in float64",
       edits="torch.float32 replaced by torch.float64 throughout")
def _(z, case):
    return goat_case(z, case)


def goat_case(z, case, **tol):
    H, Hk, D, E = int(z["H"]), int(z["Hk"]), int(z["D"]), z["Wq"].shape[-1]
    args = {"q_input": z["xq"], "k_input": z["xk"], "v_input": z["xv"]}
    for name, heads in (("q", H), ("k", Hk), ("v", Hk)):
        args |= {f"w_{name}": z[f"W{name}"].reshape(heads, D, E), f"b_{name}": z[f"b{name}"].reshape(heads, D)}
    args |= {"w_o": z["Wo"].reshape(E, H, D), "b_o": z["bo"], "a": z["lam_s"], "b": z["lam_a"]}
    if z["kb"]:
        args |= {"w1": z["W1"], "b1": z["b1"], "w2": z["W2"][0], "b2": z["b2"][0]}
        args |= {"gain": z["gain"], "bump": z["bump"], "recency": z["rec"]}
    if z["gate"]:
        args |= {"gate_scale": z["gs"], "gate_bias": z["gb"]}
    if z["mask"].size:
        args["mask"] = ~z["mask"]                                      # True is masked there
    options: dict[str, Any] = {"causal": bool(z["is_causal"]), "prior_scale": float(z["prior_scale"]),
                               "position_base": float(z["pos_base"]), "absolute_base": float(z["abs_base"]), "return_weights": True}
    if z["tsl"]:
        options["training_length"] = int(z["tsl"])
    if case.endswith("2d_3x4_cls"):
        options |= {"grid": (3, 4), "cls": True}
    return GoldenCase(args, {"out": z["out"], "weights": z["weights"]}, options, **tol)


@packs("flow_attention__Flowformer*", formula="flow_attention", source="thuml/Flowformer @61f5d8c, in float64",
       edits="projections replaced by the identity")
def _(z, case):
    calls: dict[str, dict[str, Any]] = {
        "Flowformer__L7_S7": {},
        "Flowformer__L5_S11": {},
        "Flowformer__L11_S5": {},
        "Flowformer_TimeSeries_noclamp__L6_S9": {"clip": float("inf")},
        "Flowformer_LRA_relu_headsoftmax_bug__L6_S9": {"clip": float("inf"), "feature": "relu", "competition": "heads"},
    }
    options = calls[case]
    return GoldenCase({name: z[name] for name in ("q", "k", "v")}, {"out": z["out"]}, options)


@packs("flow_attention_causal__Flowformer*", formula="flow_attention_causal", source="thuml/Flowformer @61f5d8c, in float64",
       edits="projections replaced by the identity")
def _(z, case):
    calls: dict[str, dict[str, Any]] = {"Flowformer__L7": {}, "Flowformer__L16": {}, "Flowformer_RL_clamp10__L7": {"clip": 10.0}}
    options = calls[case]
    return GoldenCase({name: z[name] for name in ("q", "k", "v")}, {"out": z["out"]}, options)
