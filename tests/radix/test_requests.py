"""The request paths (BEHAVIOUR 44, 45; CONTRACT 79, 87-89; DECISIONS 19)."""

from __future__ import annotations

import numpy as np
import pytest

from alloc import PageState
from radix import InsertParams
from tests.builders import BareKv, FakeKv, make_req, make_world

KVS = [FakeKv, BareKv]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_unfinished_request_gets_the_canonical_slots(page_size, device):
    """Duplicates are freed, the row is rewritten, the lock moves, the marks are set."""
    if device:
        pytest.importorskip("torch")
    world = make_world(page_size, device=device)
    first, second = make_req(range(12)), make_req(range(12))
    for req in (first, second):
        world.start(req)
        world.extend(req, 12 if req is first else 10)
    own = world.row(second)
    world.cache.cache_unfinished_req(first)
    world.check(first, second)
    world.cache.cache_unfinished_req(second)
    whole = 10 // page_size
    canonical = world.row(first)[:whole] + own[whole:]
    assert canonical == world.row(second)
    assert world.slots(canonical)[:10] == second.prefix_indices.tolist()
    row = world.pool.req_to_token[second.kv.req_pool_idx, :10]
    assert world.slots(canonical)[:10] == row.tolist()
    assert whole * page_size == second.kv.cache_protected_len
    assert world.core.node_by_id(second.last_node).end == whole
    assert world.allocator.free_list.all_in(np.array(own[:whole]), PageState.FREE)
    assert world.core.check_receipt(second.lock_receipt).id == second.last_node
    world.check(first, second)


def test_an_unfinished_request_protects_what_it_cached():
    """Its path can't be evicted until it is done; the tail page stays its own."""
    world = make_world(4)
    req = make_req(range(10))
    world.start(req)
    world.extend(req, 10)
    world.cache.cache_unfinished_req(req)
    assert world.sizes() == (0, 8)
    assert world.evict(100) == 0
    assert world.row(req)[2:] == world.held_pages()
    world.finish(req)
    assert world.sizes() == (8, 0)
    world.check()


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 33])
def test_a_finished_request_leaves_its_whole_pages_cached(page_size, length, kv):
    """The tail that is no whole page is free, the lock is gone."""
    world = make_world(page_size)
    req = make_req(range(length), kv=kv())
    world.start(req)
    world.extend(req, length)
    row = world.row(req)
    world.finish(req)
    whole = length // page_size
    assert row[:whole] == world.match(range(length)).pages.tolist()
    assert world.sizes() == (whole * page_size, 0)
    assert world.num_pages - whole == world.free_pages()
    assert (req.lock_receipt, req.last_node) == (None, None)
    world.check()


@pytest.mark.parametrize("kv", KVS)
def test_a_request_that_is_not_inserted_frees_all_but_its_prefix(kv):
    """What was matched stays cached."""
    world = make_world(4)
    world.insert(range(8))
    req = make_req(range(22), kv=kv())
    assert world.start(req) == 8
    world.extend(req, 14)
    world.finish(req, is_insert=False)
    assert world.sizes() == (8, 0)
    assert world.free_pages() == world.num_pages - 2
    world.check()


def test_a_finished_request_frees_the_duplicates_of_what_another_cached():
    """Every slot has one owner afterwards."""
    world = make_world(4)
    first, second = make_req(range(12)), make_req(range(14))
    for req in (first, second):
        world.start(req)
        world.extend(req, len(req.tokens()))
    pages = world.row(first)
    world.finish(first)
    world.check(second)
    world.finish(second)
    assert pages == world.match(range(14)).pages.tolist()
    assert world.free_pages() == world.num_pages - 3
    world.check()


def test_only_the_handled_length_is_cached():
    """Pages past it are freed as far as ``kv.allocated_len`` says they exist."""
    world = make_world(4)
    req = make_req(range(24))
    world.start(req)
    world.extend(req, 24)
    world.finish(req, kv_len_to_handle=10)
    assert world.peek_len(range(24)) == 8
    assert world.free_pages() == world.num_pages - 2
    world.check()


def test_without_an_allocated_length_the_pages_past_the_handled_stay_with_the_request():
    """They are freed with the row's pages by abort."""
    world = make_world(4)
    req = make_req(range(24), kv=BareKv())
    world.start(req)
    world.extend(req, 24)
    row = world.row(req)
    world.cache.cache_finished_req(req, kv_len_to_handle=10)
    assert row[3:] == world.held_pages()
    world.cache.abort(req)
    assert world.held_pages() == []
    world.check()


@pytest.mark.parametrize("length", [-1, 13])
def test_a_handled_length_outside_the_request_is_refused(length):
    """Nothing changed."""
    world = make_world(4)
    req = make_req(range(12))
    world.start(req)
    world.extend(req, 12)
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match=f"kv_len_to_handle={length}"):
        world.cache.cache_finished_req(req, kv_len_to_handle=length)
    assert before == world.cache.state_digest()
    world.check(req)


