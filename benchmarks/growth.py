"""How the tree's costs grow: with leaves, with depth, with children, with the length of a key.

    python -m benchmarks.growth [--leaves 10000,100000,1000000] [--policy lru,...] [--json F]

Every figure is the cost of one operation at one size, in microseconds, median and worst of many.
Eviction is measured in its worst case: every leaf is stale and each call takes one whole leaf.
"""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import IO

import click
import numpy as np

from alloc import PagedTokenToKVPoolAllocator
from benchmarks import harness
from benchmarks.workloads import VOCABULARY
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    UnifiedRadixCache,
)

PAGE = 16
LEAF_PAGES = 4
CALLS = 2000


def make_cache(pages: int, policy: str = "lru") -> UnifiedRadixCache:
    """Return an empty cache over a pool of ``pages``."""
    pool = PagedTokenToKVPoolAllocator(pages * PAGE, PAGE, dtype=None, device=None, kvcache=None)
    return UnifiedRadixCache(CacheInitParams(False, None, pool, PAGE, eviction_policy=policy))


def insert(cache: UnifiedRadixCache, tokens: array[int], known: int = 0) -> None:
    """Insert a key of which ``known`` pages are cached."""
    key = RadixKey(tokens)
    match = cache.match_prefix(MatchPrefixParams(key)) if known else None
    new = cache.allocator.alloc_pages(len(key) // PAGE - known)
    assert new is not None, "the pool is large enough"
    pages = new if match is None else np.concatenate([match.pages, new])
    handle = None if match is None else match.handle
    cache.insert(InsertParams(key, pages=pages, handle=handle))


def random_tokens(rng: np.random.Generator, count: int) -> array[int]:
    """Return tokens that share nothing with others."""
    return array("q", rng.integers(0, VOCABULARY, count).tobytes())


def fill(cache: UnifiedRadixCache, leaves: int, seed: int = 5) -> list[array[int]]:
    """Insert leaves of 4 pages that share nothing; returns some of their keys."""
    rng, kept = np.random.default_rng(seed), []
    for i in range(leaves):
        tokens = random_tokens(rng, LEAF_PAGES * PAGE)
        insert(cache, tokens)
        if i % max(1, leaves // CALLS) == 0:
            kept.append(tokens)
    return kept


def match_call(cache: UnifiedRadixCache, tokens: array[int]) -> Callable[[], object]:
    """Return a call that matches a prompt; its key is made already."""
    params = MatchPrefixParams(RadixKey(tokens))
    return lambda: cache.match_prefix(params)


def time_calls(calls: list[Callable[[], object]]) -> dict[str, float]:
    """Run each call once; microseconds, median and worst."""
    spent = []
    gc.collect()
    gc.disable()
    for call in calls:
        start = perf_counter_ns()
        call()
        spent.append((perf_counter_ns() - start) / 1e3)
    gc.enable()
    return {"median": median(spent), "worst": max(spent)}


def leaves_line(leaves: int, policy: str) -> dict[str, float]:
    """Measure one number of leaves: match, evict of one leaf, evict with every leaf stale."""
    cache = make_cache(leaves * LEAF_PAGES, policy)
    keys = fill(cache, leaves)
    matches = [match_call(cache, tokens) for tokens in keys]
    one_leaf = EvictParams(LEAF_PAGES * PAGE)
    line = {"match": time_calls(matches)["median"]}
    evictions: list[Callable[[], object]] = [lambda: cache.evict(one_leaf)] * CALLS
    timed = time_calls(evictions)
    line |= {"evict": timed["median"], "evict worst": timed["worst"]}
    for tokens in keys:  # what was evicted comes back; then the whole tree is used once more
        match = cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))
        if match.device_prefix_len == 0 and cache.allocator.available_size():
            insert(cache, tokens)
    for node in list(cache.tree_core.nodes()):
        cache.dec_lock_ref(cache.inc_lock_ref(node.id))
    line["evict stale"] = time_calls(evictions)["median"]
    return line


def bytes_per_page(leaves: int) -> float:
    """Return the bytes that Python allocates per cached page, keys included."""
    cache = make_cache(leaves * LEAF_PAGES)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    fill(cache, leaves)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / (leaves * LEAF_PAGES)


