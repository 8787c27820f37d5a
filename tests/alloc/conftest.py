"""Fixtures of the allocator tests."""

import pytest

pytest.register_assert_rewrite("tests.contract.allocator_contract", "tests.alloc.alloc_builders")
