"""A twin exports the reference's names, parameters and defaults, and nothing else."""

import ast
import importlib
import inspect
import types
from pathlib import Path

import numpy as np
import pytest

import attnspec
from attnspec.conformance import verify
from attnspec.dispatch import BACKENDS
from attnspec.reference.formula import twin

RECORDS = attnspec.formulas()
TWINS = [(backend.name, name) for backend in BACKENDS.values() if backend.name != "reference" and backend.missing() is None
         for name in RECORDS if backend.has(name)]
CHECKED = {"attnspec.reference.inputs", "attnspec.reference.formula", "attnspec.reference"}      # what twins may use of the reference


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


@pytest.mark.parametrize("backend, name", TWINS)
def test_every_twin_is_within_its_bounds(backend, name):
    """In every dtype that it takes; what is not judged has a reason, and something is."""
    checks = list(verify(name, backend))
    failed = [check for check in checks if check.skipped is None and not check.passed]
    assert [f"{check.case}: {check.ratio:.3g} of its bound {check.note}" for check in failed] == []
    judged = {check.case.rpartition("-")[2] for check in checks if check.skipped is None}
    assert judged == set(BACKENDS[backend].function(name).limits.dtypes)


@pytest.mark.parametrize("backend, name", TWINS)
def test_results_have_the_axes_of_what_they_depend_on(backend, name):
    """Each array in turn alone has leading axes: no result may take them over from an array that is not in its formula."""
    record, function = RECORDS[name], BACKENDS[backend].function(name)
    options = {option: True for option in ("return_weights", "return_lse", "return_info") if option in record.options}
    options = {option: value for option, value in options.items() if option not in function.limits.lacks}
    sizes = {dim: size for dim, size in {"n": 3, "m": 4, "d": 6, "e": 2}.items() if dim in record.dimensions}
    plain = record.draw(sizes)
    for alone in plain:
        if "..." not in record.shapes[alone].split():
            continue
        arrays = {**plain, alone: np.stack([plain[alone]] * 5)}
        got, want = (f(**arrays, **options) for f in (function, record.function))
        got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        shapes = [[None if x is None else np.shape(x) for x in results] for results in (got, want)]
        assert shapes[0] == shapes[1], alone
        for ours, theirs in zip(got, want, strict=True):
            close = {"rtol": 1e-9, "atol": 1e-11} if "float64" in function.limits.dtypes else {"rtol": 1e-4, "atol": 1e-5}
            assert ours is None or np.allclose(ours, theirs, **close), alone


@pytest.mark.parametrize("package", {BACKENDS[backend].package for backend, _ in TWINS})
def test_a_twin_never_calls_the_maths_that_judges_it(package):
    """Of the reference it uses the checks, the records and the classes of results."""
    folder = Path(importlib.import_module(package).__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                assert not any(name.startswith("attnspec.reference") for name in names), path
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnspec.reference") and node.module not in CHECKED:
                module = importlib.import_module(node.module)
                assert all(hasattr(getattr(module, name), "_fields") for name in names), f"{path}: {node.module} {names}"
            elif isinstance(node, ast.ImportFrom) and node.module == "attnspec.reference":
                assert names == ["formula"], path


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
