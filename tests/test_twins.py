"""A twin exports the reference's names, parameters and defaults, and nothing else."""

import importlib
import inspect
import types

import numpy as np

import attnspec
from attnspec.dispatch import BACKENDS
from attnspec.reference.formula import twin

RECORDS = attnspec.formulas()


def disagreements(module):
    """What a package of twins exports that the reference does not have: names, parameters, defaults."""
    found = []
    for name in getattr(module, "__all__", vars(module)):
        function = getattr(module, name)
        if not hasattr(function, "limits"):
            continue
        if name not in RECORDS:
            found.append(f"{name}: no such formula")
            continue
        wanted = RECORDS[name].parameters
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in wanted:
                found.append(f"{name}: no parameter {parameter.name}")
                continue
            default, expected = parameter.default, wanted[parameter.name].default
            if default is not expected and default != expected:
                found.append(f"{name}: {parameter.name} is {default!r} by default, in the reference {expected!r}")
        found += [f"{name}: lacks {option} without saying so" for option in wanted
                  if option not in inspect.signature(function).parameters and option not in function.limits.lacks]
    return found


def test_installed_twins_agree():
    for name, backend in BACKENDS.items():
        if name != "reference" and backend.missing() is None:
            assert disagreements(importlib.import_module(backend.package)) == []


def test_disagreements_are_found():
    module = types.ModuleType("kernels")
    lacks = {name: "not yet" for name in (*RECORDS["cog_attention"].options, "mask") if name != "scale"}
    declare = twin(dtypes=("float32",), lacks=lacks)
    module.cog_attention = declare(lambda q, k, v, *, scale=None: np.zeros(3))  # type: ignore[attr-defined]
    assert disagreements(module) == []
    module.cog_attention = declare(lambda q, k, v, *, scale=1.0, beta=None: np.zeros(3))  # type: ignore[attr-defined]
    module.cog_attentoin = declare(lambda q, k, v: np.zeros(3))  # type: ignore[attr-defined]
    assert disagreements(module) == [
        "cog_attention: scale is 1.0 by default, in the reference None",
        "cog_attention: no parameter beta",
        "cog_attentoin: no such formula",
    ]
    module = types.ModuleType("kernels")
    module.cog_attention = twin(dtypes=("float32",))(lambda q, k, v: np.zeros(3))  # type: ignore[attr-defined]
    assert "cog_attention: lacks causal without saying so" in disagreements(module)
