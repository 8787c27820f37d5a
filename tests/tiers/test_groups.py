"""Page groups: their names, and what ranks agree to load."""

import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from alloc import PageLayout
from radix import DroppedRun, EvictParams, RadixKey
from scratch import MHATokenToKVPool, MLATokenToKVPool
from tests.tiers.tier_worlds import check, make_rank, make_ranks
from tiers import FileStore, GroupTier, HostKVPool, MemoryStore, NoRows

LAYOUT = PageLayout.single(2, 8)
A = [1, 2, 3, 4, 5, 6, 7, 8]


def tier(**settings):
    layout = settings.pop("layout", LAYOUT)
    blobs = settings.pop("blobs", None) or MemoryStore(100)
    return GroupTier(blobs, NoRows(), layout, **{"model_id": "m", "group_pages": 2, **settings})


def names_of(groups, key):
    return list(groups.names(key))


def test_a_name_depends_on_everything_that_the_bytes_depend_on():
    names = [
        names_of(tier(), RadixKey(A)),
        names_of(tier(), RadixKey(A, "lora")),
        names_of(tier(), RadixKey(A, None, "lora")),
        names_of(tier(), RadixKey([*A, 9], is_bigram=True)),
        names_of(tier(model_id="n"), RadixKey(A)),
        names_of(tier(secret=b"s"), RadixKey(A)),
        names_of(tier(rank=1), RadixKey(A)),
        names_of(tier(layout=PageLayout.interleave(2, 2, 8)), RadixKey(A)),
        names_of(tier(layout=PageLayout.single(1, 8), group_pages=4), RadixKey(A)),
        names_of(tier(), RadixKey([0, *A[1:]])),
    ]
    assert [len(n) for n in names] == [2] * len(names)
    flat = [name for found in names for name in found]
    assert len(set(flat)) == len(flat)


def test_names_share_exactly_the_groups_of_a_shared_prefix():
    ours, theirs = names_of(tier(), RadixKey(A)), names_of(tier(), RadixKey([*A[:7], 0]))
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]
    assert names_of(tier(), RadixKey(A[:7])) == ours[:1]
    assert names_of(tier(), RadixKey(A[:3])) == []


def test_a_namespace_without_a_stable_name_is_not_kept():
    def in_space(extra_key):
        return RadixKey.of_units(RadixKey(A).data, (extra_key, None, False))

    assert names_of(tier(), in_space(object())) == []
    kept = names_of(tier(), in_space(("lora", 1, 2.5, True, b"x")))
    assert len(kept) == 2
    assert kept != names_of(tier(), in_space(("lora", 1, 2.5, 1, b"x")))


def test_names_are_the_same_in_every_process():
    code = (
        "from alloc import PageLayout; from radix import RadixKey;"
        "from tiers import GroupTier, MemoryStore, NoRows;"
        "tier = GroupTier(MemoryStore(1), NoRows(), PageLayout.single(2, 8), model_id='m');"
        "print([list(tier.names(RadixKey(range(64), name))) for name in (None, 'x', ('x', 1))])"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "random")
    }
    assert len(outs) == 1


@pytest.mark.parametrize("settings", [{"group_pages": 0}, {"secret": bytes(65)}])
def test_mistakes_are_refused(settings):
    with pytest.raises(ValueError, match=r"group_pages|key"):
        tier(**settings)


def demoted(blobs, tokens=A, **settings):
    """A rank whose tokens have gone from the device to the host and from there to blobs."""
    rank = make_rank(blobs=blobs, bytes_too=False, **settings)
    rank.serve(tokens)
    rank.cache.evict(EvictParams(1000))
    flush(rank)
    return rank


def flush(rank):
    """Evict everything from the host."""
    tier = rank.cache.host
    tier._evict(tier.cache.tree_core.component.evictable_by_class())
    assert tier.cache.total_size() == 0


def test_what_the_host_evicts_comes_back_in_whole_groups():
    blobs = MemoryStore(100)
    rank = demoted(blobs, [*A, 9, 10])
    assert len(blobs) == 2
    match = rank.cache.match(rank.key([*A, 9, 10]), lock=False)
    assert (match.host_hit_length, match.file_hit_length) == (8, 8)
    assert rank.load([*A, 9, 10]) == 8
    assert rank.cache.host.counters.fetched == 4
    rank.cache.check_invariants()


def test_a_group_is_written_while_its_first_part_still_lies_above_the_victim():
    blobs = MemoryStore(100)
    rank = make_rank(blobs=blobs, bytes_too=False)
    rank.serve(A)
    rank.cache.evict(EvictParams(1000))
    rank.cache.host._evict(np.array([1]))
    assert len(blobs) == 1
    assert rank.host_len(A) == 6
    # The rest of the group comes back beside what the host still has of it.
    assert rank.load(A) == 8
    assert rank.cache.host.counters.fetched == 1
    rank.cache.check_invariants()


