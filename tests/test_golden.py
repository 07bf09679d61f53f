"""Every golden vector of every formula, at the tolerance of its source."""

import pytest

import attnspec
from attnspec.golden import golden_cases

CASES = [case for name in attnspec.formulas() for case in golden_cases(name)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.formula}-{case.name}")
def test_golden(case):
    error, tol = case.outcome(getattr(attnspec, case.formula))
    assert error <= tol
