"""The cache and the scheduler over a pool of owner lanes: a stock draw takes any lane."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import radix
from alloc import (
    CPSharedPagedTokenToKVPoolAllocator,
    PageState,
    ReqToTokenPool,
    build_in_seq_page_compute_owners,
)
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    UnifiedRadixCache,
    alloc_for_extend,
    evict_until_allocatable,
    preview_extend,
)
from tests.builders import World, make_req, make_world


def make_lane_world(page_size=2, pages_per_rank=8, cp_size=4, *, device=None, need_sort=False):
    physical = page_size * pages_per_rank
    allocator = CPSharedPagedTokenToKVPoolAllocator(
        physical * cp_size,
        physical,
        page_size,
        None,
        device,
        None,
        need_sort,
        cp_size,
        0,
        debug=True,
    )
    pool = ReqToTokenPool(8, 256, device, page_size=page_size, debug=True)
    cache = UnifiedRadixCache(CacheInitParams(False, pool, allocator, page_size))
    return World(allocator, pool, cache, pages_per_rank * cp_size)


@pytest.fixture(params=[None, "cpu"], ids=["host", "cpu"])
def device(request):
    if request.param is not None:
        pytest.importorskip("torch")
    return request.param


def planned(world, tokens):
    """Match a request and set its whole prompt as the chunk."""
    req = make_req(tokens)
    req.fill_len = len(tokens)
    world.cache.match_req(req)
    return req


def prefill_by_owners(world, tokens):
    """Insert a prompt whose pages lie on the ranks that compute them; returns what was cached."""
    allocator, ps = world.allocator, world.page_size
    match = world.match(tokens)
    cached = match.device_prefix_len
    whole = len(tokens) // ps * ps
    owners = build_in_seq_page_compute_owners(cached, whole, ps, allocator.cp_size)
    receipt = world.cache.inc_lock_ref(match.last_device_node)
    deficits = allocator.compute_owner_lane_stats(owners)[2]
    if any(deficits):
        world.cache.evict(EvictParams(sum(deficits) * ps, class_deficits=tuple(deficits)))
    pages = allocator.alloc_owner_pages(owners)
    if pages is not None:
        world.cache.insert(
            InsertParams(world.key(tokens[:whole]), pages=np.concatenate([match.pages, pages]))
        )
    world.cache.dec_lock_ref(receipt)
    return None if pages is None else cached


def test_the_radix_package_never_asks_for_a_layout():
    """Nothing in radix names an owner-lane pool, or tells layouts apart by their first page."""
    for path in Path(radix.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for name in ("cp_size", "layout.first_page", "owner_lanes", "CPShared"):
            assert name not in text, (path, name)


def test_match_insert_and_evict_work_on_owned_pages():
    """Zigzag pages are cached, matched, and evicted like any others; B36, C178."""
    world = make_lane_world()
    prompt = list(range(24))
    assert prefill_by_owners(world, prompt) == 0
    match = world.match(prompt)
    owners = [(page - 1) % 4 for page in match.pages.tolist()]
    assert owners == build_in_seq_page_compute_owners(0, 24, 2, 4).tolist()
    assert prefill_by_owners(world, [*prompt[:16], 99, 98, 97, 96]) == 16
    assert world.cache.rotation_base_of(world.match(prompt).last_device_node) is None
    world.check()
    assert world.evict(4) == 4
    assert world.evict(1000) == 24
    assert world.free_pages() == 32
    world.check()


def test_requests_run_through_the_scheduler(device):
    """alloc_for_extend, chunks, decode, finish: nothing is left behind; B36, B44."""
    world = make_lane_world(device=device)
    cache = world.cache
    reqs = [planned(world, range(start, start + 13)) for start in (0, 100)]
    placed = alloc_for_extend(cache, reqs)
    assert placed.rotation_bases == [None, None]
    assert placed.pages.tolist() == list(range(1, 15))
    world.check(*reqs)
    for req in reqs:
        cache.cache_unfinished_req(req)
        world.check(*reqs)
        req.output_ids.append(7)
        req.fill_len += 1
    assert alloc_for_extend(cache, reqs).pages.tolist() == []
    for req in reqs:
        world.finish(req)
    again = planned(world, [*range(100, 113), 7, 8])
    assert len(again.prefix_indices) == 14
    cache.abort(again)
    world.check()
    assert world.held_pages() == []
    assert cache.total_size() == 28


def test_a_batch_evicts_exactly_what_the_whole_pool_lacks():
    """A stock draw needs pages, not lanes: the least recent pages go, no more than are missing."""
    world = make_lane_world(pages_per_rank=2)  # 8 pages
    for start in (0, 100, 200):
        world.insert(range(start, start + 4))
    req = planned(world, range(300, 310))
    preview = preview_extend(world.cache, [req])
    assert preview.fits
    assert preview.pages_by_class.sum() == 5
    placed = alloc_for_extend(world.cache, [req])
    assert placed.num_tokens_evicted == 6
    assert [world.peek_len(range(start, start + 4)) for start in (0, 100, 200)] == [0, 2, 4]
    world.check(req)


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_batch_fits_exactly_when_free_and_evictable_pages_suffice(need_sort):
    """Room counts over all lanes together, however uneven they are; None changes nothing."""
    for wanted in range(1, 10):
        world = make_lane_world(page_size=1, pages_per_rank=4, cp_size=2, need_sort=need_sort)
        held = world.allocator.alloc_owner_pages([0, 0, 0, 1])
        cached = world.allocator.alloc_owner_pages([1, 1])
        world.cache.insert(InsertParams(world.key([1, 2]), pages=cached))
        world.allocator.free_pages(held[3:])
        req = planned(world, range(100, 100 + wanted))
        before = world.cache.state_digest()
        assert preview_extend(world.cache, [req]).fits == (wanted <= 5)
        placed = alloc_for_extend(world.cache, [req])
        if wanted <= 5:
            assert placed.num_tokens_evicted == max(0, wanted - 3)
        else:
            assert placed is None
            assert world.cache.state_digest() == before
        world.cache.check_invariants()


def owned(world, req):
    """Return the compute owners of a planned request's new pages."""
    prefix, stop = len(req.prefix_indices), len(req.get_fill_ids())
    return build_in_seq_page_compute_owners(prefix, stop, world.page_size, world.allocator.cp_size)


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_batch_with_owners_draws_just_those_lanes(device, need_sort):
    """The pages of alloc_owner_pages, request by request, cached and matched as any others."""
    world = make_lane_world(device=device, need_sort=need_sort)
    reqs = [planned(world, range(start, start + 13)) for start in (0, 100)]
    owners = [owned(world, req) for req in reqs]
    preview = preview_extend(world.cache, reqs, page_owners=owners)
    assert preview.fits
    assert preview.pages_by_class.tolist() == np.bincount(np.concatenate(owners)).tolist()
    placed = alloc_for_extend(world.cache, reqs, page_owners=owners)
    assert ((placed.pages - 1) % 4).tolist() == np.concatenate(owners).tolist()
    world.check(*reqs)
    for req in reqs:
        world.finish(req)
    again = planned(world, [*range(12), 50, 51, 52])
    assert len(again.prefix_indices) == 12
    placed = alloc_for_extend(world.cache, [again], page_owners=[owned(world, again).tolist()])
    assert ((placed.pages - 1) % 4).tolist() == [0, 1]
    world.finish(again)
    world.check()


