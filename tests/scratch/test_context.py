"""A plan as a context: begun on the way in, ended on every way out."""

import pytest
import torch

from scratch import InProcessGroup, SoloGroup
from tests.scratch.scratch_builders import make_spec, page_table
from tests.scratch.scratch_worlds import Batch, Reference, make_pool, prefill, read, write

KINDS = ["mha", "mla"]
ARGS = (page_table([[2, 3, 4]]), [0], [8], [11])


class FailingGroup:
    """A rank of two whose gathers start, and fail when waited for if told so."""

    rank, size = 0, 2

    def __init__(self):
        self.fail_start = self.fail_wait = False
        self.waited = 0

    def all_gather(self, blocks):
        if self.fail_start:
            raise RuntimeError("no start")
        return self

    def wait(self):
        self.waited += 1
        if self.fail_wait:
            raise RuntimeError("gather failed")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def group():
    return FailingGroup()


@pytest.fixture
def pool(kind, group):
    return make_pool(kind, make_spec(0, 2, 4), group)


def assert_no_plan(pool):
    assert not pool.shard.active
    assert pool.shard.gather.plan is None


def test_the_plan_is_in_force_inside_and_no_longer(pool, group):
    with pool.shard_extend(*ARGS) as plan:
        assert pool.shard.active
        assert pool.shard.gather.plan is plan is pool.shard.planner.plan
        assert plan.block_pages == 1
    assert_no_plan(pool)
    assert group.waited == 1


def test_nothing_is_planned_before_the_context_is_entered(pool):
    pool.shard_extend(*ARGS)
    assert_no_plan(pool)
    assert pool.shard.planner.epoch == 0


def test_an_error_of_the_body_ends_the_plan_and_is_what_is_raised(pool, group):
    with pytest.raises(KeyError, match="body"), pool.shard_extend(*ARGS):
        raise KeyError("body")
    assert_no_plan(pool)
    assert group.waited == 1


def test_leaving_a_function_or_a_loop_ends_the_plan(pool):
    def served():
        for _ in range(2):
            with pool.shard_extend(*ARGS) as plan:
                return plan.epoch
        return None

    assert [served(), served()] == [1, 2]
    assert_no_plan(pool)


def test_a_batch_that_is_refused_leaves_the_previous_plan(pool):
    before = pool.begin_shard_extend(*ARGS)
    with (
        pytest.raises(ValueError, match="prefix_len=7"),
        pool.shard_extend(page_table([[2, 3, 4]]), [0], [7], [11]),
    ):
        pytest.fail("the body must not run")
    assert pool.shard.active
    assert pool.shard.gather.plan is before


def test_a_gather_that_cannot_start_leaves_no_plan(pool, group):
    group.fail_start = True
    with pytest.raises(RuntimeError, match="no start"), pool.shard_extend(*ARGS):
        pytest.fail("the body must not run")
    assert_no_plan(pool)


def test_a_gather_that_fails_on_the_way_out_is_raised_over_the_body_s_error(pool, group):
    def body():
        group.fail_wait = True
        raise KeyError("body")

    with pytest.raises(RuntimeError, match="gather failed") as caught, pool.shard_extend(*ARGS):
        body()
    assert isinstance(caught.value.__context__, KeyError)
    assert_no_plan(pool)


def test_a_plan_made_inside_is_ended_too(pool):
    with pool.shard_extend(*ARGS) as plan:
        inner = pool.begin_shard_extend(*ARGS)
        assert inner is not plan
    assert_no_plan(pool)


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_written_inside_is_read_inside(kind, size):
    groups = InProcessGroup.create(size, timeout_s=5) if size > 1 else [SoloGroup()]
    pools = [make_pool(kind, make_spec(g.rank, size, 4), g, layers=(0, 1)) for g in groups]
    reference = Reference(kind, torch.bfloat16, pools[0].shard.planner.layout, range(1), 3)
    table = list(range(size, 2 * size + 1))
    cached = 4 * size
    prefill(pools, kind, reference, Batch([table[:size]], [0], [cached]))
    loc = Batch([table], [cached], [cached + 3]).locs(4)
    parts = reference.draw(0, loc[cached:])
    contexts = [p.shard_extend(page_table([table]), [0], [cached], [cached + 3]) for p in pools]
    for context in contexts:
        context.__enter__()
    for pool in pools:
        write(pool, kind, 0, loc[cached:], parts)
    for pool in pools:
        found = read(pool, kind, 0, loc)
        for part, got in enumerate(found):
            assert torch.equal(reference.part(0, loc, part).expand_as(got), got)
    for context in contexts:
        context.__exit__(None, None, None)
