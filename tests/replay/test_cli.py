"""The command as a user meets it: texts, exit statuses, standard input, start-up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from radix import POLICIES as TREE_POLICIES
from replay.cli import POLICIES, main
from tests.replay.replay_builders import mooncake, write_lines

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(main, list(arguments), input=stdin, prog_name="rotaradix")


def spawn(*arguments, stdin=b"", **environment):
    return subprocess.run(
        [sys.executable, "-m", "replay", *arguments],
        input=stdin,
        capture_output=True,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """Make a small Mooncake trace `t` in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "t", [mooncake(513, [0, 1]), mooncake(513, [0, 1])])
    return "t"


def test_a_replay_prints_facts_table_and_definition(trace):
    result = invoke("replay", trace, "--capacity", "1k,2k")
    lines = result.stdout.splitlines()

    assert result.exit_code == 0
    assert lines[0].startswith("t: Mooncake (plain), blocks of 512 tokens")
    assert [line.split()[0] for line in lines[6:8]] == ["512", "1,536"]
    assert lines[9].startswith("hit D2: cached leading tokens / all input tokens")


def test_json_output_parses(trace):
    result = invoke("replay", trace, "--capacity", "2p", "--json", "--hit", "D1")
    document = json.loads(result.stdout)

    assert document["results"][0]["hits"] == 2
    assert document["results"][0]["total"] == 4


def test_the_command_offers_the_policies_of_the_tree():
    assert tuple(TREE_POLICIES) == POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs(trace, policy):
    result = invoke("replay", trace, "--capacity", "1p", "--policy", policy)

    assert result.exit_code == 0
    assert f"; {policy}; " in " ".join(result.stdout.split())


def test_standard_input_is_a_trace():
    result = invoke("replay", "-", "--capacity", "32", stdin=b"[1,2,3]\n[1,2,3]\n")

    assert result.exit_code == 0
    assert result.stdout.startswith("<stdin>: token ids (plain)")


def test_shards_show_copies_beside_shared_pools(trace):
    options = ["--shards", "2,4", "--in-flight", "1,2", "--rotation", "chain,seam", "--capacity"]
    document = json.loads(invoke("replay", trace, *options, "2p,3p", "--json").stdout)
    rows = [(row["capacity_pages"], row["sharding"]["ranks"]) for row in document["results"]]

    assert rows == [(c, n) for c in (2, 3) for n in (1, 1, 2, 2, 2, 2, 4, 4, 4, 4)]


def test_the_same_replay_prints_the_same_shards():
    arguments = ("replay", "example", "--limit", "200", "--capacity", "20k", "--shards", "4")
    first, second = (json.loads(invoke(*arguments, "--json").stdout) for _ in range(2))
    for row in first["results"] + second["results"]:
        del row["replay_microseconds"], row["requests_per_second"]

    assert first == second


def test_shards_and_their_switches_print_tables(trace):
    options = ["--shards", "2", "--rotation", "chain", "--no-leases", "--blind-eviction"]
    result = invoke("replay", trace, "--capacity", "1k", *options)

    assert result.exit_code == 0
    assert "Without leases. Blind eviction." in result.stdout


def test_owner_lanes_are_replayed_beside_interleaved_pages(trace):
    options = ("replay", trace, "--capacity", "2p", "--shards", "2", "--layout")
    rows = json.loads(invoke(*options, "interleave,owner-lane", "--json").stdout)["results"]

    assert [row["sharding"]["layout"] for row in rows] == [None, "interleave", "owner-lane"]
    assert "owner-lane" in invoke(*options, "owner-lane").stdout


def test_the_example_needs_no_file():
    result = invoke("replay", "example", "--limit", "100", "--capacity", "50k,unbounded")

    assert result.exit_code == 0
    assert result.stdout.startswith("example: generated chats, seed 0")


