"""The examples in the docstrings of every module."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest

import attnspec

MODULES = sorted(module.name for module in pkgutil.walk_packages(attnspec.__path__, "attnspec.") if not module.name.endswith("__main__"))


@pytest.mark.parametrize("name", ["attnspec", *MODULES])
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"np": np, "attnspec": attnspec})
    assert result.failed == 0


def test_there_are_examples_for_every_formula():
    finder = doctest.DocTestFinder(exclude_empty=True)
    without = [name for name, record in attnspec.formulas().items()
               if not any(test.examples for test in finder.find(record.function, name, module=False))]
    assert not without
