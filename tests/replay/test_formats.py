"""Formats: what is detected, what comes out, and what each mistake says."""

import json
import os
from dataclasses import replace

import pytest

from replay.errors import TraceError
from replay.formats import open_trace
from tests.replay.replay_builders import mooncake, write_lines


def read(path, **options):
    reader = open_trace(str(path), **options)
    return reader, [(r.input_length, list(r.ids)) for r in reader]


def session(requests, **changes):
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests} | changes


def test_mooncake_lines_are_block_requests_with_a_tail_id(tmp_path):
    path = write_lines(tmp_path / "t", [mooncake(512, [5]), mooncake(513, [5, 6], 1500)])
    reader, rows = read(path)
    info = reader.info

    assert rows == [(512, [5]), (513, [5, 6])]
    assert (info.format, info.block_size, info.tail) == ("Mooncake", 512, "ceil")
    assert (info.scope, info.time_unit) == ("global", "ms")


def test_a_tail_without_ids_is_detected(tmp_path):
    path = write_lines(tmp_path / "t", [mooncake(513, [5])])

    assert read(path)[0].info.tail == "floor"


def test_a_tail_rule_once_settled_holds(tmp_path):
    path = write_lines(tmp_path / "t", [mooncake(513, [5, 6]), mooncake(513, [5])])

    with pytest.raises(TraceError, match=r"t:2: 1 hash_ids for input_length=513"):
        read(path)


def test_a_given_block_size_replaces_the_default(tmp_path):
    path = write_lines(tmp_path / "t", [mooncake(9, [1, 2, 3])])

    assert read(path, block_size=4)[0].info.block_size == 4


def test_timestamps_come_out_in_milliseconds(tmp_path):
    bailian = mooncake(16, [1], 2) | {"chat_id": 7}
    files = [
        write_lines(tmp_path / "m", [mooncake(512, [1], 2)]),
        write_lines(tmp_path / "b", [bailian]),
        write_lines(tmp_path / "s", [session([{"t": 2, "in": 64, "hash_ids": [1]}])]),
    ]

    assert [next(iter(open_trace(str(f)))).timestamp_ms for f in files] == [2.0, 2000.0, 2000.0]


def test_bailian_blocks_are_16_tokens_and_times_seconds(tmp_path):
    path = write_lines(tmp_path / "t", [mooncake(17, [1, 2]) | {"chat_id": 7}])
    info = read(path)[0].info

    assert (info.format, info.block_size, info.tail, info.time_unit) == (
        "Bailian", 16, "ceil", "s",
    )  # fmt: skip


@pytest.mark.parametrize("row", [[1, 2, 3], {"token_ids": [1, 2, 3]}, {"tokens": [1, 2, 3]}])
def test_token_lines_are_lists_or_objects_with_one(tmp_path, row):
    reader, rows = read(write_lines(tmp_path / "t", [row, [4]]))

    assert rows == [(3, [1, 2, 3]), (1, [4])]
    assert not reader.info.has_blocks


def test_local_ids_of_two_sessions_never_meet(tmp_path):
    request = {"t": 0, "in": 130, "out": 1, "hash_ids": [1, 2]}
    _, rows = read(write_lines(tmp_path / "t", [session([request, request]), session([request])]))

    assert rows[0] == rows[1]
    assert not set(rows[0][1]) & set(rows[2][1])


def test_global_session_ids_stay_as_they_are(tmp_path):
    request = {"t": 0, "in": 130, "hash_ids": [1, 2]}
    _, rows = read(write_lines(tmp_path / "t", [session([request], hash_id_scope="global")]))

    assert rows == [(130, [1, 2])]


def test_sub_agents_unfold_where_they_stand(tmp_path):
    def entry(length):
        return {"t": 1.0, "in": length, "hash_ids": []}

    nested = {"t": 2.0, "type": "subagent", "requests": [entry(2), {"requests": [entry(3)]}]}
    path = write_lines(tmp_path / "t", [session([entry(1), nested, entry(4)])])
    requests = list(open_trace(str(path)))

    assert [r.input_length for r in requests] == [1, 2, 3, 4]
    assert [r.timestamp_ms for r in requests] == [1000.0, 3000.0, 3000.0, 1000.0]


def test_a_file_can_be_read_twice(tmp_path):
    path = write_lines(tmp_path / "t", [[1], [2]])
    reader = open_trace(str(path))

    assert list(reader) == list(reader)


def test_a_reading_that_was_left_halfway_starts_over(tmp_path):
    reader = open_trace(str(write_lines(tmp_path / "t", [[1], [2]])))
    next(iter(reader))

    assert [list(r.ids) for r in reader] == [[1], [2]]


def test_the_description_names_everything_detected(tmp_path):
    path = write_lines(tmp_path / "t", [mooncake(513, [5, 6])])
    info = replace(read(path)[0].info, name="t")

    assert info.describe() == (
        "t: Mooncake (plain), blocks of 512 tokens, partial tail has an id (ceil), ids global, "
        "time in ms"
    )


