"""Names, docstrings and examples of the package; and no torch where none is needed."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import tiers

MODULES = ["tiers", *(found.name for found in pkgutil.walk_packages(tiers.__path__, "tiers."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_written(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_name_is_there_and_documented():
    for name in tiers.__all__:
        value = getattr(tiers, name)
        assert value.__doc__ or not isinstance(value, type), name
    assert len(set(tiers.__all__)) == len(tiers.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = tiers.nothing


def test_the_bookkeeping_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import tiers; tiers.TieredCache, tiers.FileStore"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