@pytest.mark.parametrize("aimed", [True, False])
def test_room_is_made_in_the_lanes_that_are_short(aimed):
    """An aimed eviction leaves the older chain, of which nothing lies in the lane wanted."""
    world = make_lane_world(page_size=1, pages_per_rank=2, cp_size=2)
    world.cache.aimed_eviction = aimed
    for tokens, lanes in (([1, 2], [0, 0]), ([3, 4], [1, 1])):
        pages = world.allocator.alloc_owner_pages(lanes)
        world.cache.insert(InsertParams(world.key(tokens), pages=pages))
    req = planned(world, [7])
    placed = alloc_for_extend(world.cache, [req], page_owners=[[1]])
    assert (placed.pages - 1) % 2 == [1]
    assert placed.num_tokens_evicted == (1 if aimed else 3)
    assert world.peek_len([1, 2]) == (2 if aimed else 0)
    assert world.peek_len([3, 4]) == 1
    world.check(req)


def test_a_lane_that_eviction_cannot_fill_refuses_the_batch():
    """None, and nothing changed, however full the other lanes are."""
    world = make_lane_world(page_size=1, pages_per_rank=2, cp_size=2)
    req = planned(world, [7, 8, 9])
    before = world.cache.state_digest()
    assert not preview_extend(world.cache, [req], page_owners=[[1, 1, 1]]).fits
    assert alloc_for_extend(world.cache, [req], page_owners=[[1, 1, 1]]) is None
    assert world.cache.state_digest() == before


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([[0, 1]], r"has \[2\] entries for requests of \[3\] new pages"),
        ([[0, 1, 0], []], r"has \[3, 0\] entries for requests of \[3\]"),
        ([[0, 1, 2]], r"must be in \[0, 2\), got 2"),
        ([[0, -1, 2]], r"must be in \[0, 2\), got -1"),
        ([[0.0, 1.0, 0.0]], "pass integers"),
    ],
)
def test_owners_that_make_no_sense_are_refused(owners, message):
    """ValueError, and nothing changed."""
    world = make_lane_world(page_size=1, pages_per_rank=2, cp_size=2)
    req = planned(world, [7, 8, 9])
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match=message):
        alloc_for_extend(world.cache, [req], page_owners=owners)
    assert world.cache.state_digest() == before