def test_outputs_are_part_of_what_is_cached():
    """A second turn finds prompt and answer."""
    world = make_world(4)
    req = make_req(range(8), output_ids=[50, 51, 52, 53, 54])
    world.run(req)
    world.finish(req)
    assert world.peek_len([*range(8), 50, 51, 52, 53, 54, 55]) == 12


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 16, 100])
def test_chunks_of_any_length_end_in_the_same_tree(page_size, chunk):
    """Unaligned chunk ends leave nothing behind, and count no hits."""
    world = make_world(page_size, 64)
    req = make_req(range(50))
    world.run(req, chunk)
    world.finish(req)
    whole = 50 // page_size * page_size
    assert (whole, 0) == world.sizes()
    assert whole == world.peek_len(range(50))
    assert all(node.hits == 0 for node in world.core.nodes())
    world.check()


@pytest.mark.parametrize("way", ["abort", "retract", "drop"])
@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4, 5, 6, 7])
def test_leaving_at_any_point_leaves_no_page_behind(stop, kv, way):
    """Only what the tree has stays; the row is back too."""
    world = make_world(4)
    world.insert(range(4))
    req = make_req(range(22), kv=kv())
    steps = [
        lambda: world.start(req),
        *[lambda: world.extend(req, 5), lambda: world.cache.cache_unfinished_req(req)] * 3,
    ]
    for step in steps[:stop]:
        step()
    if way == "drop":
        world.finish(req, kv_len_to_handle=req.fill_len, is_insert=False)
    else:
        getattr(world.cache, way)(req)
    assert world.held_pages() == []
    assert world.sizes()[1] == 0
    assert world.pool.available_size() == world.pool.size
    assert req.kv.req_pool_idx is None
    world.check()


def test_abort_resets_all_progress_marks_together():
    """The request can be planned again."""
    world = make_world(4)
    req = make_req(range(10))
    world.run(req, 5)
    world.cache.retract(req)
    kv = req.kv
    assert (kv.req_pool_idx, kv.cache_protected_len, kv.allocated_len) == (None, 0, 0)
    assert (req.last_node, req.lock_receipt, req.kv_rotation_base) == (None, None, None)
    assert len(req.prefix_indices) == 0
    assert world.run(req, 3) == 4
    world.finish(req)
    world.check()


@pytest.mark.parametrize("second", ["finish", "abort", "retract"])
@pytest.mark.parametrize("first", ["finish", "abort", "retract"])
def test_leaving_twice_does_nothing_the_second_time(first, second):
    """Every pair of ways out is idempotent."""
    world = make_world(4)
    world.insert(range(4))
    req = make_req(range(10))
    world.run(req)
    leave = {"finish": world.finish, "abort": world.cache.abort, "retract": world.cache.retract}
    leave[first](req)
    before = world.cache.state_digest()
    leave[second](req)
    assert before == world.cache.state_digest()
    world.check()


def test_a_request_without_node_and_lock_stands_at_the_root():
    """Both calls take it; nothing is known of its prefix."""
    world = make_world(4)
    req = make_req(range(8), kv=BareKv(req_pool_idx=world.pool.alloc(1)[0]), fill_len=8)
    world.pool.write(req.kv.req_pool_idx, 0, pages=world.draw(2))
    world.cache.cache_unfinished_req(req)
    assert world.sizes() == (0, 8)
    world.cache.dec_lock_ref(req.lock_receipt)
    req.last_node = req.lock_receipt = None
    world.cache.cache_finished_req(req)
    assert world.sizes() == (8, 0)
    world.check()


def test_a_row_written_behind_the_mirror_is_read_from_the_table():
    """Callers may fill ``req_to_token`` themselves; nothing is lost when they then abort."""
    world = make_world(4)
    world.insert(range(8))
    req = make_req(range(10), kv=BareKv(req_pool_idx=world.pool.alloc(1)[0]), fill_len=10)
    pages = world.draw(3)
    world.pool.req_to_token[req.kv.req_pool_idx, :10] = world.slots(pages)[:10]
    world.cache.cache_unfinished_req(req)
    assert pages[2:].tolist() == world.held_pages()
    assert world.match(range(8)).device_indices.tolist() == req.prefix_indices.tolist()[:8]
    world.cache.abort(req)
    assert world.held_pages() == []
    world.check()


def test_a_request_without_a_row_can_not_be_cached():
    """The message says what to do first."""
    world = make_world(4)
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="no row"):
        world.cache.cache_unfinished_req(make_req(range(8), fill_len=8))
    assert before == world.cache.state_digest()