def test_only_as_many_groups_come_back_as_the_host_has_room_for():
    rank = demoted(MemoryStore(100), host_pages=4)
    rank.serve([50 + i for i in range(6)])
    rank.cache.evict(EvictParams(1000))
    lock = rank.cache.host.lock(rank.key([50 + i for i in range(2)]))
    match = rank.cache.match(rank.key(A), lock=False)
    assert match.file_hit_length == 4
    rank.cache.host.unlock(lock.receipt)
    rank.cache.check_invariants()


def test_a_hole_ends_what_comes_back():
    blobs = MemoryStore(100)
    rank = demoted(blobs, [*A, *A])
    names = names_of(rank.cache.host.groups, rank.key([*A, *A]))
    del blobs._blobs[names[1]]
    assert rank.load([*A, *A]) == 4
    rank.cache.check_invariants()


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{}",
        b'{"name":"x","page_size":2,"page_owners":[0,0],"owned_pages":[0,1]}',
        b'{"name":"NAME","page_size":4,"page_owners":[0,0],"owned_pages":[0,1]}',
        b'{"name":"NAME","page_size":2,"page_owners":[0],"owned_pages":[0]}',
        b'{"name":"NAME","page_size":2,"page_owners":[0,1],"owned_pages":[0]}',
        b'{"name":"NAME","page_size":2,"page_owners":[0,0],"owned_pages":[0]}',
        b'{"name":"NAME","page_size":2,"page_owners":[0,999],"owned_pages":[0]}',
        b'{"name":"NAME","page_size":2,"page_owners":"ab","owned_pages":[0]}',
        b'{"name":"NAME","page_size":2,"page_owners":[0,0],"owned_pages":[[0]]}',
    ],
)
def test_a_header_of_something_else_is_a_miss(header):
    blobs = MemoryStore(100)
    rank = demoted(blobs)
    first = names_of(rank.cache.host.groups, rank.key(A))[0]
    blobs._blobs[first] = (header.replace(b"NAME", first.encode()), b"")
    assert rank.load(A) == 0
    rank.cache.check_invariants()


# Ranks


def test_groups_that_a_rank_lacks_are_a_miss_on_every_rank():
    found = {}

    def agree_with(other):
        def agree(values):
            found.setdefault("mine", []).append(values.tolist())
            return np.minimum(values, other(values))

        return agree

    blobs = MemoryStore(100)
    demoted(blobs, [*A, *A])
    whole = demoted(blobs, [*A, *A], agree=agree_with(lambda v: v))
    assert whole.load([*A, *A]) == 16
    # Another rank has only the first group, or the second under other owners.
    for cut in (1, 2, 3):

        def less(values, cut=cut):
            if len(values) == 1:
                return values
            half = len(values) // 2
            theirs = values.copy()
            theirs[cut:half] = -1
            theirs[half + cut :] = 1
            return theirs

        rank = demoted(blobs, [*A, *A], agree=agree_with(less))
        assert rank.load([*A, *A]) == 4 * cut
        rank.cache.check_invariants()

        def other_owners(values, cut=cut):
            if len(values) == 1:
                return values
            half = len(values) // 2
            theirs = values.copy()
            theirs[cut] += 1
            theirs[half + cut] -= 1
            return theirs

        rank = demoted(blobs, [*A, *A], agree=agree_with(other_owners))
        assert rank.load([*A, *A]) == 4 * cut
        rank.cache.check_invariants()


def test_bytes_that_another_rank_could_not_read_are_given_back():
    blobs = MemoryStore(100)
    rank = demoted(
        blobs,
        [*A, *A],
        agree=lambda values: np.minimum(values, 4) if len(values) == 1 else values,
    )
    assert rank.load([*A, *A]) == 8
    rank.cache.check_invariants()


def test_blobs_of_other_owners_are_replaced_so_that_ranks_agree_again():
    blobs = [MemoryStore(100), MemoryStore(100)]

    def serve_and_flush(owners):
        for i in range(2):
            rank = make_rank(i, 2, layout="lanes", blobs=blobs[i], bytes_too=False)
            rank.serve(A[:4], owners=owners)
            rank.cache.evict(EvictParams(1000))
            flush(rank)

    serve_and_flush([0, 1])
    before = blobs[0].header(*blobs[0]._blobs)
    blobs[1]._blobs.clear()
    serve_and_flush([1, 0])
    owners = []
    for blob in blobs:
        (name,) = blob._blobs
        owners.append(json.loads(blob.header(name))["page_owners"])
    assert json.loads(before)["page_owners"] == [0, 1]
    assert owners == [[1, 0], [1, 0]]