MISTAKES = {
    ("replay", "nowhere"): "nowhere: no such file; give a trace file, '-' for standard input, or "
    "'example'",
    ("replay", "t", "--capacity", "0"): "--capacity '0': a capacity must be at least one page; "
    "give tokens (500k, 5M), pages (1000p), a range (1M:5M:1M, 1M:16M:x2) or unbounded",
    ("replay", "t", "--capacity", "lots"): "--capacity 'lots': 'lots' is no amount; give tokens "
    "(500k, 5M), pages (1000p), a range (1M:5M:1M, 1M:16M:x2) or unbounded",
    ("replay", "t", "--capacity", "511"): "--capacity 511: less than one page of 512 tokens; give "
    "at least 512",
    ("replay", "t", "--page-size", "768"): "--page-size 768: an id of this trace stands for 512 "
    "tokens, which is no whole number of pages of 768; give a divisor of 512",
    ("replay", "t", "--page-size", "0"): "Invalid value for '--page-size': 0 is not in the range "
    "x>=1.",
    ("replay", "t", "--block-size", "128"): "t:1: 2 hash_ids for input_length=513; blocks of 128 "
    "tokens (ceil) make 5; --block-size 512 would fit this line",
    ("replay", "example", "--block-size", "16"): "--block-size 16: the example holds token ids and "
    "has no blocks; use --page-size",
    ("replay", "example", "--expand"): "--expand: the trace holds token ids already; leave the "
    "option out",
    ("replay", "t", "--shards", "many"): "--shards 'many': 'many' is no whole number from 1 to "
    "1024; give one, or a list such as 4,8",
    ("replay", "t", "--shards", "8", "--in-flight", "0"): "--in-flight '0': '0' is no whole number "
    "from 1 to 1024; give one, or a list such as 1,8,32",
    ("replay", "t", "--shards", "8", "--rotation", "up"): "--rotation 'up': 'up' is no rotation; "
    "give chain, seam or chain,seam",
    ("replay", "t", "--in-flight", "8"): "--in-flight: needs a sharded pool; add --shards, such as "
    "--shards 8",
    ("replay", "t", "--layout", "owner-lane"): "--layout: needs a sharded pool; add --shards, such "
    "as --shards 8",
    ("replay", "t", "--shards", "8", "--layout", "lanes"): "--layout 'lanes': 'lanes' is no "
    "layout; give interleave, owner-lane or interleave,owner-lane",
    ("replay", "t", "--shards", "8", "--layout", "owner-lane", "--rotation", "seam"): "--rotation: "
    "owner lanes have no rotation bases; leave it out, or add --layout interleave",
    ("replay", "t", "--shards", "8", "--layout", "owner-lane", "--no-leases"): "--no-leases: owner "
    "lanes have no rotation bases; leave it out, or add --layout interleave",
    ("replay", "t", "--shards", "8", "--no-leases"): "--no-leases: only the chain rotation has "
    "leases; add --rotation chain",
    ("replay", "t", "--shards", "1024", "--capacity", "1G"): "--capacity: 2001953125 pages in 2 "
    "pools; one sweep holds at most 134217728, replay fewer at a time",
    ("replay",): "Missing argument 'TRACE'. See rotaradix replay --help",
    ("replay", "t", "--capacty", "5"): "No such option '--capacty'. Did you mean '--capacity'?",
    ("replai",): "No such command 'replai'. Did you mean 'replay'?",
    ("generate", "chat", "--turns", "0"): "turns=0: must be at least 1",
    ("generate", "chat", "--turns", "x"): "range 'x': give a number or low-high, such as 64 or "
    "64-192",
    ("generate", "unique", "-o", "no/such/folder"): "no/such/folder: cannot be written: No such "
    "file or directory",
}  # fmt: skip
CLICK_TEXTS = {("replay", "t", "--capacty", "5"), ("replai",)}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_and_status_2(trace, arguments):
    result = invoke(*arguments)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    if arguments not in CLICK_TEXTS:
        assert result.stderr == f"rotaradix: {MISTAKES[arguments]}\n"


def test_a_bad_line_deep_in_a_trace_is_named(trace):
    with open(trace, "a") as file:
        file.write("oops\n")
    result = invoke("replay", trace)

    assert result.exit_code == 2
    assert result.stderr.startswith("rotaradix: t:3: JSON is malformed")


def test_no_arguments_show_the_help_on_standard_error():
    result = invoke()

    assert result.exit_code == 2
    assert "replay" in result.stderr
    assert "generate" in result.stderr


def test_an_embedding_program_gets_the_exception():
    with pytest.raises(click.UsageError):
        main(["replay"], standalone_mode=False)


@pytest.mark.parametrize("kind", ["chat", "agents", "unique"])
@pytest.mark.parametrize("form", [[], ["--block-size", "16"]])
def test_a_generated_trace_replays(tmp_path, kind, form):
    path = str(tmp_path / "made")
    made = invoke("generate", kind, "--requests", "20", "--seed", "3", "-o", path, *form)
    replayed = invoke("replay", path, "--capacity", "unbounded", "--json", *form)

    assert (made.exit_code, made.output) == (0, "")
    assert json.loads(replayed.stdout)["results"][0]["requests"] == 20


def test_both_forms_of_a_generated_trace_have_the_same_pages(tmp_path):
    rows = []
    for form in ([], ["--block-size", "16"]):
        path = str(tmp_path / "made")
        invoke("generate", "chat", "--requests", "60", "-o", path, *form)
        options = ["--capacity", "unbounded", "--hit", "D3", "--json", *form]
        text = invoke("replay", path, *options).stdout
        rows.append(json.loads(text)["results"][0])

    assert rows[0]["hits"] == rows[1]["hits"]


def test_a_process_writes_equal_bytes_under_any_hash_seed_and_pipes_into_another():
    arguments = ("generate", "chat", "--requests", "12")
    first = spawn(*arguments, PYTHONHASHSEED="1")
    second = spawn(*arguments, PYTHONHASHSEED="2")
    replayed = spawn("replay", "-", "--capacity", "10k", stdin=first.stdout)

    assert first.stdout == second.stdout
    assert (replayed.returncode, replayed.stderr) == (0, b"")
    assert replayed.stdout.startswith(b"<stdin>: token ids (plain)")


def test_a_mistake_in_a_process_has_no_traceback():
    result = spawn("replay", "-", stdin=b"{")

    assert result.returncode == 2
    assert result.stderr.startswith(b"rotaradix: <stdin>:1: ")
    assert result.stderr.count(b"\n") == 1


def test_help_imports_nothing_heavy_and_a_replay_never_torch(tmp_path):
    path = write_lines(tmp_path / "t", [[1, 2]])
    program = (
        "import sys\n"
        "from replay.cli import main\n"
        "def heavy(names): return sorted(set(names) & set(sys.modules))\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not heavy(['numpy', 'rich', 'msgspec', 'torch', 'radix']), 'help is heavy'\n"
        f"try: main(['replay', {str(path)!r}, '--capacity', '32'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not heavy(['torch', 'triton']), 'replay imports torch'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False
    )

    assert result.stderr == b""
    assert result.returncode == 0


def test_a_reader_that_leaves_early_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "replay", "generate", "unique", "--requests", "2000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()

    assert stderr == b""
    assert process.returncode == 1
