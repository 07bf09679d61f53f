"""Golden vectors of the softmax family."""

from typing import Any

import numpy as np

from attnspec.golden import GoldenCase
from attnspec.golden.pack import packs

FORWARD = "scaled_dot_product_attention"
FLOAT32 = 1e-6
ONNX_SCALE = float(np.sqrt(np.float32(0.7))) ** 2      # its evaluator multiplies q and k each by the float32 root of the float32 scale


def qkv(z):
    return {name: z[name] for name in ("q", "k", "v")}


@packs("scaled_dot_product_attention__torch__*", formula=FORWARD, source="torch 2.13.0, F.scaled_dot_product_attention on the CPU")
def _(z, case):
    calls: dict[str, dict[str, Any]] = {
        "torch__plain": {},
        "torch__additivebias": {},
        "torch__boolmask_fullymaskedrow": {},
        "torch__causal_n7_m11_topleft": {"causal": "top-left"},
        "torch__causal_lower_right_n7_m11": {"causal": "bottom-right"},
        "torch__gqa_6q_2kv": {"enable_gqa": True},
        "torch__mqa_6q_1kv": {"enable_gqa": True},
    }
    options = calls[case]
    optional = {name: z[name] for name in ("bias", "mask") if name in z.files}
    return GoldenCase({**qkv(z), **optional}, {"out": z["out"]}, options)


BACKWARD_OPTIONS: dict[str, dict[str, Any]] = {
    "torch__plain": {},
    "torch__causal": {"causal": "top-left"},
    "torch__softcap1p5_causal_br": {"causal": "bottom-right", "softcap": 1.5},
}


@packs("scaled_dot_product_attention_backward__torch__*", formula=f"{FORWARD}_backward", source="torch 2.13.0, autograd")
def _(z, case):
    return GoldenCase({**qkv(z), "do": z["do"]}, {name: z[name] for name in ("dq", "dk", "dv")}, BACKWARD_OPTIONS[case])


@packs("scaled_dot_product_attention_backward__torch__*", formula=FORWARD, source="torch 2.13.0, forward pass of the same in float64")
def _(z, case):
    expect = {name: z[name] for name in ("out", "lse") if name in z.files}
    return {"_forward": GoldenCase(qkv(z), expect, {**BACKWARD_OPTIONS[case], "return_lse": True})}


@packs("scaled_dot_product_attention__onnx*", formula=FORWARD, source="onnx 1.23.2, reference evaluator of the operator Attention")
def _(z, case):
    calls: dict[str, dict[str, Any]] = {
        "onnx24__gqa_plain": {},
        "onnx24__gqa_causal_nocache": {"causal": "top-left"},
        "onnx24__softcap1p5_scale0p7_causal": {"causal": "top-left", "softcap": 1.5, "scale": ONNX_SCALE},
        "onnx24__boolmask_fullymaskedrow": {},
        "onnx24__past4_causal": {"causal": "bottom-right"},
        "onnx24__nonpad_causal": {},
        "onnx25__window_l2_r1": {"window": (2, 1)},
    }
    options = calls[case]
    args = qkv(z)
    if "past_k" in z.files:
        args |= {"k": np.concatenate([z["past_k"], z["k"]], axis=-2), "v": np.concatenate([z["past_v"], z["v"]], axis=-2)}
    if "nonpad" in z.files:                                            # keys beyond a batch's length are padding; causal around its end
        length = z["nonpad"][:, None, None, None]
        i, j = np.arange(z["q"].shape[-2])[:, None], np.arange(z["k"].shape[-2])
        args["mask"] = (j < length) & (j <= i + length - z["q"].shape[-2])
    if "mask" in z.files:
        args["mask"] = z["mask"]
    return GoldenCase(args, {"out": z["out"]}, {**options, "enable_gqa": True})


@packs("scaled_dot_product_attention__jax__*", formula=FORWARD, source="jax 0.10.2, jax.nn.dot_product_attention",
       edits="none; rows that see nothing are left out, JAX gives them the mean of all values")
def _(z, case):
    calls: dict[str, dict[str, Any]] = {
        "jax__gqa_causal": {"causal": "top-left"},
        "jax__window_2_1": {"window": (2, 1)},
        "jax__boolmask_fullymaskedrow": {},
    }
    return float32_case(z, calls[case])


@packs("scaled_dot_product_attention__mlx__*", formula=FORWARD, source="mlx 0.32.4 on the CPU, mx.fast.scaled_dot_product_attention",
       edits="none; rows that see nothing are left out, MLX gives them the mean of all values")
def _(z, case):
    calls: dict[str, dict[str, Any]] = {"mlx__gqa_causal_n6_m9": {"causal": "bottom-right"}, "mlx__boolmask_fullymaskedrow": {}}
    options = calls[case]
    return float32_case(z, options)


def float32_case(z, options):
    args, only = qkv(z), {}
    if "mask" in z.files:
        args["mask"] = z["mask"]
        only["out"] = np.broadcast_to(z["mask"].any(-1, keepdims=True), z["out"].shape)
    return GoldenCase(args, {"out": z["out"]}, {**options, "enable_gqa": True}, only, tol=FLOAT32)


@packs("attention_with_sink__torch_concat__learned", formula="attention_with_sink",
       source="torch 2.13.0, the sink concatenated to the logits as a column, in float64")
def _(z, case):
    return GoldenCase({**qkv(z), "sink": z["sink"]}, {"out": z["out"]})


@packs("attention_with_sink__torch_concat__learned", formula=f"{FORWARD}_backward",
       source="torch 2.13.0, autograd, the sink concatenated to the logits as a column, in float64")
def _(z, case):
    return GoldenCase({**qkv(z), "do": z["do"], "sink": z["sink"]}, {name: z[name] for name in ("dq", "dk", "dv", "dsink")})


@packs("attention_with_sink__mlx__*", formula="attention_with_sink",
       source="mlx 0.32.4 on the CPU, mx.fast.scaled_dot_product_attention with sinks")
def _(z, case):
    calls: dict[str, dict[str, Any]] = {"mlx__sinks": {}, "mlx__sinks_causal": {"causal": "bottom-right"}}
    options = calls[case]
    return GoldenCase({**qkv(z), "sink": z["sink"]}, {"out": z["out"]}, {**options, "enable_gqa": True}, tol=FLOAT32)


@packs("softmax_one_attention__mlx__zero_sink", formula="softmax_one_attention",
       source="mlx 0.32.4 on the CPU, mx.fast.scaled_dot_product_attention with sinks of 0")
def _(z, case):
    return GoldenCase(qkv(z), {"out": z["out"]}, {"enable_gqa": True}, tol=FLOAT32)
