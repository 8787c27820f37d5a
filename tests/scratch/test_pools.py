"""Plain pools, and what sharded ones share with them: shapes, dtypes, layers, refusals; B65-B67."""

from types import SimpleNamespace

import pytest
import torch

from scratch import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    PageInterleaveMHATokenToKVPool,
    PageInterleaveMLATokenToKVPool,
    SoloGroup,
)
from tests.scratch.scratch_builders import layer, make_spec
from tests.scratch.scratch_worlds import make_pool

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STORED = [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2]


def make_mha(dtype=torch.bfloat16, **kwargs):
    return MHATokenToKVPool(32, 4, dtype, 2, 3, 2, "cpu", **kwargs)


def make_mla(dtype=torch.bfloat16, **kwargs):
    return MLATokenToKVPool(32, 4, dtype, 5, 2, 2, "cpu", **kwargs)


def test_tensors_have_a_trash_page():
    """size + ps rows, zeroed; B65."""
    assert [tuple(k.shape) for k in make_mha().k_buffer] == [(36, 2, 3)] * 2
    assert [tuple(v.shape) for v in make_mha().v_buffer] == [(36, 2, 3)] * 2
    assert [tuple(kv.shape) for kv in make_mla().kv_buffer] == [(36, 1, 7)] * 2
    assert not make_mha().k_buffer[0].any()


def test_sharded_pools_have_the_same_tensors():
    """B66, C133: stock shapes per rank, whatever N."""
    spec = make_spec(0, 1, 4)
    for kind, plain in (("mha", MHATokenToKVPool), ("mla", MLATokenToKVPool)):
        pool = make_pool(kind, spec, SoloGroup(), size=32)
        assert isinstance(pool, plain)
        tensors = pool.k_buffer if kind == "mha" else pool.kv_buffer
        assert {tensor.shape[0] for tensor in tensors} == {36}


@pytest.mark.parametrize("given", FLOATS, ids=str)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_rows_are_converted_to_the_pools_dtype(given, stored):
    """Both shapes of rows, strided ones too; conversion is Tensor.to."""
    pool, loc = make_mha(stored), torch.tensor([9, 4, 30], dtype=torch.int32)
    both = torch.randn(3, 2, 2, 3).to(given)
    k, v = both[:, 0], both[:, 1]
    pool.set_kv_buffer(layer(1), loc, k.reshape(3, 6), v)
    for buffer, value in ((pool.get_key_buffer(1), k), (pool.get_value_buffer(1), v)):
        assert torch.equal(value.to(stored).float(), buffer.float()[[9, 4, 30]])
    assert not pool.k_buffer[0].float().any()


@pytest.mark.parametrize("given", FLOATS, ids=str)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dst", [None, torch.bfloat16, torch.float32])
def test_mla_rows_are_read_in_the_wanted_dtype(given, stored, dst):
    """get_mla_kv_buffer(layer, loc, dst_dtype); B67."""
    pool, loc = make_mla(stored), torch.tensor([9, 4, 30])
    nope, rope = torch.randn(3, 1, 5).to(given), torch.randn(3, 2).to(given)
    pool.set_mla_kv_buffer(layer(0), loc, nope, rope)
    got_nope, got_rope = pool.get_mla_kv_buffer(layer(0), loc.flip(0), dst)
    assert (got_nope.shape, got_rope.shape) == ((3, 1, 5), (3, 1, 2))
    assert got_nope.dtype == got_rope.dtype == (dst or stored)
    wanted = nope.to(stored).to(dst or stored).float().flip(0)
    assert torch.equal(wanted, got_nope.float())
    wanted = rope.to(stored).to(dst or stored).float().flip(0)
    assert torch.equal(wanted, got_rope.float()[:, 0])


def test_mla_takes_whole_rows_too():
    pool, loc = make_mla(torch.float32), torch.tensor([5, 6])
    rows = torch.randn(2, 1, 7)
    pool.set_kv_buffer(layer(1), loc, rows, None)
    assert torch.equal(rows, pool.get_key_buffer(1)[5:7])
    assert torch.equal(rows[..., :5], pool.get_value_buffer(1)[5:7])
    k, v = pool.get_kv_buffer(1)
    assert torch.equal(k[..., :5], v)