def long_key(tokens: int) -> dict[str, float]:
    """Match and insert a key of this length."""
    cache = make_cache(2 * tokens // PAGE)
    prompt = random_tokens(np.random.default_rng(6), tokens)
    insert(cache, prompt)
    key = RadixKey(prompt)
    calls: list[Callable[[], object]] = [lambda: cache.match_prefix(MatchPrefixParams(key))] * 20
    return {"match": time_calls(calls)["median"]}


def wide_node(children: int) -> dict[str, float]:
    """Match and evict below one node with this many children."""
    cache = make_cache(children * 2 + 64)
    rng = np.random.default_rng(7)
    prefix = random_tokens(rng, 4 * PAGE)
    insert(cache, prefix)
    prompts = [prefix + random_tokens(rng, PAGE) for _ in range(children)]
    for prompt in prompts:
        insert(cache, prompt, known=4)
    step = max(1, children // CALLS)
    calls = [match_call(cache, prompt) for prompt in prompts[::step]]
    evictions: list[Callable[[], object]] = [lambda: cache.evict(EvictParams(PAGE))] * (CALLS // 2)
    return {"match": time_calls(calls)["median"], "evict": time_calls(evictions)["median"]}


def deep_path(depth: int) -> dict[str, float]:
    """Match, lock and evict at the end of a path of this many nodes of one page."""
    cache = make_cache(depth + 8)
    prompt = random_tokens(np.random.default_rng(8), depth * PAGE)
    key = RadixKey(prompt)
    handle = None
    pages = cache.allocator.alloc_pages(depth)
    assert pages is not None, "the pool is large enough"
    for end in range(1, depth + 1):
        part = key[: end * PAGE]
        cache.insert(InsertParams(part, pages=pages[:end], handle=handle))
        handle = cache.match_prefix(MatchPrefixParams(part, peek=True)).handle
    node = cache.match_prefix(MatchPrefixParams(key)).last_device_node

    def lock_and_unlock() -> None:
        cache.dec_lock_ref(cache.inc_lock_ref(node))

    match: list[Callable[[], object]] = [lambda: cache.match_prefix(MatchPrefixParams(key))] * 5
    lock: list[Callable[[], object]] = [lock_and_unlock] * 5
    evict: list[Callable[[], object]] = [lambda: cache.evict(EvictParams(PAGE))] * 100
    return {
        "match": time_calls(match)["median"],
        "lock + unlock": time_calls(lock)["median"],
        "evict": time_calls(evict)["median"],
    }


def show(title: str, lines: dict[str, dict[str, float]]) -> None:
    """Print one table."""
    columns = list(dict.fromkeys(column for line in lines.values() for column in line))
    rows = [
        [name, *(f"{line[c]:,.1f}" if c in line else "-" for c in columns)]
        for name, line in lines.items()
    ]
    harness.show(title, ["", *columns], rows)


def sizes(text: str) -> list[int]:
    """Read a list of sizes."""
    return [int(part) for part in text.split(",")]


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--leaves", default="10000,100000,1000000", help="Leaves of the tree.")
@click.option("--policy", "policies", default="lru", help="Eviction policies.")
@click.option("--tokens", default="65536,262144,1048576", help="Lengths of one key.")
@click.option("--children", default="10000,100000", help="Children of one node.")
@click.option("--depth", default="1000,10000", help="Nodes of one path.")
@click.option("--memory", default="10000,100000", help="Leaves at which memory is measured.")
@click.option("--json", "json_file", type=click.File("w"), help="Write figures here.")
def main(
    leaves: str,
    policies: str,
    tokens: str,
    children: str,
    depth: str,
    memory: str,
    json_file: IO[str] | None,
) -> None:
    """Run and print."""
    found = {
        "leaves of 4 pages, page 16 (µs)": {
            f"{count:,} {policy}": leaves_line(count, policy)
            for policy in policies.split(",")
            for count in sizes(leaves)
        },
        "metadata": {
            f"{count:,} leaves": {"bytes a page": bytes_per_page(count)} for count in sizes(memory)
        },
        "one key, cached (µs)": {f"{n:,} tokens": long_key(n) for n in sizes(tokens)},
        "children of one node (µs)": {f"{n:,}": wide_node(n) for n in sizes(children)},
        "one path of one-page nodes (µs)": {f"{n:,}": deep_path(n) for n in sizes(depth)},
    }
    for title, lines in found.items():
        show(title, lines)
    harness.write_json(
        json_file,
        "growth",
        [
            {"series": title, "size": size, **line}
            for title, lines in found.items()
            for size, line in lines.items()
        ],
    )


if __name__ == "__main__":
    main()