@pytest.mark.parametrize("kind", ["mla", "mha"])
@pytest.mark.parametrize("layout", ["interleave", "lanes"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_survive_a_restart_in_files(tmp_path, ranks, layout, kind):
    tokens = list(range(24))

    def start():
        stores = [FileStore(tmp_path / str(r), 10**6, sync=False) for r in range(ranks)]
        world = make_ranks(ranks, layout=layout, kind=kind, pages=12, blobs=stores)
        return stores, world

    stores, world = start()
    for rank in world:
        rank.serve(tokens, base=1 % ranks)
        rank.cache.evict(EvictParams(1000))
        flush(rank)
    for store in stores:
        assert store.counters.written == 6
        store.close()
    stores, world = start()
    for rank in world:
        assert rank.load(tokens) == 24
        assert rank.wrong_pages(tokens) == []
    check(world)
    for store in stores:
        store.close()


BF16_MLA = {"dtype": torch.bfloat16, "kv_lora_rank": 4, "qk_rope_head_dim": 2}
BF16_MHA = {"dtype": torch.bfloat16, "head_num": 2, "head_dim": 4}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (MLATokenToKVPool, BF16_MLA, {"dtype": torch.float16}),
        (MLATokenToKVPool, BF16_MLA, {"dtype": torch.int16}),
        (MLATokenToKVPool, BF16_MLA, {"kv_lora_rank": 3, "qk_rope_head_dim": 3}),
        (MLATokenToKVPool, BF16_MLA, {"start_layer": 1}),
        (
            MHATokenToKVPool,
            {**BF16_MHA, "dtype": torch.float8_e4m3fn},
            {"dtype": torch.float8_e5m2},
        ),
        (MHATokenToKVPool, BF16_MHA, {"head_num": 4, "head_dim": 2}),
        (MHATokenToKVPool, BF16_MHA, {"start_layer": 2, "end_layer": 4}),
    ],
)
def test_a_restart_with_rows_that_mean_something_else_finds_no_files(tmp_path, kind, before, after):
    found = []
    for changes in ({}, {}, after):
        with FileStore(tmp_path, 10**6, sync=False) as store:
            pool = kind(size=8, page_size=2, layer_num=2, device="cpu", **{**before, **changes})
            groups = GroupTier(store, HostKVPool(pool, LAYOUT), LAYOUT, model_id="m", group_pages=2)
            found.append(groups.offer(RadixKey(A), 0) is not None)
            pages = np.arange(1, 5)
            groups.keep(DroppedRun(RadixKey(A), pages, 0))
    assert found == [False, True, False]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "swap"])
def test_a_damaged_file_is_a_miss_with_a_warning_and_never_wrong_bytes(tmp_path, caplog, damage):
    tokens = list(range(24))
    store = FileStore(tmp_path, 10**6, sync=False)
    rank = make_rank(pages=12, blobs=store)
    rank.serve(tokens)
    rank.cache.evict(EvictParams(1000))
    flush(rank)
    paths = [tmp_path / f"{name}.kv" for name in names_of(rank.cache.host.groups, rank.key(tokens))]
    if damage == "truncate":
        os.truncate(paths[2], paths[2].stat().st_size - 1)
    elif damage == "flip":
        data = bytearray(paths[2].read_bytes())
        data[-40] ^= 1
        paths[2].write_bytes(bytes(data))
    elif damage == "remove":
        paths[2].unlink()
    else:
        paths[2].write_bytes(paths[3].read_bytes())
    rank.serve([90 + i for i in range(24)])
    rank.cache.evict(EvictParams(1000))
    with caplog.at_level(logging.WARNING):
        assert rank.load(tokens) == 8
    assert len(caplog.records) == (0 if damage == "swap" else 1)
    assert rank.wrong_pages(tokens) == []
    rank.cache.check_invariants()
    store.close()


def test_a_full_disk_drops_what_the_host_evicts_and_nothing_else(tmp_path, caplog):
    store = FileStore(tmp_path, 10**6, sync=False)
    rank = make_rank(host_pages=4, blobs=store)
    store._write = _refuse
    for first in range(6):
        rank.serve([first * 10 + i for i in range(8)])
        rank.cache.evict(EvictParams(1000))
        rank.cache.check_invariants()
    assert store.counters.failed == 10
    assert rank.load([50 + i for i in range(8)]) == 8
    assert rank.wrong_pages([50 + i for i in range(8)]) == []
    store.close()


def _refuse(path, parts):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("layout", ["interleave", "lanes"])
def test_the_rest_of_a_group_comes_back_beside_what_the_host_still_has_of_it(tmp_path, layout):
    tokens = list(range(16))
    stores = [FileStore(tmp_path / str(r), 10**6, sync=False) for r in range(2)]
    world = make_ranks(2, layout=layout, blobs=stores, group_pages=4)
    for rank in world:
        rank.serve(tokens, owners=[0, 1, 0, 1, 0, 1, 0, 1])
        rank.cache.evict(EvictParams(1000))
        rank.cache.host._evict(np.array([1, 2]))
        assert rank.host_len(tokens) == 10
        rank.serve([70 + i for i in range(32)], owners=[0, 1] * 8)
        rank.cache.evict(EvictParams(1000))
        assert rank.load(tokens) == 16
        assert rank.cache.host.counters.fetched == 3
        assert rank.wrong_pages(tokens) == []
    check(world)
    for store in stores:
        store.close()
