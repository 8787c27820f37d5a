"""One layer ahead in two slots; errors leave no half state; B60, B68, C99, C139."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scratch import InProcessGroup, PageInterleaveMLATokenToKVPool, SoloGroup
from tests.scratch.scratch_builders import layer, make_spec
from tests.scratch.scratch_worlds import make_pool

PREFIX = np.array([[2, 3, 4, 5, 6]])
ARGS = (PREFIX, [0], [12], [20])


class SpyGroup:
    """A group of two whose gathers end when waited for, and fail when told to."""

    rank, size = 0, 2

    def __init__(self):
        self.log, self.fail_start, self.fail_wait = [], False, False

    def all_gather(self, blocks):
        if self.fail_start:
            raise RuntimeError("no start")
        number = len([entry for entry in self.log if entry[0] == "start"])
        self.log.append(("start", number, blocks.data_ptr()))
        return _SpyPending(self, number)

    @property
    def events(self):
        return [entry[:2] for entry in self.log]


class _SpyPending:
    def __init__(self, group, number):
        self.group, self.number = group, number

    def wait(self):
        if self.group.fail_wait:
            raise RuntimeError(f"gather {self.number} failed")
        self.group.log.append(("wait", self.number))


@pytest.fixture
def group():
    return SpyGroup()


@pytest.fixture
def pool(group):
    """Four layers, 2 to 5, on rank 0 of 2."""
    return make_pool("mla", make_spec(0, 2, 4), group, layers=(2, 6))


def test_layer_l_plus_1_is_gathered_when_layer_l_is_read(pool, group):
    """The first at plan time, then one ahead; a read waits for its own slot only; B68."""
    pool.begin_shard_extend(*ARGS)
    assert group.events == [("start", 0)]
    pool.get_key_buffer(2)
    assert group.events == [("start", 0), ("wait", 0), ("start", 1)]
    pool.get_key_buffer(3)
    assert group.events[3:] == [("wait", 1), ("start", 2)]
    pool.get_key_buffer(4)
    pool.get_key_buffer(5)
    assert group.events[5:] == [("wait", 2), ("start", 3), ("wait", 3)]
    pool.end_shard_extend()
    assert len(group.events) == 8


def test_the_gathers_take_turns_in_two_slots(pool, group):
    pool.begin_shard_extend(*ARGS)
    for layer_id in range(2, 6):
        pool.get_key_buffer(layer_id)
    slots = [entry[2] for entry in group.log if entry[0] == "start"]
    assert slots[0] == slots[2] != slots[1] == slots[3]


def test_reading_a_layer_again_is_free(pool, group):
    """Keys, values, parts of a row: one gather a layer."""
    pool.begin_shard_extend(*ARGS)
    for _ in range(3):
        pool.get_key_buffer(2)
        pool.get_value_buffer(2)
        pool.get_mla_kv_buffer(layer(2), torch.arange(8, 12), None)
    assert group.events == [("start", 0), ("wait", 0), ("start", 1)]
    for layer_id in (3, 4, 5):
        pool.get_key_buffer(layer_id)
    before = list(group.log)
    assert pool.get_key_buffer(4).data_ptr() != pool.get_key_buffer(5).data_ptr()
    assert before == group.log


def test_mha_gathers_keys_and_values_together(group):
    pool = make_pool("mha", make_spec(0, 2, 4), group)
    pool.begin_shard_extend(*ARGS)
    pool.get_key_buffer(0)
    pool.get_value_buffer(0)
    assert group.events == [("start", 0), ("wait", 0), ("start", 1)]


def test_nothing_is_gathered_without_a_prefix(pool, group):
    """C104."""
    pool.begin_shard_extend(np.array([[2, 3]]), [0], [0], [7])
    for layer_id in range(2, 6):
        pool.get_key_buffer(layer_id)
    pool.end_shard_extend()
    assert group.log == []


def test_without_a_prefix_layers_may_be_left_out(pool):
    pool.begin_shard_extend(np.array([[2, 3]]), [0], [0], [7])
    loc = torch.arange(8, 15)
    for layer_id in (3, 5):
        pool.set_mla_kv_buffer(layer(layer_id), loc, torch.ones(7, 6), torch.ones(7, 2))
        rows = pool.translate_loc_to_scratch(loc)
        assert pool.get_key_buffer(layer_id)[rows].all()


def test_without_a_prefix_a_slot_never_goes_back_to_an_earlier_layer(pool):
    """The rows staged for layer 4 can't become layer 2's, nor layer 2's layer 4's."""
    pool.begin_shard_extend(np.array([[2, 3]]), [0], [0], [7])
    loc, values = torch.arange(8, 15), (torch.ones(7, 6), torch.ones(7, 2))
    pool.set_mla_kv_buffer(layer(4), loc, *values)
    with pytest.raises(RuntimeError, match=r"layer 2 .*its slot holds layer 4"):
        pool.set_mla_kv_buffer(layer(2), loc, *values)
    assert not pool.kv_buffer[0].any()
    with pytest.raises(RuntimeError, match=r"layer 2 .*its slot holds layer 4"):
        pool.get_key_buffer(2)
    pool.set_mla_kv_buffer(layer(3), loc, *values)
    pool.get_key_buffer(3)
    assert pool.get_key_buffer(4)[pool.translate_loc_to_scratch(loc)].all()


@given(st.booleans(), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=8))
def test_in_any_order_a_read_is_an_error_or_what_was_staged_last(prefix, calls):
    """A call stages one layer, or reads all from a layer on."""
    pool = make_pool("mla", make_spec(0, 1, 4), SoloGroup(), layers=(0, 5))
    pool.begin_shard_extend(np.array([[2, 3]]), [0], [4 * prefix], [8])
    loc, staged = torch.arange(12, 16), {}
    rows = pool.translate_loc_to_scratch(loc)
    for mark, (stages, first) in enumerate(calls, start=1):
        with suppress(RuntimeError):
            if stages:
                values = torch.full((4, 6), float(mark)), torch.full((4, 2), float(mark))
                pool.set_mla_kv_buffer(layer(first), loc, *values)
                staged[first] = mark
                continue
            for layer_id in range(first, 5):
                found = pool.get_key_buffer(layer_id)[rows]
                assert layer_id not in staged or (found == staged[layer_id]).all()


def test_layers_out_of_order_are_errors(pool, group):
    pool.begin_shard_extend(*ARGS)
    loc, values = torch.arange(20, 24), (torch.ones(4, 6), torch.ones(4, 2))
    for skip in (3, 4, 5):
        with pytest.raises(RuntimeError, match=f"layer {skip} was not prefetched"):
            pool.get_key_buffer(skip)
        with pytest.raises(RuntimeError, match=f"layer {skip} was not prefetched"):
            pool.set_mla_kv_buffer(layer(skip), loc, *values)
    assert not any(tensor.any() for tensor in pool.kv_buffer)
    pool.get_key_buffer(2)
    pool.get_key_buffer(3)
    with pytest.raises(RuntimeError, match="layer 2 was not prefetched: its slot holds layer 4"):
        pool.get_key_buffer(2)
    pool.get_key_buffer(4)
    assert len([entry for entry in group.log if entry[0] == "start"]) == 4


def test_layers_of_another_stage_are_refused(pool):
    pool.begin_shard_extend(*ARGS)
    for layer_id in (0, 1, 6):
        with pytest.raises(ValueError, match=f"layer_id={layer_id}"):
            pool.get_key_buffer(layer_id)


def test_the_gather_cannot_be_read_without_a_plan(pool):
    gather = pool.shard.gather
    for use in (gather.read, gather.stage):
        with pytest.raises(RuntimeError, match=r"layer 2 .*without a plan"):
            use(2)
    pool.begin_shard_extend(*ARGS)
    pool.end_shard_extend()
    for use in (gather.read, gather.stage):
        with pytest.raises(RuntimeError, match="without a plan"):
            use(2)
    assert pool.get_key_buffer(2) is pool.kv_buffer[0]


def test_end_waits_for_a_gather_in_flight(pool, group):
    pool.begin_shard_extend(*ARGS)
    pool.get_key_buffer(2)
    pool.end_shard_extend()
    assert group.events == [("start", 0), ("wait", 0), ("start", 1), ("wait", 1)]
    pool.end_shard_extend()
    assert len(group.events) == 4
    assert not pool.shard.active


def test_a_new_plan_waits_for_the_old_gather_and_keeps_its_send_list_until_then(
    pool, group, monkeypatch
):
    """The old send rows live while a gather may read them."""
    plan = pool.begin_shard_extend(*ARGS)
    held, wait = [], _SpyPending.wait

    def look_and_wait(pending):
        held.append(pool.shard.gather.plan)
        wait(pending)

    monkeypatch.setattr(_SpyPending, "wait", look_and_wait)
    following = pool.begin_shard_extend(*ARGS)
    assert held == [plan]
    assert pool.shard.gather.plan is following
    assert group.events == [("start", 0), ("wait", 0), ("start", 1)]


def test_a_refused_plan_leaves_the_old_one_readable(pool, group):
    """A planner error changes neither plan nor gather; B60."""
    plan = pool.begin_shard_extend(*ARGS)
    pool.get_key_buffer(2)
    before = list(group.log)
    for bad in ((PREFIX, [0], [13], [20]), (PREFIX, [0], [12], [500]), (PREFIX, [3], [12], [20])):
        with pytest.raises(ValueError, match=r"prefix_len|seq_len|row"):
            pool.begin_shard_extend(*bad)
    assert before == group.log
    assert pool.shard.planner.plan is plan
    for layer_id in (3, 4, 5):
        pool.get_key_buffer(layer_id)
    pool.end_shard_extend()


def test_a_gather_that_does_not_start_leaves_no_plan(pool, group):
    group.fail_start = True
    with pytest.raises(RuntimeError, match="no start"):
        pool.begin_shard_extend(*ARGS)
    assert not pool.shard.active
    assert pool.get_key_buffer(2) is pool.kv_buffer[0]
    group.fail_start = False
    pool.begin_shard_extend(*ARGS)
    pool.get_key_buffer(2)
    group.fail_start = True
    with pytest.raises(RuntimeError, match="no start"):
        pool.get_key_buffer(3)
    pool.end_shard_extend()


def test_a_failed_gather_is_an_error_once_and_the_layer_stays_unread(pool, group):
    pool.begin_shard_extend(*ARGS)
    group.fail_wait = True
    with pytest.raises(RuntimeError, match="gather 0 failed"):
        pool.get_key_buffer(2)
    with pytest.raises(RuntimeError, match="layer 2 was not prefetched"):
        pool.get_key_buffer(2)
    pool.end_shard_extend()
    assert not pool.shard.active


def test_end_and_begin_report_a_failed_gather_and_end_the_plan(pool, group):
    pool.begin_shard_extend(*ARGS)
    group.fail_wait = True
    with pytest.raises(RuntimeError, match="gather 0 failed"):
        pool.end_shard_extend()
    assert not pool.shard.active
    pool.begin_shard_extend(*ARGS)
    with pytest.raises(RuntimeError, match="gather 1 failed"):
        pool.begin_shard_extend(*ARGS)
    assert not pool.shard.active
    group.fail_wait = False
    pool.begin_shard_extend(*ARGS)
    pool.get_key_buffer(2)


def test_both_gathers_in_flight_are_waited_for_when_one_fails(group):
    pool = make_pool("mla", make_spec(0, 2, 4), group)
    pool.begin_shard_extend(*ARGS)
    slots = pool.shard.gather._slots
    first = slots.of_layer(0).pending
    slots.of_layer(1).pending = _SpyPending(group, 9)
    first.wait = None
    slots.of_layer(0).pending = _Failing()
    with pytest.raises(RuntimeError, match="broken"):
        pool.end_shard_extend()
    assert ("wait", 9) in group.events


class _Failing:
    def wait(self):
        raise RuntimeError("broken")


def test_the_send_block_is_own_pages_in_slot_order_then_trash():
    """C96, C97: local pages ascending, padded with local page 0, at r * block."""
    groups = InProcessGroup.create(2, timeout_s=5)
    pools = [make_pool("mla", make_spec(r, 2, 4), groups[r]) for r in range(2)]
    for rank, pool in enumerate(pools):
        marks = torch.arange(13.0).repeat_interleave(4) + 100 * rank
        pool.kv_buffer[0][:] = marks.to(torch.bfloat16)[:, None, None]
    for pool in pools:
        pool.begin_shard_extend(np.array([[8, 5, 2]]), [0], [12], [12])
    for pool in pools:
        scratch = pool.get_key_buffer(0)[:16:4, 0, 0]
        assert scratch.tolist() == [1.0, 4.0, 102.0, 100.0]


def test_a_pool_has_its_own_two_slots():
    """Two pools of one rank don't share scratch or plans."""
    first, second = (make_pool("mla", make_spec(0, 2, 4), SpyGroup()) for _ in range(2))
    first.begin_shard_extend(*ARGS)
    assert first.shard.active
    assert not second.shard.active
    assert isinstance(first, PageInterleaveMLATokenToKVPool)