@pytest.mark.parametrize("make", [make_mha, make_mla])
def test_layers_start_where_they_are_told(make):
    """B65: ids of a pipeline stage."""
    pool = make(start_layer=6, end_layer=8)
    assert pool.get_key_buffer(7) is not pool.get_key_buffer(6)
    for layer_id in (5, 8, 0, -1):
        with pytest.raises(ValueError, match=rf"layer_id={layer_id} is not in \[6, 8\)"):
            pool.get_key_buffer(layer_id)
        with pytest.raises(ValueError, match="layer_id"):
            pool.get_value_buffer(layer_id)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"start_layer": 2, "end_layer": 5}, "end_layer=5 must be .*= 4"),
        ({"start_layer": -1}, "start_layer=-1"),
        ({"end_layer": 1}, "end_layer=1"),
    ],
)
def test_layer_numbers_must_agree(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_mha(**kwargs)


@pytest.mark.parametrize(("size", "ps"), [(30, 4), (0, 4), (-4, 4), (4, 0)])
def test_sizes_are_whole_pages(size, ps):
    with pytest.raises(ValueError, match=f"size={size} .*page_size={ps}"):
        MHATokenToKVPool(size, ps, torch.float32, 2, 3, 1, "cpu")
    with pytest.raises(ValueError, match="layer_num=0"):
        MLATokenToKVPool(8, 4, torch.float32, 2, 3, 0, "cpu")


LOC = torch.tensor([4, 5])
GOOD = torch.ones(2, 2, 3)
BAD_WRITES = {
    "too few rows": (LOC, GOOD[:1], GOOD, 1),
    "short values": (LOC, GOOD, GOOD[:, :1], 1),
    "no rows at all": (LOC, GOOD, torch.tensor(1.0), 1),
    "float slots": (LOC.float(), GOOD, GOOD, 1),
    "two-dimensional slots": (LOC[None], GOOD, GOOD, 1),
    "negative slot": (torch.tensor([4, -1]), GOOD, GOOD, 1),
    "slot beyond the pool": (torch.tensor([4, 36]), GOOD, GOOD, 1),
    "layer beyond the pool": (LOC, GOOD, GOOD, 2),
}


@pytest.mark.parametrize("name", BAD_WRITES)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_refused_write_writes_nothing(name, sharded):
    """K is not written when V is refused."""
    loc, k, v, layer_id = BAD_WRITES[name]
    pool = make_mha()
    if sharded:
        pool = PageInterleaveMHATokenToKVPool(
            *(32, 4, torch.bfloat16, 2, 3, 2, "cpu"),
            shard_spec=make_spec(0, 1, 4, 4, 4),
            shard_group=SoloGroup(),
        )
    with pytest.raises(ValueError, match=r"shape|loc is|slot -?\d+|layer_id"):
        pool.set_kv_buffer(layer(layer_id), loc, k, v)
    assert not any(tensor.any() for tensor in (*pool.k_buffer, *pool.v_buffer))


def test_reads_of_slots_out_of_range_are_refused():
    pool = make_mla()
    for loc in (torch.tensor([36]), torch.tensor([-1]), torch.tensor([1.0])):
        with pytest.raises(ValueError, match=r"slot|loc is"):
            pool.get_mla_kv_buffer(layer(0), loc, None)


def test_row_bytes_and_budget_say_what_a_token_costs():
    """B71."""
    assert make_mha().row_bytes == 2 * 2 * 3 * 2
    assert make_mla(torch.float8_e4m3fn).row_bytes == 7
    spec = make_spec(0, 1, 4)
    pool = make_pool("mha", spec, SoloGroup())
    slots = [pool.shard.gather.stage(i) for i in _staged(pool)]
    held = sum({slot.data_ptr(): slot.nbytes for slot in slots}.values())
    assert held == pool.scratch_budget.scratch_bytes == 2 * spec.scratch_rows * pool.row_bytes


def _staged(pool):
    pool.begin_shard_extend(torch.arange(8, 12, dtype=torch.int32)[None], [0], [0], [4])
    return range(3)


@pytest.mark.parametrize("make", [PageInterleaveMHATokenToKVPool, PageInterleaveMLATokenToKVPool])
def test_a_sharded_pool_agrees_with_its_spec_and_group(make):
    args = (32, 4, torch.bfloat16, 2, 3, 2, "cpu")
    spec = make_spec(0, 1, 4)
    group = SimpleNamespace(rank=1, size=2)
    with pytest.raises(ValueError, match=r"page_size=4 differs .*page_size=16"):
        make(*args, shard_spec=make_spec(0, 1), shard_group=SoloGroup())
    with pytest.raises(ValueError, match="the group says rank 1 of 2"):
        make(*args, shard_spec=spec, shard_group=group)
    with pytest.raises(ValueError, match="36 rows, the layout 40"):
        make(*args, shard_spec=spec, shard_group=SoloGroup(), layout=spec.layout(9))
    pool = make(*args, shard_spec=spec, shard_group=SoloGroup())
    assert pool.num_slots == 36
