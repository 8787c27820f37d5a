"""Random schedules that every replica runs: ``python -m tests.replicas.schedules MODE``.

Prints one line a step. The mode changes only what must not matter: garbage collection and clocks;
the caller varies the hash seed. Namespaces are strings, whose hashes differ between the processes.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from alloc import PageInterleavePoolAllocator, PageState
from radix import POLICIES, CacheInitParams, UnifiedRadixCache, alloc_for_extend, preview_extend
from tests.builders import FakeReq, World, make_req, make_world

STEPS = 120
SPACES = [None, "lora", "tenant"]
SHARDED: dict[str, dict[str, Any]] = {
    "chain with leases": {},
    "chain without leases": {"use_leases": False},
    "seam": {"rotation": "seam"},
}


def prompt(rng: random.Random, page_size: int) -> list[int]:
    """Return a few pages over two letters and part of one more."""
    tokens = [letter for _ in range(rng.randrange(1, 6)) for letter in [rng.randrange(2)] * 4]
    return tokens + [7] * rng.randrange(page_size)


class Watch:
    """Pages that went, in order of their release."""

    def __init__(self, world: World) -> None:
        self.victims: list[int] = []
        release = world.allocator.release_cached

        def spy(pages: Any) -> None:
            self.victims += np.asarray(pages).tolist()
            release(pages)

        world.allocator.release_cached = spy  # type: ignore[method-assign]


def run_plain(policy: str, seed: int) -> Iterator[str]:
    """Match, insert, lock, evict, finish and abort on an unsharded pool."""
    rng = random.Random(f"{policy}{seed}")
    world = make_world(4, 24, policy, rows=6, need_sort=policy == "slru")
    watch, running, receipts = Watch(world), list[FakeReq](), list[Any]()
    for step in range(STEPS):
        tokens, space = prompt(rng, 4), rng.choice(SPACES)
        act = rng.randrange(8)
        if act == 0:
            world.match(tokens, space, peek=rng.random() < 0.3)
        elif act == 1 and world.free_pages() >= len(tokens) // 4:
            world.insert(tokens, extra_key=space, priority=rng.randrange(3))
        elif act == 2:
            receipts.append(world.lock(tokens))
        elif act == 3 and receipts:
            world.cache.dec_lock_ref(receipts.pop(rng.randrange(len(receipts))))
        elif act == 4:
            world.evict(rng.randrange(16))
        elif act == 5 and running:
            req = running.pop(rng.randrange(len(running)))
            world.finish(req, kv_len_to_handle=req.fill_len, is_insert=rng.random() < 0.8)
        elif act == 6 and running:
            world.cache.abort(running.pop(rng.randrange(len(running))))
        elif len(running) < 6:
            req = make_req(tokens, extra_key=space, priority=rng.randrange(3))
            world.start(req)
            need = world.pages_needed(req, len(tokens) - req.fill_len)
            world.evict(max(0, need - world.free_pages()) * 4)
            if world.extend(req, len(tokens) - req.fill_len):
                world.cache.cache_unfinished_req(req)
            running.append(req)
        yield f"{step} {world.cache.state_digest()} victims={watch.victims}"
        watch.victims.clear()
    world.check(*running)


def make_sharded(shard_size: int, **options: Any) -> World:
    """Make a world of page 4 with 8 pages a rank."""
    world = make_world(4, 8, shard_size=shard_size, need_sort=True, rows=8)
    params = CacheInitParams(False, world.pool, world.allocator, 4, **options)
    world.cache = UnifiedRadixCache(params)
    return world


def run_sharded(name: str, seed: int) -> Iterator[str]:
    """Plan each batch before the last one is inserted; abort and retract some in between."""
    rng = random.Random(f"{name}{seed}")
    world = make_sharded(4, **SHARDED[name])
    watch, queue, placed = Watch(world), list[FakeReq](), list[FakeReq]()
    for step in range(STEPS):
        while len(queue) < 3:
            queue.append(make_req(prompt(rng, 4), extra_key=rng.choice(SPACES)))
        batch = plan(world, rng, queue)
        bases = [req.kv_rotation_base for req in batch]
        queue = insert(world, rng, placed) + [req for req in queue if req not in batch]
        placed = batch
        assert isinstance(world.allocator, PageInterleavePoolAllocator)
        free = [pages.tolist() for pages in world.allocator.class_free_pages]
        held = world.allocator.page_census()[PageState.HELD]
        rows = [world.row(req) for req in placed]
        yield (
            f"{step} {world.cache.state_digest()} victims={watch.victims} bases={bases} "
            f"free={free} held={held} rows={rows}"
        )
        watch.victims.clear()
    world.check(*queue, *placed)


def plan(world: World, rng: random.Random, queue: list[FakeReq]) -> list[FakeReq]:
    """Match and place some of the queue; the batch shrinks until it fits."""
    batch = queue[: rng.randrange(1, 4)]
    for req in batch:
        if req.kv.req_pool_idx is None:
            req.fill_len = len(req.tokens())
            world.cache.match_req(req)
        start = len(req.prefix_indices)
        req.fill_len = min(len(req.tokens()), start + 4 * rng.randrange(1, 5))
    while batch and not preview_extend(world.cache, batch).fits:
        assert alloc_for_extend(world.cache, batch) is None
        req = batch.pop()
        if req.kv.req_pool_idx is None:
            world.cache.retract(req)
        else:
            req.fill_len = len(req.prefix_indices)
    if batch:
        assert alloc_for_extend(world.cache, batch) is not None
    return batch


def insert(world: World, rng: random.Random, placed: list[FakeReq]) -> list[FakeReq]:
    """Cache, finish, abort or retract what was placed a step ago; returns who goes on."""
    left: list[FakeReq] = []
    for req in placed:
        fate = rng.random()
        if fate < 0.1:
            world.cache.abort(req)
        elif fate < 0.2:
            world.cache.retract(req)
            left.append(req)
        elif req.fill_len < len(req.tokens()):
            world.cache.cache_unfinished_req(req)
            left.append(req)
        else:
            world.finish(req)
    return left


def schedules(seed: int) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield every schedule with its name."""
    for policy in POLICIES:
        yield policy, run_plain(policy, seed)
    for name in SHARDED:
        yield name, run_sharded(name, seed)


def use_mode(mode: str) -> Callable[[int], object]:
    """Set up what must not matter; returns what to do after each step."""
    if mode == "no gc":
        gc.disable()
    if mode == "clock stands still":
        for clock in ("time", "monotonic", "perf_counter"):
            setattr(time, clock, lambda: 0.0)
    if mode == "gc often":
        return lambda step: gc.collect() if step % 10 == 0 else None
    return lambda step: None


def main() -> None:
    after = use_mode(sys.argv[1])
    for name, lines in schedules(seed=1):
        for step, line in enumerate(lines):
            sys.stdout.write(f"{name}|{line}\n")
            after(step)


if __name__ == "__main__":
    main()
