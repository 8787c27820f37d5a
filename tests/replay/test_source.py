"""Lines come out the same whatever the file is packed with."""

import gzip
import lzma

import pytest
import zstandard

from replay.errors import TraceError
from replay.source import Source, detect_compression

TEXT = b"[1,2]\n\n  \n[3]\r\n[4]"
PACK = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("compression", PACK)
def test_packed_lines_equal_plain_lines(tmp_path, compression):
    path = tmp_path / "trace"
    path.write_bytes(PACK[compression](TEXT))
    source = Source(str(path))
    numbered = [(source.line_no, line) for line in source.lines()]
    source.close()

    assert source.compression == compression
    assert numbered == [(1, b"[1,2]"), (4, b"[3]"), (5, b"[4]")]


@pytest.mark.parametrize("compression", ["gzip", "zstd", "xz"])
def test_concatenated_archives_are_read_to_the_end(tmp_path, compression):
    path = tmp_path / "trace"
    path.write_bytes(PACK[compression](b"[1]\n") + PACK[compression](b"[2]\n"))
    source = Source(str(path))
    lines = list(source.lines())
    source.close()

    assert lines == [b"[1]", b"[2]"]


@pytest.mark.parametrize("compression", ["gzip", "zstd", "xz"])
def test_a_truncated_archive_is_one_clear_error(tmp_path, compression):
    path = tmp_path / "trace"
    path.write_bytes(PACK[compression](b"".join(b"[%d]\n" % i for i in range(50_000)))[:-9])
    source = Source(str(path))
    with pytest.raises(TraceError, match=f"damaged {compression} data"):
        list(source.lines())
    source.close()


def test_a_large_archive_comes_out_whole(tmp_path):
    lines = [b"[%d]" % i for i in range(200_000)]
    for compression in ("gzip", "zstd", "xz"):
        path = tmp_path / compression
        path.write_bytes(PACK[compression](b"\n".join(lines)))
        source = Source(str(path))

        assert list(source.lines()) == lines

        source.close()


def test_a_missing_file_is_named():
    with pytest.raises(TraceError, match=r"^/no/such\.jsonl: no such file; give a trace file"):
        Source("/no/such.jsonl")


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(TraceError, match="Is a directory"):
        Source(str(tmp_path))


def test_progress_reaches_the_end(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(TEXT)
    source = Source(str(path))
    list(source.lines())

    assert source.progress() == 1.0

    source.close()


def test_unknown_bytes_are_plain():
    assert detect_compression(b"") == "plain"
