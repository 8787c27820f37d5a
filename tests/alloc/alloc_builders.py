"""Builders and checks that the allocator tests share."""

from contextlib import contextmanager

import numpy as np

from alloc import (
    CPSharedPagedTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    PageInterleavePoolAllocator,
    TokenToKVPoolAllocator,
)


def make_token(size=16, *, device=None, need_sort=False, debug=False, kvcache=None):
    return TokenToKVPoolAllocator(size, None, device, kvcache, need_sort, debug=debug)


def make_paged(num_pages=16, page_size=4, *, device=None, need_sort=False, debug=False):
    return PagedTokenToKVPoolAllocator(
        num_pages * page_size, page_size, None, device, None, need_sort, debug=debug
    )


def make_interleave(
    pages_per_rank=32, page_size=16, shard_size=4, *, device=None, need_sort=False, debug=False
):
    return PageInterleavePoolAllocator(
        size=pages_per_rank * page_size,
        physical_page_size=page_size,
        shard_size=shard_size,
        dtype=None,
        device=device,
        kvcache=None,
        need_sort=need_sort,
        debug=debug,
    )


def make_lanes(
    pages_per_rank=8,
    page_size=4,
    cp_size=4,
    *,
    device=None,
    need_sort=False,
    debug=False,
    kvcache=None,
):
    physical = pages_per_rank * page_size
    return CPSharedPagedTokenToKVPoolAllocator(
        physical * cp_size,
        physical,
        page_size,
        None,
        device,
        kvcache,
        need_sort,
        cp_size,
        0,
        debug=debug,
    )


def extend(allocator, requests, bases=None, continues=None):
    """Call alloc_extend with (prefix, seq, last_loc) requests; bases is filled in place."""
    prefix, seq, last = (list(column) for column in zip(*requests, strict=True))
    arguments = {
        "prefix_lens": as_slots(allocator, prefix),
        "prefix_lens_cpu": prefix,
        "seq_lens": as_slots(allocator, seq),
        "seq_lens_cpu": seq,
        "last_loc": as_slots(allocator, last),
        "extend_num_tokens": sum(seq) - sum(prefix),
    }
    if isinstance(allocator, PageInterleavePoolAllocator):
        arguments |= {"rotation_bases": bases, "continues": continues}
    return allocator.alloc_extend(**arguments)


def new_chain(allocator, num_tokens, base):
    """Take a new chain of tokens under a base."""
    return extend(allocator, [(0, num_tokens, -1)], [base])


def decode(allocator, requests):
    """Call alloc_decode with (seq_len, last_loc) requests."""
    seq, last = (list(column) for column in zip(*requests, strict=True))
    return allocator.alloc_decode(as_slots(allocator, seq), seq, as_slots(allocator, last))


def as_slots(allocator, values):
    """Make slots of the allocator's own kind."""
    return allocator.io.from_host(np.array(values, dtype=np.int64))


def ints(slots):
    """Return slots, pages or any integers as a list of Python ints."""
    on_host = slots if isinstance(slots, np.ndarray | list) else slots.cpu()
    return np.asarray(on_host).tolist()


def pages_of(allocator, slots):
    """Return the page of every page-long run of slots, in order."""
    return [slot // allocator.page_size for slot in ints(slots)[:: allocator.page_size]]


def owners(allocator, slots):
    """Return the owner of every page-long run of slots by the rule ``l % N``."""
    return [page % allocator.shard_size for page in pages_of(allocator, slots)]


def slots_of(allocator, pages):
    """Return all slots of whole pages, as a list."""
    size = allocator.page_size
    return [page * size + offset for page in pages for offset in range(size)]


def snapshot(allocator):
    """Return everything about an allocator that a caller can see."""
    free_list = allocator.free_list
    classes = range(allocator.layout.num_classes)
    return {
        "digest": allocator.state_digest(),
        "free": [ints(free_list.free_pages_of(c)) for c in classes],
        "staged": [ints(free_list.staged_pages_of(c)) for c in classes],
        "states": ints(free_list.states()),
        "available": allocator.available_size(),
        "text": allocator.allocator_state_str(),
        "group": free_list.group_is_open,
    }


@contextmanager
def unchanged(allocator):
    """Assert that the block changes nothing that a caller can see."""
    before = snapshot(allocator)
    yield
    assert snapshot(allocator) == before
    allocator.check_invariants()
