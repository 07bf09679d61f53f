"""Golden vectors of the memory family."""

import numpy as np

from attnspec.golden import GoldenCase
from attnspec.golden.pack import packs
from attnspec.reference.memory import sdm_circle_intersection

HFLAYERS = "ml-jku/hopfield-layers @f56f929, hflayers/functional.py, in float64"
HOPFIELDKIT = "hopfieldkit 0.1.0 (PyPI)"
MILLIDGE = "BerenMillidge/Theory_Associative_Memory @f5e0f5e, functions.py, in float64"


@packs("hopfield_retrieval__hflayers__case*", formula="hopfield_retrieve", source=HFLAYERS)
def _(z, case):
    # One head: its axis is added, so that the leading axis is the batch that the code takes the largest change over.
    info = {"n_iters": z["n_softmax"].reshape(1) - 1}
    return GoldenCase({"state": z["state"][:, None], "stored": z["stored"][:, None]},
                      {"out": z["out"][:, None], "weights": z["assoc"], **info},
                      {"beta": z["beta"], "n_iters": z["update_steps_max"], "tol": z["update_steps_eps"], "return_info": True})


@packs("hopfield_retrieval__hflayers__case0", formula="hopfield_update", source=HFLAYERS)
def _(z, case):
    return GoldenCase({"state": z["state"], "stored": z["stored"]}, {"out": z["out"]}, {"beta": z["beta"]})


@packs("hopfield_binary__hopfieldkit__*", formula="hopfield_binary", source=HOPFIELDKIT)
def _(z, case):
    return GoldenCase({"patterns": z["patterns"], "state": z["state"]}, {"out": z["out"], "energies": z["energies"]},
                      {"ties": "plus", "return_info": True})


@packs("hopfield_binary__hopfieldkit__*", formula="hopfield_binary_weights", source=HOPFIELDKIT)
def _(z, case):
    return GoldenCase({"patterns": z["patterns"]}, {"out": z["weights"]})


@packs("hopfield_binary__hopfieldkit__*", formula="hopfield_binary_energy", source=HOPFIELDKIT)
def _(z, case):
    return {suffix: GoldenCase({"state": state, "weights": z["weights"]}, {"out": energy})
            for suffix, state, energy in (("_first", z["state"], z["energies"][0]), ("_last", z["out"], z["energies"][-1]))}


@packs("hopfield_binary__hopfieldkit__*", formula="hopfield_binary_update", source=HOPFIELDKIT,
       edits="none; _stable without bits whose field is 0 up to rounding, which decides them")
def _(z, case):
    decided = abs(z["weights"] @ z["out"]) > 1e-12
    made = {"_stable": GoldenCase({"state": z["out"], "weights": z["weights"]}, {"out": z["out"]}, {"ties": "plus"}, {"out": decided})}
    if len(z["energies"]) == 2 * len(z["state"]) + 1:                  # two sweeps, the second of which flips nothing
        made[""] = GoldenCase({"state": z["state"], "weights": z["weights"]}, {"out": z["out"]}, {"ties": "plus"})
    return made


SIMILARITIES = {
    "dot": "dot", "normdot": "normdot_official", "cosine": "cosine_official", "manhattan": "manhattan", "euclidean": "euclidean",
    "kl": "kl", "revkl": "reverse_kl", "js": "js_official",
}


@packs("universal_hopfield__millidge_official__*", formula="universal_hopfield_similarity", source=MILLIDGE)
def _(z, case):
    return {f"_{short}": GoldenCase({"query": z["z"], "memories": z["X"]}, {"out": z[f"sim_{short}"][None]},
                                    {"similarity": name, "eps": z["eps"]})
            for short, name in SIMILARITIES.items()}


@packs("universal_hopfield__millidge_official__*", formula="universal_hopfield", source=MILLIDGE)
def _(z, case):
    separations = {
        "softmax": {"separation": "softmax", "param": z["softmax_param"]},
        "poly": {"separation": "polynomial", "param": z["poly_param"]},
        "max": {"separation": "max"},
        "identity": {"separation": "identity"},
    }
    return {f"_{short}_{sep}": GoldenCase({"query": z["z"], "memories": z["X"]}, {"out": z[f"out_{short}_{sep}"][None]},
                                          {"similarity": name, "beta": z["beta"], "eps": z["eps"], "normalise": True, **options})
            for short, name in SIMILARITIES.items() for sep, options in separations.items()}


# --- Sparse Distributed Memory -------------------------------------------------------------------------------------------------------

BRICKEN = "TrentBrick/attention-approximates-sdm @4cb44d8"


def neurons(r):
    """The number of neurons, which the files give as -1 where there is one at every address."""
    return {} if r < 0 else {"n_locations": float(r)}


@packs("sdm_circle_intersection__bricken_official__*", formula="sdm_circle_intersection", source=f"{BRICKEN}, expected_intersection_lune",
       edits="none; _exact is the same sum in whole numbers; case2 is compared with that alone, since the floating-point sum cancels there")
