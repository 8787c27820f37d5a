"""Which group to shard over, and groups inside one process; B70, C130."""

import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from scratch import InProcessGroup, SoloGroup, get_kv_shard_group
from tests.scratch.scratch_builders import make_spec
from tests.scratch.scratch_worlds import Batch, Conversation, Reference, make_pool, prefill


def ranks(size):
    return SimpleNamespace(rank=0, size=size)


CP, TP, ONE = ranks(4), ranks(8), ranks(1)


@pytest.mark.parametrize(
    ("use_mla", "cp", "tp", "expected"),
    [
        (True, CP, TP, CP),
        (False, CP, TP, CP),
        (True, ONE, TP, TP),
        (True, None, TP, TP),
        (False, ONE, TP, None),
        (False, None, TP, None),
        (True, ONE, ONE, None),
        (True, None, None, None),
        (False, None, None, None),
        (False, CP, None, CP),
    ],
)
def test_the_choice_of_group(use_mla, cp, tp, expected):
    """Context-parallel, else tensor-parallel for MLA, else nothing."""
    group = get_kv_shard_group(use_mla=use_mla, cp_group=cp, tp_group=tp)
    if expected is None:
        assert (group.rank, group.size) == (0, 1)
        assert isinstance(group, SoloGroup)
    else:
        assert group is expected


@pytest.mark.parametrize("name", ["cp_group", "tp_group"])
def test_a_process_outside_the_group_is_told_so(name):
    outside = {name: dist.GroupMember.NON_GROUP_MEMBER}
    with pytest.raises(ValueError, match="not a rank of process_group"):
        get_kv_shard_group(use_mla=True, **outside)


def test_a_group_of_one_has_nothing_to_send():
    blocks = torch.arange(6).view(3, 2)
    SoloGroup().all_gather(blocks).wait()
    assert blocks.flatten().tolist() == list(range(6))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"size": 0}, "size=0"), ({"size": 2, "timeout_s": 0}, "timeout_s=0")],
)
def test_groups_are_made_of_ranks(kwargs, message):
    with pytest.raises(ValueError, match=message):
        InProcessGroup.create(**kwargs)


def gather(group, rows=2):
    blocks = torch.full((group.size * rows, 3), -1)
    blocks[group.rank * rows : (group.rank + 1) * rows] = group.rank
    return blocks, group.all_gather(blocks)