GOOD = json.dumps(mooncake(512, [1]))
MOONCAKE = (
    'a line of Mooncake is {"timestamp": ms, "input_length": n, "output_length": n, '
    '"hash_ids": [id, ...]}'
)
TOKENS = 'a line of token ids is [id, ...], or {"token_ids": [id, ...]}, or {"tokens": [id, ...]}'
MISTAKES = {
    "count": (
        [mooncake(513, [1, 2]), mooncake(1025, [1, 2])],
        "t:2: 2 hash_ids for input_length=1025; blocks of 512 tokens (ceil) make 3; mend the line",
    ),
    "count-of-another-block-size": (
        [mooncake(100, [1, 2, 3, 4, 5, 6, 7])],
        "t:1: 7 hash_ids for input_length=100; blocks of 512 tokens (ceil) make 1; --block-size 16 "
        "would fit this line",
    ),
    "type": (
        [GOOD, mooncake("512", [1])],
        f"t:2: Expected `int`, got `str` - at `$.input_length`; {MOONCAKE}",
    ),
    "negative-id": (
        [mooncake(1024, [1, -1])],
        f"t:1: Expected `int` >= 0 - at `$.hash_ids[1]`; {MOONCAKE}",
    ),
    "missing-field": (
        [GOOD, '{"timestamp": 0, "input_length": 512}'],
        f"t:2: Object missing required field `hash_ids`; {MOONCAKE}",
    ),
    "not-json": (
        ["hello"],
        "t:1: JSON is malformed: invalid character (byte 0); a trace has one JSON value a line",
    ),
    "cut-line": (
        ["[1]", "", "[1, 2"],
        f"t:3: Input data was truncated; {TOKENS}",
    ),
    "float-token": (
        ["[1, 2.5]"],
        f"t:1: Expected `int`, got `float` - at `$[1]`; {TOKENS}",
    ),
    "two-token-lists": (
        [{"tokens": [1], "token_ids": [1]}],
        "t:1: both token_ids and tokens are given; a line holds one list of tokens",
    ),
    "no-token-list": (
        ["[1]", {"prompt": "x"}],
        "t:2: neither token_ids nor tokens is given; a line is "
        '[id, ...], or {"token_ids": [id, ...]}, or {"tokens": [id, ...]}',
    ),
    "sub-agent-count": (
        [session([{"requests": [{"in": 129, "hash_ids": [1, 2, 3]}]}])],
        "t:1: 3 hash_ids in requests[0].requests[0] for in=129; blocks of 64 tokens (floor) make "
        "2; mend the line",
    ),
    "entry-without-ids": (
        [session([{"in": 129}])],
        "t:1: requests[0] lacks 'in' or 'hash_ids'; an entry is a request with both, or a "
        "sub-agent with 'requests'",
    ),
    "block-size-changes": (
        [session([]), session([], block_size=32)],
        "t:2: block_size=32, hash_id_scope=local; the first line says 64, local, and a file has "
        "one of each",
    ),
    "empty": ([], "t: holds no request; a trace has one JSON value a line"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_file_and_line(tmp_path, monkeypatch, mistake):
    rows, expected = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "t", rows)

    with pytest.raises(TraceError) as caught:
        read("t")

    assert str(caught.value) == expected


@pytest.mark.parametrize("text", ["7", '"x"', "null", "{}", '{"prompt": "x"}'])
def test_an_unknown_format_names_the_known_ones(tmp_path, text):
    path = write_lines(tmp_path / "t", [text])

    with pytest.raises(TraceError, match=r"t:1: unknown format; known are: token ids .*Mooncake"):
        open_trace(str(path))


def test_deep_nesting_is_an_error_not_a_crash(tmp_path):
    path = write_lines(tmp_path / "t", ["[1]", "[" * 100_000 + "]" * 100_000])

    with pytest.raises(TraceError, match="t:2: "):
        read(path)


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b'{"hash_ids": "\xff\xfe"}\n')

    with pytest.raises(TraceError, match="t:1: "):
        read(path)


def test_a_block_size_for_tokens_or_against_the_file_is_refused(tmp_path):
    tokens = write_lines(tmp_path / "tokens", [[1]])
    sessions = write_lines(tmp_path / "sessions", [session([])])

    with pytest.raises(TraceError, match="has no blocks; use --page-size"):
        open_trace(str(tokens), block_size=16)
    with pytest.raises(TraceError, match="the trace says block_size=64"):
        open_trace(str(sessions), block_size=16)


def test_a_pipe_is_read_once_and_says_so_the_second_time():
    receive, send = os.pipe()
    os.write(send, b"[1]\n[2]\n")
    os.close(send)
    reader = open_trace(f"/dev/fd/{receive}")
    os.close(receive)

    assert not reader.rewindable
    assert [list(r.ids) for r in reader] == [[1], [2]]
    with pytest.raises(TraceError, match="cannot be read twice; save it to a file first"):
        list(reader)
