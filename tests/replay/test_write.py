"""Files of generated traces: compressed by their suffix, equal for equal arguments."""

import pytest
from click.testing import CliRunner

from replay.cli import main
from replay.formats import open_trace


def generate(path, *options):
    arguments = ["generate", "unique", "--requests", "20", *options, "-o", str(path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert (result.exit_code, result.output) == (0, "")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("suffix", "compression"), [("", "plain"), (".gz", "gzip"), (".zst", "zstd"), (".xz", "xz")]
)
def test_a_suffix_compresses_and_nothing_else_changes(tmp_path, suffix, compression):
    plain = tmp_path / "plain.jsonl"
    packed = tmp_path / f"packed.jsonl{suffix}"
    size = len(generate(plain))

    assert (len(generate(packed)) < size) == bool(suffix)
    reader = open_trace(str(packed), block_size=None)
    assert reader.info.compression == compression
    assert [list(r.ids) for r in reader] == [
        list(r.ids) for r in open_trace(str(plain), block_size=None)
    ]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".xz"])
def test_equal_arguments_give_equal_bytes(tmp_path, suffix):
    first, second = (generate(tmp_path / f"{name}{suffix}") for name in ("one", "two"))

    assert first == second
    assert generate(tmp_path / f"three{suffix}", "--seed", "1") != first


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    path = tmp_path / "nowhere" / "trace.jsonl.zst"
    result = CliRunner().invoke(main, ["generate", "unique", "-o", str(path)])

    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in result.output