def test_a_pool_with_rotation_bases_takes_no_owners():
    """Bases say where its pages lie."""
    world = make_world(page_size=1, shard_size=2)
    req = planned(world, [7, 8])
    with pytest.raises(ValueError, match="rotation bases say where"):
        preview_extend(world.cache, [req], page_owners=[[0, 1]])


def test_locked_pages_are_no_room():
    """A batch that only locked pages could serve is refused."""
    world = make_lane_world(page_size=1, pages_per_rank=2, cp_size=2)
    world.insert([1, 2, 3])
    receipt = world.lock([1, 2, 3])
    req = planned(world, [7, 8])
    assert alloc_for_extend(world.cache, [req]) is None
    world.cache.dec_lock_ref(receipt)
    assert alloc_for_extend(world.cache, [req]).num_tokens_evicted == 1


def test_evict_until_allocatable_counts_all_lanes():
    """Its size is the sum of the lanes: one round of exactly what is short."""
    world = make_lane_world(pages_per_rank=2)
    for start in (0, 100, 200, 300):
        world.insert(range(start, start + 4))
    assert evict_until_allocatable(world.cache, world.allocator, 6)
    assert world.allocator.available_size() == 6
    assert not evict_until_allocatable(world.cache, world.allocator, 1000)


def test_a_short_lane_evicts_for_its_deficit_and_serves():
    """compute_owner_lane_stats gives class_deficits: only leaves of that lane go; B32, B73."""
    world = make_lane_world(page_size=1, pages_per_rank=2, cp_size=2)
    for token, owner in enumerate((0, 1, 0, 1)):
        pages = world.allocator.alloc_owner_pages([owner])
        world.cache.insert(InsertParams(world.key([token]), pages=pages))
    required, available, deficits = world.allocator.compute_owner_lane_stats([1, 1])
    assert (required, available, deficits) == ([0, 2], [0, 0], [0, 2])
    world.cache.evict(EvictParams(2, class_deficits=tuple(deficits)))
    assert world.allocator.alloc_owner_pages([1, 1]).tolist() == [2, 4]
    assert [world.peek_len([token]) for token in range(4)] == [1, 0, 1, 0]
    world.cache.check_invariants()


