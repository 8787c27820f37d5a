"""Synthetic traces are functions of parameters and seed, and have the shape they promise."""

import json
from itertools import islice, pairwise

import pytest

from replay.errors import ReplayError
from replay.formats import open_trace
from replay.synthetic import (
    AgentSpec,
    ChatSpec,
    Range,
    UniqueSpec,
    example_reader,
    generate,
)
from replay.write import mooncake_lines, token_lines
from tests.replay.replay_builders import seen_hits

SPECS = [ChatSpec(), AgentSpec(tool_tokens=Range(64, 64)), UniqueSpec()]


def prompts(spec, seed=1, requests=60):
    return [p.tolist() for p in generate(spec, seed=seed, requests=requests)]


@pytest.mark.parametrize("spec", SPECS)
def test_equal_seeds_give_equal_traces_and_others_do_not(spec):
    assert prompts(spec) == prompts(spec)
    assert prompts(spec) != prompts(spec, seed=2)


@pytest.mark.parametrize("spec", SPECS)
def test_a_shorter_trace_is_the_start_of_a_longer_one(spec):
    assert prompts(spec, requests=20) == prompts(spec)[:20]


def test_unique_prompts_share_no_first_token_run():
    assert len({tuple(p[:8]) for p in prompts(UniqueSpec())}) == 60


def test_one_hot_prompt_starts_every_chat():
    spec = ChatSpec(systems=1, system_tokens=Range(48, 48), concurrent=8)

    assert len({tuple(p[:48]) for p in prompts(spec)}) == 1


@pytest.mark.parametrize("pages", [(1, 1), (1, 3), (1, 9)])
def test_turns_of_whole_pages_keep_a_chat_in_whole_steps(pages):
    low, high = pages
    spec = ChatSpec(
        systems=1,
        system_tokens=Range(160, 160),
        turn_tokens=Range(low * 16, high * 16),
        answer_tokens=Range(0, 0),
        turns=Range(4, 4),
        concurrent=1,
    )
    lengths = [160, *map(len, prompts(spec, requests=4))]
    growth = [b - a for a, b in pairwise(lengths)]

    assert all(low * 16 <= step <= high * 16 for step in growth)


def test_an_agents_next_prompt_extends_its_last():
    spec = AgentSpec(tools=1, tool_tokens=Range(32, 32), steps=Range(9, 9), concurrent=1)
    run = prompts(spec, requests=9)

    assert all(b[: len(a)] == a and len(b) > len(a) for a, b in pairwise(run))


def test_token_lines_read_back_as_the_prompts(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"".join(token_lines(generate(SPECS[0], seed=3, requests=9))))

    assert [list(r.ids) for r in open_trace(str(path))] == prompts(SPECS[0], seed=3, requests=9)


def test_mooncake_ids_share_exactly_what_the_tokens_share():
    made = list(generate(ChatSpec(concurrent=4), seed=3, requests=40))
    lines = [json.loads(line) for line in mooncake_lines(made, 16)]
    blocks = [[tuple(p[i : i + 16]) for i in range(0, len(p), 16)] for p in made]

    assert [len(p) for p in made] == [line["input_length"] for line in lines]
    assert seen_hits(blocks) == seen_hits([line["hash_ids"] for line in lines])


def test_the_example_reads_the_same_twice_and_reports_progress():
    reader = example_reader()
    first = list(islice(reader, 5))

    assert first == list(islice(reader, 5))
    assert 0.0 < reader.progress() < 1.0


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-2", "1-2-3", "1.5"])
def test_a_bad_range_says_what_one_is(text):
    with pytest.raises(ReplayError, match="range"):
        Range.parse(text)


def test_a_spec_without_conversations_is_refused():
    with pytest.raises(ReplayError, match="concurrent=0: must be at least 1"):
        ChatSpec(concurrent=0)
    with pytest.raises(ReplayError, match="steps=0: must be at least 1"):
        AgentSpec(steps=Range(0, 3))