def test_a_cache_without_rows_says_so():
    """Match, insert and evict work without a pool; requests don't."""
    world = make_world(4)
    world.cache.req_to_token_pool = None
    req = make_req(range(8), kv=BareKv(req_pool_idx=0), fill_len=8)
    with pytest.raises(RuntimeError, match="ReqToTokenPool"):
        world.cache.cache_unfinished_req(req)
    assert world.insert(range(8)).prefix_len == 0


def test_requests_use_their_namespace():
    """``extra_key`` and ``cache_salt`` reach the tree on every path."""
    world = make_world(4)
    for extra_key, cache_salt in [(None, None), ("a", None), (None, "a")]:
        req = make_req(range(10), extra_key=extra_key, cache_salt=cache_salt)
        assert world.run(req, 5) == 0
        world.finish(req)
    assert world.cache.total_size() == 24
    for extra_key, cache_salt in [(None, None), ("a", None), (None, "a")]:
        assert world.peek_len(range(8), extra_key, cache_salt) == 8
    world.check()


def test_a_request_s_priority_reaches_the_tree():
    """Both cache calls pass it on."""
    world = make_world(4, policy="priority")
    req = make_req(range(8), priority=7)
    world.run(req, 4)
    world.cache.cache_unfinished_req(req)
    assert world.node(range(8)).priority == 7
    world.finish(req)
    world.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_bigram_requests_cache_one_unit_less_than_tokens(page_size):
    """The last token's KV belongs to a bigram that is not there yet."""
    world = make_world(page_size, is_bigram=True)
    req = make_req(range(9))
    world.run(req, 5)
    world.cache.cache_unfinished_req(req)
    assert req.kv.cache_protected_len == 8
    world.check(req)
    world.finish(req)
    assert world.sizes() == (8, 0)
    assert world.peek_len(range(9)) == 8
    world.check()


def test_the_second_of_two_equal_chunks_changes_nothing_but_the_clock():
    """One lock, no frees, no hits."""
    world = make_world(16)
    req = make_req(range(40))
    world.start(req)
    world.extend(req, 40)
    world.cache.cache_unfinished_req(req)
    before = (world.allocator.state_digest(), world.pool.state_digest(), world.row(req))
    world.cache.cache_unfinished_req(req)
    assert before == (world.allocator.state_digest(), world.pool.state_digest(), world.row(req))
    assert len(world.core.receipts()) == 1
    assert world.node(range(32)).hits == 0
    world.check(req)


def test_match_req_matches_all_but_the_last_token():
    """Its logits have to be computed; a cap can be given."""
    world = make_world(4)
    world.insert(range(12))
    req = make_req(range(12), fill_len=12)
    assert world.cache.match_req(req) == 8
    assert (req.kv.cache_protected_len, world.sizes()) == (8, (4, 8))
    assert world.cache.match_req(req, max_prefix_len=5) == 4
    assert world.sizes() == (8, 4)
    assert len(world.core.receipts()) == 1
    assert world.node(range(4)).hits == 1
    world.cache.abort(req)
    assert world.sizes() == (12, 0)
    world.check()


def test_match_req_refuses_a_request_with_a_row():
    """Its pages past the prefix would be lost."""
    world = make_world(4)
    req = make_req(range(8))
    world.run(req)
    with pytest.raises(ValueError, match="retract"):
        world.cache.match_req(req)
    world.check(req)


def test_a_request_that_lived_across_a_reset_is_refused_with_nothing_changed():
    """Its prefix may be another's by now; abort gives back the rest."""
    world = make_world(4)
    world.insert(range(4))
    req = make_req(range(10))
    world.start(req)
    world.extend(req, 6)
    world.cache.cache_unfinished_req(req)
    world.cache.reset()
    # Pages of the request's old prefix go to somebody else.
    other = world.draw(world.free_pages())
    before = world.cache.state_digest()
    for call in (world.cache.cache_unfinished_req, world.cache.cache_finished_req):
        with pytest.raises(ValueError, match="before a reset"):
            call(req)
        assert before == world.cache.state_digest()
    world.cache.abort(req)
    assert sorted(other.tolist()) == world.held_pages()
    assert world.pool.available_size() == world.pool.size
    world.allocator.free_pages(other)
    world.check()


def test_an_insert_by_hand_and_one_by_a_request_are_the_same():
    """Request paths add nothing of their own to the tree."""
    by_hand, by_req = make_world(4), make_world(4)
    pages = by_hand.draw(2)
    by_hand.cache.insert(InsertParams(by_hand.key(range(8)), pages=pages))
    req = make_req(range(8))
    by_req.start(req)
    by_req.extend(req, 8)
    by_req.finish(req)
    assert by_hand.match(range(8)).pages.tolist() == by_req.match(range(8)).pages.tolist()
    assert by_hand.core.num_nodes() == by_req.core.num_nodes()
