"""The examples in the docstrings of the host-only modules run as written."""

import doctest
import importlib
import pkgutil

import pytest

import alloc

NEEDS_TORCH = {"alloc.tensors"}
MODULES = ["alloc"] + [
    found.name
    for found in pkgutil.walk_packages(alloc.__path__, "alloc.")
    if found.name not in NEEDS_TORCH and not found.name.startswith("alloc.kernels")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_written(name):
    """No doctest of the module fails."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", ["alloc", "alloc.layout", "alloc.placement"])
def test_the_core_modules_have_examples(name):
    """The package, the layout and the placement show how they are used."""
    assert doctest.testmod(importlib.import_module(name)).attempted > 0


def test_every_public_name_exists_and_has_a_docstring():
    """__all__ is complete and documented; C1."""
    reference = {
        "PageInterleavePlacement",
        "PageShardSpec",
        "PageInterleavePoolAllocator",
        "page_interleave_shard_size",
        "PagedTokenToKVPoolAllocator",
        "TokenToKVPoolAllocator",
        "BaseTokenToKVPoolAllocator",
        "ReqToTokenPool",
        "ceil_div",
    }
    assert reference <= set(alloc.__all__)
    assert len(set(alloc.__all__)) == len(alloc.__all__)
    plain = {"IntArray", "Locs", "PageIds", "Slots"}
    for name in set(alloc.__all__) - plain:
        assert getattr(alloc, name).__doc__, name


@pytest.mark.parametrize(
    ("value", "divisor", "expected"),
    [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (2**40 + 1, 2, 2**39 + 1)],
)
def test_ceil_div_rounds_up(value, divisor, expected):
    """Exact on integers of any size; C1."""
    assert alloc.ceil_div(value, divisor) == expected