def test_every_rank_gets_every_block():
    started = [gather(group) for group in InProcessGroup.create(3)]
    for blocks, pending in started:
        pending.wait()
        assert blocks[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_rounds_may_overlap():
    """A rank may start the next gather before it waits for the last one."""
    groups = InProcessGroup.create(2)
    rounds = [[gather(group, rows) for group in groups] for rows in (1, 3)]
    for started in reversed(rounds):
        for blocks, pending in started:
            pending.wait()
            assert blocks[0, 0] == 0
            assert blocks[-1, 0] == 1


def test_a_round_is_forgotten_when_everybody_has_it():
    """Else every slot of every gather would be kept."""
    groups = InProcessGroup.create(2)
    for _ in range(3):
        for _, pending in [gather(group) for group in groups]:
            pending.wait()
    assert groups[0]._meeting.rounds == {}


def test_a_rank_that_does_not_come_is_named():
    groups = InProcessGroup.create(3, timeout_s=0.05)
    _, pending = gather(groups[1])
    gather(groups[0])
    with pytest.raises(RuntimeError, match=r"ranks \[2\] did not arrive within 0.05 s"):
        pending.wait()


def test_a_rank_that_leaves_fails_the_others_at_once():
    groups = InProcessGroup.create(2, timeout_s=30)
    _, pending = gather(groups[0])
    timer = threading.Timer(0.05, groups[1].leave)
    started = time.monotonic()
    timer.start()
    with pytest.raises(RuntimeError, match="rank 0 of 2: rank 1 has left"):
        pending.wait()
    assert time.monotonic() - started < 5
    with pytest.raises(RuntimeError, match="has left"):
        gather(groups[0])
    timer.join()


def test_what_was_gathered_before_a_rank_left_is_there():
    groups = InProcessGroup.create(2)
    started = [gather(group) for group in groups]
    groups[1].leave()
    blocks, pending = started[0]
    pending.wait()
    assert blocks[-1, 0] == 1


@pytest.mark.parametrize("other", [torch.zeros(6, 3), torch.zeros(4, 3, dtype=torch.int64)])
def test_ranks_that_bring_other_blocks_are_refused(other):
    groups = InProcessGroup.create(2)
    groups[0].all_gather(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="every rank must plan the same batch"):
        groups[1].all_gather(other)


def fail_by_another_shape(groups):
    """Rank 0 waits for a round that rank 1 enters with more rows."""
    _, pending = gather(groups[0])
    with pytest.raises(RuntimeError, match="every rank must plan the same batch"):
        gather(groups[1], rows=3)
    return pending


def fail_by_delay(groups):
    _, pending = gather(groups[0])
    with pytest.raises(RuntimeError, match="did not arrive"):
        pending.wait()
    return pending


def fail_by_interrupt(groups):
    """The last rank to arrive is interrupted before everybody has every block."""
    _, pending = gather(groups[0])
    with (
        mock.patch("scratch.in_process._exchange", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        gather(groups[1])
    return pending


@pytest.mark.parametrize("fail", [fail_by_another_shape, fail_by_delay, fail_by_interrupt])
def test_nothing_is_exchanged_after_a_failed_round(fail):
    """Ranks that disagree on the number of rounds would get stale blocks or another layer's."""
    groups = InProcessGroup.create(2, timeout_s=0.05)
    earlier = [gather(group) for group in groups]
    pending = fail(groups)
    with pytest.raises(RuntimeError, match="make a new group"):
        pending.wait()
    for group in reversed(groups):
        with pytest.raises(RuntimeError, match=rf"rank {group.rank} of 2: .*make a new group"):
            gather(group)
    for blocks, done in earlier:
        done.wait()
        assert blocks[:, 0].tolist() == [0, 0, 1, 1]


def test_a_rank_that_waits_hears_of_a_failed_round_at_once():
    groups = InProcessGroup.create(2, timeout_s=30)
    _, pending = gather(groups[0])

    def bring_another_shape():
        with suppress(RuntimeError):
            gather(groups[1], rows=3)

    mismatch = threading.Timer(0.05, bring_another_shape)
    started = time.monotonic()
    mismatch.start()
    with pytest.raises(RuntimeError, match="every rank must plan the same batch"):
        pending.wait()
    assert time.monotonic() - started < 5
    mismatch.join()


def test_each_rank_may_have_a_thread():
    """No lockstep is needed then: ranks run ahead until they need each other."""
    n, ps = 3, 4
    specs = [make_spec(rank, n, ps, groups=8, chunk_pages=8) for rank in range(n)]
    groups = InProcessGroup.create(n, timeout_s=10)
    failures = []

    def serve(rank):
        try:
            pool = make_pool("mha", specs[rank], groups[rank])
            layout = pool.shard.planner.layout
            conversation = Conversation(specs[0], layout, np.random.default_rng(5))
            reference = Reference("mha", torch.bfloat16, layout, range(3), 5)
            for _ in range(6):
                prefill([pool], "mha", reference, conversation.batch())
        except BaseException as error:
            failures.append(error)
            groups[rank].leave()

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


def test_a_rank_that_leaves_mid_prefill_fails_the_others_cleanly():
    """A clear error, and no plan in force afterwards."""
    groups = InProcessGroup.create(2, timeout_s=10)
    specs = [make_spec(rank, 2, 4) for rank in range(2)]
    pools = [make_pool("mla", spec, group) for spec, group in zip(specs, groups, strict=True)]
    reference = Reference("mla", torch.bfloat16, pools[0].shard.planner.layout, range(3), 0)
    prefill(pools, "mla", reference, Batch([[2, 3]], [0], [8]))
    for pool in pools:
        pool.begin_shard_extend(np.array([[2, 3]]), [0], [8], [8])
    pools[0].get_key_buffer(0)
    groups[1].leave()
    with pytest.raises(RuntimeError, match="has left the group"):
        pools[0].get_key_buffer(1)
    pools[0].end_shard_extend()
    assert not pools[0].shard.active
    with pytest.raises(RuntimeError, match="has left the group"):
        pools[0].begin_shard_extend(np.array([[2, 3]]), [0], [8], [8])
    assert not pools[0].shard.active