def test_a_lane_with_nothing_to_evict_is_a_miss():
    """The lane's pages are all in use: the eviction frees nothing, the draw is None; B73."""
    world = make_lane_world(page_size=1, pages_per_rank=2, cp_size=2)
    world.allocator.alloc_owner_pages([1, 1])
    world.cache.insert(InsertParams(world.key([5]), pages=world.allocator.alloc_owner_pages([0])))
    deficits = world.allocator.compute_owner_lane_stats([1])[2]
    assert world.cache.evict(EvictParams(1, class_deficits=tuple(deficits))).num_tokens_evicted == 0
    assert world.allocator.alloc_owner_pages([1]) is None
    assert world.peek_len([5]) == 1


def test_a_base_must_be_true_of_the_lanes():
    """A rotation base given for pages that lie elsewhere is an error; a true one is kept."""
    world = make_lane_world(page_size=1)
    pages = world.allocator.alloc_owner_pages([2, 3, 0])
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="rotation_base=1"):
        world.cache.insert(InsertParams(world.key([1, 2, 3]), pages=pages, rotation_base=1))
    assert world.cache.state_digest() == before
    world.cache.insert(InsertParams(world.key([1, 2, 3]), pages=pages, rotation_base=2))
    world.check()
    assert world.evict(3) == 3


class LaneMachine(RuleBasedStateMachine):
    """Requests by stock draws and prompts by owned draws share one pool; nothing is lost."""

    @initialize(
        cp_size=st.sampled_from([1, 2, 3]),
        page_size=st.sampled_from([1, 2]),
        need_sort=st.booleans(),
    )
    def build(self, cp_size, page_size, need_sort):
        self.world = make_lane_world(page_size, 12 // cp_size, cp_size, need_sort=need_sort)
        self.live = []

    def prompt(self, family, length):
        return [family * 100 + i for i in range(length)]

    @rule(family=st.integers(0, 3), length=st.integers(1, 14))
    def start(self, family, length):
        world = self.world
        if len(self.live) < 4:
            req = planned(world, self.prompt(family, length))
            preview = preview_extend(world.cache, [req])
            before, free = world.cache.state_digest(), world.free_pages()
            placed = alloc_for_extend(world.cache, [req])
            assert preview.fits == (placed is not None)
            if placed is None:
                assert world.cache.state_digest() == before
                world.cache.abort(req)
            else:
                missing = max(0, len(placed.pages) - free)
                assert placed.num_tokens_evicted == missing * world.page_size
                self.live.append(req)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 3), how=st.sampled_from(["chunk", "finish", "drop", "abort"]))
    def go_on(self, pick, how):
        req = self.live[pick % len(self.live)]
        if how == "chunk":
            self.world.cache.cache_unfinished_req(req)
            return
        self.live.remove(req)
        if how == "abort":
            self.world.cache.abort(req)
        else:
            self.world.finish(req, is_insert=how == "finish")

    @rule(family=st.integers(0, 3), length=st.integers(1, 14))
    def prefill(self, family, length):
        prompt = self.prompt(family, length)
        if prefill_by_owners(self.world, prompt) is not None:
            assert self.world.peek_len(prompt) == length // self.world.page_size * (
                self.world.page_size
            )

    @rule(num_tokens=st.integers(0, 9))
    def evict(self, num_tokens):
        self.world.evict(num_tokens)

    @rule(num_tokens=st.integers(0, 30))
    def make_room(self, num_tokens):
        world = self.world
        room = world.allocator.available_size() + world.cache.evictable_size()
        enough = evict_until_allocatable(world.cache, world.allocator, num_tokens)
        assert enough == (num_tokens <= room)

    @invariant()
    def sound(self):
        if hasattr(self, "world"):
            self.world.check(*self.live)
            census = self.world.allocator.page_census()
            assert sum(census.values()) == self.world.num_pages
            if not self.live:
                assert census[PageState.HELD] == 0


LaneMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLaneMachine = LaneMachine.TestCase