def _(z, case):
    args = {"distance": z["dv"], "n_bits": z["n"], "radius": z["d"]}
    made = {"_exact": GoldenCase(args, {"out": z["exact"]}, neurons(z["r"]))}
    if not case.endswith("case2"):                                     # n = 100, d = 35: 5e-9 off for distant pairs
        made[""] = GoldenCase(args, {"out": z["lune"]}, neurons(z["r"]))
    return made


@packs("sdm_cap_intersection__bricken_official__*", formula="sdm_cap_intersection", source=f"{BRICKEN}, cap_intersection",
       edits="log 0 is -inf instead of -1e30; _correct has log 2 in place of 2; the entry next to cosine 1, where the code's "
             "quadrature stops early (1.5e-9 too small at n = 64, 1.8e-10 too large at n = 30), is left out")
def _(z, case):
    args, options = {"cosine": z["cos"], "n_bits": z["n"], "radius": z["d"]}, {**neurons(z["r"]), "log": True}
    only = {"out": z["cos"] < 1 - 1e-9}
    official = np.where(z["log_official"] < -1e29, -np.inf, z["log_official"])
    return {"": GoldenCase(args, {"out": official}, {**options, "official": True}, only),
            "_correct": GoldenCase(args, {"out": z["log_correct"]}, options, only)}


@packs("sdm_fit_beta__bricken_official__*", formula="sdm_fit_beta", source=f"{BRICKEN}, fit_beta",
       edits="none; _ols is the least-squares slope; the code's sums of binomials cancel at n = 1000 (compared to 1e-10 there), and its "
             "quadrature for _continuous stops at a tolerance of 1.5e-8 (compared to 1e-9)")
def _(z, case):
    args, options = {"n_bits": z["n"], "radius": z["d"]}, neurons(z["r"])
    made = {"": GoldenCase(args, {"beta": z["beta"], "bias": z["bias"]}, options, tol=1e-10 if z["n"] >= 1000 else 1e-12),
            "_ols": GoldenCase(args, {"beta": z["beta_ols"]}, {**options, "official": False})}
    if not np.isnan(z["beta_continuous"]):                             # the code overflows at n = 1000
        made["_continuous"] = GoldenCase(args, {"beta": z["beta_continuous"]}, {**options, "continuous": True}, tol=1e-9)
    return made


def rows(z, *names):
    """Arrays of the file with a vector in every row; the authors' code has them in columns."""
    return [z[name].T for name in names]


@packs("sdm_read_write__bricken_official__*", formula="sdm_write", source=f"{BRICKEN}, torch_run_algo (Binary_Neuron_SDM)")
def _(z, case):
    locations, addresses, pointers, storage = rows(z, "neuron_addr", "pattern_addr", "pattern_ptr", "storage")
    return GoldenCase({"locations": locations, "addresses": addresses, "pointers": pointers, "radius": z["d"]},
                      {"storage": storage, "counts": z["counts"]})


@packs("sdm_read_write__bricken_official__*", formula="sdm_read", source=f"{BRICKEN}, update_Binary_Neuron_SDM")
def _(z, case):
    queries, locations, storage, out = rows(z, "queries", "neuron_addr", "storage", "out_neuron")
    return GoldenCase({"queries": queries, "locations": locations, "storage": storage, "counts": z["counts"], "radius": z["d"]},
                      {"out": out})


@packs("sdm_read_write__bricken_official__*", formula="sdm_update", source=f"{BRICKEN}, update_using_cache, update_Binary_Attention",
       edits="none; bits at an exact tie, which rounding decides in the code (here for 1), are left out of _circle")
def _(z, case):
    queries, addresses, pointers, circle, attention = rows(z, "queries", "pattern_addr", "pattern_ptr", "out_circle", "out_attention")
    args = {"queries": queries, "addresses": addresses, "pointers": pointers}
    distance = (queries[:, None] != addresses).sum(-1)
    w = sdm_circle_intersection(distance, n_bits=z["pattern_addr"].shape[0], radius=z["d"])      # whole numbers below 2^53
    tie = 2 * w @ pointers == w.sum(-1, keepdims=True)
    return {"_circle": GoldenCase({**args, "radius": z["d"]}, {"out": circle}, only={"out": ~tie}),
            "_attention": GoldenCase(args, {"out": attention}, {"weighting": "exponential", "beta": float(z["beta"])}),
            "_fitted": GoldenCase({**args, "radius": z["d"]}, {"out": attention}, {"weighting": "exponential"})}


@packs("sdm_attention_continuous__bricken_official__*", formula="sdm_attention",
       source=f"{BRICKEN}, update_Cont_Attention, update_using_cache (_circle)", edits="none; _circle is computed in float32 there")
def _(z, case):
    queries, addresses, out, circle = rows(z, "queries", "addr", "out", "out_cont_binary_float32")
    args = {"queries": queries, "addresses": addresses, "pointers": addresses, "radius": z["d"]}
    return {"": GoldenCase(args, {"out": out}, {"weighting": "exponential", "beta": float(z["beta"])}),
            "_fitted": GoldenCase(args, {"out": out}, {"weighting": "exponential"}),
            "_circle": GoldenCase(args, {"out": circle}, {"weighting": "circle"}, tol=1e-6)}
