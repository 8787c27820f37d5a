"""Names, docstrings and examples of the package."""

import doctest
import importlib
import pkgutil

import pytest

import scratch

MODULES = ["scratch"] + [
    found.name
    for found in pkgutil.walk_packages(scratch.__path__, "scratch.")
    if not found.name.endswith("_triton")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_written(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_name_is_there_and_documented():
    for name in scratch.__all__:
        assert getattr(scratch, name).__doc__, name
    assert len(set(scratch.__all__)) == len(scratch.__all__)
    assert doctest.testmod(scratch).attempted > 0
