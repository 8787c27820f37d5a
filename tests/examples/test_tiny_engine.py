"""The tiny engine: every mode generates the same tokens, and the cached ones compute less."""

import doctest
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from examples.tiny_engine import run, scheduler
from examples.tiny_engine.compare import compare, smallest_margin
from examples.tiny_engine.engine import Engine, EngineConfig
from examples.tiny_engine.kv import RecomputeKv, ShardedKv
from examples.tiny_engine.model import ForwardBatch, Model, ModelConfig
from examples.tiny_engine.ranks import Job, run_ranks
from examples.tiny_engine.scheduler import chunk_end
from examples.tiny_engine.workload import WorkloadConfig, make_chats
from scratch import SoloGroup

VARIANTS = ["gqa", "mla"]
CHATS = make_chats(
    WorkloadConfig(
        num_systems=2,
        num_chats=8,
        num_turns=3,
        system_tokens=(18, 30),
        message_tokens=(4, 16),
        answer_tokens=(2, 4),
    )
)
ENGINE = EngineConfig(
    page_size=4,
    pages_per_rank=40,
    decode_pages=160,
    chunk_tokens=24,
    max_batch=2,
    max_prefix_tokens=240,
    max_context=128,
)
FEW_PAGES = 44
"""Pages of all ranks together that don't hold all chats."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job(variant="gqa", chats=CHATS, **changes):
    return Job(ModelConfig(variant, num_layers=2), replace(ENGINE, **changes), chats)


def shared_pool(ranks, **changes):
    """Changes of an engine whose group has too few pages to keep everything."""
    return {"pages_per_rank": FEW_PAGES // ranks, **changes}


@pytest.fixture(scope="module")
def references():
    """What each variant generates without a cache, chunk by chunk on one rank."""
    return {v: run_ranks([job(v, use_cache=False)], 1, "threads")[0][0] for v in VARIANTS}


def assert_agrees(results, reference):
    """Same tokens, same state on all ranks, and logits apart by far less than any gap."""
    agreement = compare(results, reference)
    assert agreement.same_answers
    assert agreement.same_state
    assert agreement.logit_difference < smallest_margin(reference) / 100


def assert_cached(result):
    stats = result.stats
    assert stats.saved_tokens > 0
    assert stats.evicted_pages > 0
    assert stats.overlapped_batches > stats.batches // 2
    assert stats.declined_inserts == 0


# Tokens are what the model says, whatever the mode


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_a_cache_every_token_is_what_a_full_recompute_gives(variant, references):
    model = Model(ModelConfig(variant, num_layers=2))
    answers = references[variant].answers
    for number, chat in enumerate(CHATS):
        said = list(chat.system)
        for i, turn in enumerate(chat.turns):
            said += turn.message
            for token, logits in zip(
                answers[number, i], references[variant].logits[number, i], strict=True
            ):
                anew = model.forward(ForwardBatch.of([said], [0], "cpu"), RecomputeKv())[0]
                assert int(anew.argmax()) == token
                assert (anew - logits).abs().max() < 1e-5
                said.append(token)


def test_without_a_cache_every_prompt_token_is_computed(references):
    stats = references["gqa"].stats
    assert stats.saved_tokens == 0
    assert stats.computed_tokens == stats.prompt_tokens > 500


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_with_a_cache_agrees_and_saves(variant, references):
    results = run_ranks([job(variant, **shared_pool(1))], 1, "threads")[0]
    assert_agrees(results, references[variant])
    assert_cached(results[0])


@pytest.mark.parametrize("rotation", ["chain", "seam"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_in_one_process_agree_and_save(variant, ranks, rotation, references):
    changes = shared_pool(ranks, rotation=rotation)
    results = run_ranks([job(variant, **changes)], ranks, "threads")[0]
    assert_agrees(results, references[variant])
    assert_cached(results[0])
    assert results[0].gathered_pages >= results[0].prefix_pages > 0


@pytest.mark.parametrize(
    ("ranks", "rotation"),
    [(2, "seam"), pytest.param(4, "chain", marks=pytest.mark.slow)],
)
def test_ranks_in_processes_over_gloo_agree_and_save(ranks, rotation, references):
    changes = shared_pool(ranks, rotation=rotation)
    by_job = run_ranks([job(v, **changes) for v in VARIANTS], ranks, "processes")
    for variant, results in zip(VARIANTS, by_job, strict=True):
        assert len(results) == ranks
        assert_agrees(results, references[variant])
        assert_cached(results[0])


def test_more_ranks_of_the_same_size_save_more():
    saved = []
    for ranks in (1, 2):
        results = run_ranks([job(pages_per_rank=32)], ranks, "threads")[0]
        saved.append(results[0].stats.saved_tokens)
    assert saved[0] < saved[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_modes_agree_on_one_gpu(variant, references):
    for ranks in (1, 2):
        changes = shared_pool(ranks, device="cuda")
        results = run_ranks([job(variant, **changes)], ranks, "threads")[0]
        assert_agrees(results, references[variant])
        assert_cached(results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("rotation", ["seam", "chain"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_with_a_gpu_each_agree_and_save(ranks, rotation, references):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    changes = shared_pool(ranks, rotation=rotation, device="cuda", max_prefix_tokens=256)
    by_job = run_ranks([job(v, **changes) for v in VARIANTS], ranks, "processes")
    for variant, results in zip(VARIANTS, by_job, strict=True):
        assert len(results) == ranks
        assert_agrees(results, references[variant])
        assert_cached(results[0])


# The checks would notice


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_page_read_from_the_wrong_place_changes_logits(variant, references, monkeypatch):
    real = ShardedKv.read

    def misread(self, layer, slots):
        first, second = real(self, layer, slots)
        rows = torch.arange(len(first))
        rows[: ENGINE.page_size] += ENGINE.page_size
        return first[rows], second[rows]

    monkeypatch.setattr(ShardedKv, "read", misread)
    results = run_ranks([job(variant, **shared_pool(2))], 2, "threads")[0]
    agreement = compare(results, references[variant])
    assert not agreement.same_answers or agreement.logit_difference > 0.1


def test_a_leaked_page_is_an_error():
    engine = Engine(ENGINE, Model(ModelConfig(num_layers=1)), SoloGroup())
    assert engine.allocator.alloc(ENGINE.page_size) is not None
    with pytest.raises(RuntimeError, match="held"):
        engine.run(CHATS[:1])


def test_a_row_that_stays_taken_is_an_error():
    engine = Engine(ENGINE, Model(ModelConfig(num_layers=1)), SoloGroup())
    engine.cache.pool().alloc(1)
    with pytest.raises(RuntimeError, match=r"left behind.*'rows': 1"):
        engine.run(CHATS[:1])


# Tight places


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_that_give_up_their_pages_are_served_all_the_same(ranks, references):
    results = run_ranks([job(pages_per_rank=24 // ranks, chunk_tokens=8)], ranks, "threads")[0]
    assert_agrees(results, references["gqa"])
    assert results[0].stats.preemptions > 0


@pytest.mark.parametrize("rotation", ["chain", "seam"])
def test_a_small_scratch_makes_smaller_batches(rotation, references):
    jobs = [
        job(pages_per_rank=60, rotation=rotation, max_prefix_tokens=tokens) for tokens in (64, 240)
    ]
    tight, wide = run_ranks(jobs, 2, "threads")
    assert_agrees(tight, references["gqa"])
    assert tight[0].stats.batches > wide[0].stats.batches


def test_leases_keep_inserts_from_being_declined_and_tokens_are_right_without():
    chats = make_chats(
        WorkloadConfig(num_systems=1, num_chats=4, num_turns=1, system_tokens=(60, 60))
    )
    reference = run_ranks([job(chats=chats, use_cache=False)], 1, "threads")[0][0]
    changes = {"pages_per_rank": 60, "max_batch": 1, "rotation": "chain"}
    jobs = [job(chats=chats, use_leases=leases, **changes) for leases in (True, False)]
    with_leases, without = run_ranks(jobs, 4, "threads")
    for results in (with_leases, without):
        assert_agrees(results, reference)
    assert with_leases[0].stats.declined_inserts == 0
    assert without[0].stats.declined_inserts > 0


def test_a_prompt_that_no_pool_holds_is_an_error_that_says_so():
    engine = Engine(
        replace(ENGINE, pages_per_rank=4), Model(ModelConfig(num_layers=1)), SoloGroup()
    )
    with pytest.raises(RuntimeError, match=r"a prompt of \d+ tokens doesn't fit"):
        engine.run(CHATS[:1])


def test_a_rank_that_fails_ends_the_others(monkeypatch):
    real = ShardedKv.write

    def failing(self, layer, slots, parts):
        if self.pool.shard.planner.spec.shard_rank == 1:
            raise OSError("rank 1 is out of order")
        real(self, layer, slots, parts)

    monkeypatch.setattr(ShardedKv, "write", failing)
    with pytest.raises((OSError, RuntimeError), match=r"out of order|left the group"):
        run_ranks([job()], 2, "threads")


@pytest.mark.parametrize(
    ("start", "stop", "room", "end"),
    [(0, 7, 8, 7), (0, 8, 8, 8), (0, 9, 8, 8), (8, 30, 12, 20), (8, 30, 22, 30)],
)
def test_chunks_end_on_pages_or_with_the_prompt(start, stop, room, end):
    assert chunk_end(start, stop, room, page_size=4) == end


def test_the_scheduler_s_doctests_hold():
    assert doctest.testmod(scheduler).failed == 0


# The command line


def test_the_command_prints_a_column_a_mode_and_succeeds():
    arguments = ["--ranks", "2", "--meeting", "threads", "--variant", "mla", "--chats", "3"]
    ran = CliRunner().invoke(run.main, arguments)
    assert ran.exit_code == 0, ran.output
    header = next(line for line in ran.output.splitlines() if "no cache" in line)
    assert header.split() == ["no", "cache", "1", "rank", "2", "threads"]
    assert "NO" not in ran.output
    for figure in ("saved", "evicted", "declined", "logit difference"):
        assert figure in ran.output


def test_the_command_fails_when_the_modes_disagree(monkeypatch):
    real = run.compare
    monkeypatch.setattr(run, "compare", lambda *runs: replace(real(*runs), same_answers=False))
    ran = CliRunner().invoke(run.main, ["--ranks", "", "--variant", "gqa", "--chats", "2"])
    assert ran.exit_code == 1
    assert "NO" in ran.output


def test_the_command_s_default_is_seams():
    ran = CliRunner().invoke(run.main, ["--ranks", "", "--variant", "gqa", "--chats", "2"])
    assert ran.exit_code == 0, ran.output
    assert "seam rotation" in ran.output


@pytest.fixture
def gpus(monkeypatch):
    """Let torch say that it sees some GPUs."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize(
    ("device", "num_gpus", "wanted", "ranks", "meeting"),
    [
        ("cpu", 0, None, 4, "processes"),
        ("cpu", 8, "threads", 4, "threads"),
        ("cuda", 1, None, 2, "threads"),
        ("cuda", 4, None, 4, "processes"),
        ("cuda", 3, None, 4, "threads"),
        ("cuda", 4, "threads", 4, "threads"),
        ("cuda", 2, "processes", 2, "processes"),
    ],
)
def test_ranks_are_processes_where_each_can_have_a_device(
    device, num_gpus, wanted, ranks, meeting, gpus
):
    gpus(num_gpus)
    assert run.choose_meeting(device, wanted, ranks) == meeting


@pytest.mark.parametrize(
    ("num_gpus", "message"),
    [(0, "needs a GPU that torch can use"), (3, "needs a GPU a rank: 4 ranks, 3 here")],
)
def test_too_few_gpus_are_an_error_that_says_so(num_gpus, message, gpus):
    gpus(num_gpus)
    ran = CliRunner().invoke(run.main, ["--device", "cuda", "--meeting", "processes"])
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.replace("│", " ").split())


def test_processes_without_a_gpu_each_are_never_started(gpus):
    gpus(1)
    with pytest.raises(ValueError, match=r"2 processes need a GPU each, 1 here"):
        run_ranks([job(device="cuda")], 2, "processes")


@pytest.mark.parametrize("value", ["1", "two", "2,0"])
def test_numbers_of_ranks_that_make_no_sense_are_refused(value):
    ran = CliRunner().invoke(run.main, ["--ranks", value])
    assert ran.exit_code == 2
    assert "from 2 on" in ran.output
