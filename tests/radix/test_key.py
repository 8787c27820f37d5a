"""RadixKey: owned tokens, units and namespaces (BEHAVIOUR 42, 43; CONTRACT 63)."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from radix import RadixKey


@pytest.mark.parametrize(
    "container",
    [
        list,
        tuple,
        lambda t: array("q", t),
        lambda t: array("i", t),
        lambda t: np.array(t, dtype=np.int64),
        lambda t: np.array(t, dtype=np.int32),
        lambda t: np.array(t, dtype=np.uint16),
        lambda t: np.array([*t, *t], dtype=np.int64)[: len(t)],
        lambda t: np.repeat(np.array(t), 2)[::2],
        lambda t: memoryview(array("q", t)),
        lambda t: array("q", t).tobytes(),
    ],
    ids=[
        *("list", "tuple", "array-q", "array-i", "int64", "int32", "uint16"),
        *("slice", "strided", "memoryview", "bytes"),
    ],
)
def test_every_integer_container_makes_the_same_key(container):
    """The container is not part of the key."""
    assert RadixKey([3, 1, 4, 1, 5]) == RadixKey(container([3, 1, 4, 1, 5]))


def test_a_range_is_a_key():
    """A range needs no list."""
    assert RadixKey([0, 1, 2, 3]) == RadixKey(range(4))


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.0],
        ["1"],
        [None],
        "abc",
        np.array([1.5]),
        np.array([True, False]),
        np.array([[1, 2], [3, 4]]),
        [2**63],
        np.array([2**63], dtype=np.uint64),
        b"1234567",
    ],
    ids=[
        *("floats", "strings", "none", "text", "float-array", "bool-array", "two-dimensional"),
        *("over-int64", "over-int64-array", "odd-bytes"),
    ],
)
def test_what_is_not_int64_tokens_is_refused(tokens):
    """A key never truncates what it is given."""
    with pytest.raises(ValueError, match=r"\w+"):
        RadixKey(tokens)


def test_a_tensor_that_numpy_cannot_hold_is_refused():
    """bfloat16 has no NumPy dtype: ValueError, as for any float."""
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="token ids must be int64 integers"):
        RadixKey(torch.zeros(2, dtype=torch.bfloat16))


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "separator",
    [
        *([1], {}, {1}, object(), frozenset([1]), 1.0, True, float("nan"), np.int64(1)),
        *(Name("a"), np.str_("a"), bytearray(b"a"), ("a", 1.0), ("a", (True,)), (["a"],)),
    ],
    ids=lambda separator: type(separator).__name__,
)
def test_a_namespace_is_made_of_plain_values(separator):
    """Only values whose repr is the same in every process, and of which no two types are equal."""
    with pytest.raises(ValueError, match="extra_key has a"):
        RadixKey([1], extra_key=separator)
    with pytest.raises(ValueError, match="cache_salt has a"):
        RadixKey([1], cache_salt=separator)


@pytest.mark.parametrize(
    "separator", [None, "", "a", b"a", 0, -1, 2**70, (), ("a", (1, b"", None))]
)
def test_plain_values_separate_namespaces(separator):
    """None, str, bytes, int and tuples of these are kept as they are."""
    key = RadixKey([1], separator, separator)
    assert (key.extra_key, key.cache_salt) == (separator, separator)


def test_wide_and_negative_ids_stay_apart():
    """Ids are int64, not bytes and not int32."""
    keys = [RadixKey([t]) for t in (65, 321, 2**31, 2**40, -1, 2**63 - 1, 2**32 - 1)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("tokens", [[1, 2, 3], array("q", [1, 2, 3]), np.array([1, 2, 3])])
def test_later_changes_of_the_callers_buffer_do_not_reach_the_key(tokens):
    """The key owns its bytes."""
    key = RadixKey(tokens)
    tokens[0] = 999
    assert key.tokens().tolist() == [1, 2, 3]


def test_a_bigram_key_of_n_plus_1_tokens_has_n_units():
    """Units are pairs of neighbours."""
    assert [len(RadixKey(range(n), is_bigram=True)) for n in range(5)] == [0, 0, 1, 2, 3]
    pairs = RadixKey([5, 6, 7], is_bigram=True).tokens().tolist()
    assert pairs == [[5, 6], [6, 7]]


def test_slices_count_units_and_keep_the_namespace():
    """A slice is the key of those units."""
    key = RadixKey(range(10), "lora", "salt")
    assert RadixKey([2, 3, 4], "lora", "salt") == key[2:5]
    bigram = RadixKey(range(10), is_bigram=True)
    assert RadixKey(range(2, 6), is_bigram=True) == bigram[2:5]
    assert len(key[7:3]) == 0


def test_a_slice_with_a_step_is_refused():
    """A key is a run of consecutive units."""
    with pytest.raises(ValueError, match="step=2"):
        RadixKey(range(10))[::2]


@pytest.mark.parametrize(
    "units", [0, -1, 10**30, 1.0, None, "a", (0, 1), slice(0.0, 1), slice("a")]
)
def test_only_slices_of_integers_index_a_key(units):
    """key[0] is an error that says what to pass."""
    with pytest.raises(ValueError, match="pass a slice of integers"):
        RadixKey(range(10))[units]


def test_namespaces_and_kinds_of_units_are_part_of_equality():
    """Same tokens in two namespaces are two keys."""
    keys = {
        RadixKey([1, 2]),
        RadixKey([1, 2], "a"),
        RadixKey([1, 2], None, "a"),
        RadixKey([1, 2], "", None),
        RadixKey([1, 2], None, ""),
        RadixKey([1, 2, 3], is_bigram=True),
        RadixKey([1, 2, 2, 3]),
    }
    assert len(keys) == 7


def test_repr_is_short_and_names_the_namespace():
    """An error message can hold a key of a million tokens."""
    assert repr(RadixKey(range(1000))) == "RadixKey(1000 units)"
    assert repr(RadixKey([1, 2], "a")) == "RadixKey(2 units, namespace=('a', None, False))"


def test_a_key_reports_its_namespace():
    """The three parts can be read back."""
    key = RadixKey([1, 2, 3], "lora", "salt", is_bigram=True)
    assert (key.extra_key, key.cache_salt, key.is_bigram) == ("lora", "salt", True)
    assert RadixKey([1]) != "RadixKey"
