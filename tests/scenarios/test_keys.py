"""Keys: every way to write the same tokens is one key, and nobody's buffer is the tree's."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from alloc import PageInterleavePlacement, PageShardSpec
from radix import InsertParams, MatchPrefixParams, RadixKey
from tests.alloc.alloc_builders import extend, ints, make_paged
from tests.builders import make_req, make_world


@pytest.mark.parametrize(("page_size", "tokens", "units"), [(64, 64, 0), (64, 65, 64)])
def test_a_page_of_bigrams_takes_one_token_more(page_size, tokens, units):
    """L2: a key one token short of a page of bigrams crashed."""
    world = make_world(page_size, is_bigram=True)
    world.insert(range(tokens))
    assert world.peek_len(range(tokens)) == units
    assert len(world.cached_pages()) == units // page_size
    world.check()


def test_bigram_keys_match_by_whole_pages_of_pairs():
    """L2: 9 tokens are two pages of four pairs."""
    world = make_world(4, is_bigram=True)
    world.insert(range(9))
    lengths = [world.peek_len(range(n)) for n in (8, 9, 5, 4)]
    assert lengths == [4, 8, 4, 0]


def test_every_entry_point_sees_the_same_bigrams():
    """L3: one entry point converted its key and another did not."""
    world = make_world(4, is_bigram=True)
    req = make_req(range(10))
    world.run(req)
    world.finish(req)
    key = world.key(range(10))
    seen = [
        world.match(range(10), peek=True).device_prefix_len,
        world.match(range(10)).device_prefix_len,
        world.cache.match_and_lock(MatchPrefixParams(key)).device_prefix_len,
        world.insert(range(10), world.draw(2)).prefix_len,
    ]
    assert seen == [8, 8, 8, 8]
    assert (len(key), len(world.cached_pages())) == (9, 2)


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        np.array,
        lambda tokens: array("q", tokens),
        lambda tokens: array("i", tokens),
        lambda tokens: np.array(tokens, dtype=np.int32),
        lambda tokens: memoryview(array("q", tokens)),
        lambda tokens: range(len(tokens)),
    ],
)
def test_equal_tokens_in_any_container_match(make):
    """L4: a list and a tuple of the same tokens were different keys."""
    world = make_world(4)
    tokens = list(range(8))
    world.insert(tokens)
    assert world.peek_len(make(tokens)) == 8


@pytest.mark.parametrize("tokens", [[1.0], np.array([True]), np.array([1.5]), ["1"], [2**63]])
def test_what_is_no_token_is_refused_at_the_key(tokens):
    """L4, L5: ids outside the key's width were cut down and matched others."""
    with pytest.raises(ValueError, match=r"token id"):
        RadixKey(tokens)


def test_wide_ids_are_never_cut():
    """L5: ids that agree in their low bits shared an entry."""
    world = make_world()
    wide = [65, 321, 2**31, 2**31 + 65, 2**40, 2**40 + 65, -1, 2**63 - 1, -(2**63)]
    for token in wide:
        assert world.insert([token]).prefix_len == 0
    assert [world.peek_len([token]) for token in wide] == [1] * len(wide)
    assert world.core.num_nodes() == len(wide)


def test_tokens_that_change_later_change_no_entry():
    """PR1: writing into the caller's array renamed what was cached."""
    world = make_world()
    tokens = array("q", range(10))
    key = RadixKey(tokens)
    world.cache.insert(InsertParams(key, pages=world.draw(10)))
    tokens[0] = 999
    assert (world.peek_len(range(10)), world.peek_len(tokens)) == (10, 0)


@pytest.mark.parametrize("is_bigram", [False, True])
def test_a_call_leaves_the_callers_key_as_it_was(is_bigram):
    """PR2: a key given to an insert was converted in place and lost a token."""
    world = make_world(is_bigram=is_bigram)
    key = world.key(range(10))
    before = (len(key), key.data, key.namespace)
    world.cache.insert(InsertParams(key, pages=world.draw(len(key))))
    world.cache.match_prefix(MatchPrefixParams(key))
    assert before == (len(key), key.data, key.namespace)


def test_slots_that_change_later_change_no_entry():
    """N1: the tree kept a view of the caller's slots."""
    world = make_world()
    slots = world.allocator.alloc(10)
    expected = slots.tolist()
    world.cache.insert(InsertParams(world.key(range(10)), value=slots))
    slots[0] = 777
    del slots
    assert world.match(range(10)).device_indices.tolist() == expected


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_million_tokens_extend_in_one_call_as_in_two(page_size):
    """M2: a prompt past a per-call limit could not be placed."""
    total = 2**20 + 5
    whole, halves = (make_paged(2**20 // page_size + 64, page_size) for _ in range(2))
    expected = extend(whole, [(0, total, -1)])
    first = extend(halves, [(0, 2**19 + 3, -1)])
    second = extend(halves, [(2**19 + 3, total, int(first[-1]))])
    assert np.array_equal(expected, np.concatenate([first, second]))
    assert whole.available_size() == halves.available_size()


@pytest.mark.parametrize(
    ("slot", "stride", "offset"),
    [(4_000_000, 576, 2_304_000_000), (14_340, 149_760, 2_147_558_400)],
)
def test_rows_times_a_stride_pass_31_bits(slot, stride, offset):
    """O1: an address past 2**31 wrapped, and the cache kept the slots that showed it."""
    placement = PageInterleavePlacement(PageShardSpec(0, 1, 1, 1, 1))
    rows = placement.local_index(np.array([slot], dtype=np.int32))
    assert (rows.dtype, (rows * stride).tolist()) == (np.int64, [offset])


def test_narrow_slots_are_widened_by_the_tree():
    """O1: int32 slots stay 32 bits wide until somebody multiplies them."""
    world = make_world(4)
    slots = world.allocator.alloc(8).astype(np.int32)
    world.cache.insert(InsertParams(world.key(range(8)), value=slots))
    found = world.match(range(8)).device_indices
    assert (found.dtype, ints(found)) == (np.int64, slots.tolist())
