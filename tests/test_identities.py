"""The identities of all formulas as properties: whatever the sizes and numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnspec
from attnspec.conformance.identities import discrepancy, identities

ALL = list(identities())


@pytest.mark.parametrize("one", ALL, ids=lambda one: f"{one.formulas[0]}-{one.text[:60]}")
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_identity(one, seed):
    error, bound = discrepancy(one, seed)
    assert error <= bound


def test_every_formula_has_an_identity():
    assert set(attnspec.formulas()) == {name for one in ALL for name in one.formulas}
