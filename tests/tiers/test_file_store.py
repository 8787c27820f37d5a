"""Files: whole or absent, limited, there again after a restart, and never wrong bytes."""

import builtins
import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tiers import FileStore

SIZE = 8 + 4 + 8 + 2 + 16 + 4 + 16  # a header of 2 bytes and a body of 4


def fill(store, names, body=b"body"):
    for name in names:
        assert store.put(name, b"hd", body)


def path_of(folder, name):
    return folder / f"{name}.kv"


def test_blobs_are_there_again_after_a_restart_in_their_order_of_use(tmp_path):
    with FileStore(tmp_path, 3 * SIZE) as store:
        fill(store, "abc")
        store.use("a")
        assert store.names() == ["b", "c", "a"]
    for name, stamp in (("b", 1), ("c", 2), ("a", 3)):
        os.utime(path_of(tmp_path, name), ns=(stamp, stamp))
    with FileStore(tmp_path, 3 * SIZE) as store:
        assert store.names() == ["b", "c", "a"]
        assert (store.header("a"), store.body("a")) == (b"hd", b"body")
        fill(store, "d")
        assert store.names() == ["c", "a", "d"]
        assert not path_of(tmp_path, "b").exists()
        assert (store.counters.evicted, store.counters.written) == (1, 1)


def test_the_limit_holds_at_every_moment_and_at_a_start_with_less(tmp_path):
    with FileStore(tmp_path, 2 * SIZE + 5) as store:
        for i in range(20):
            fill(store, [f"n{i}"])
            on_disk = sum(p.stat().st_size for p in tmp_path.glob("*.kv"))
            assert on_disk == store.total_bytes <= 2 * SIZE + 5
        assert not store.put("large", b"", bytes(3 * SIZE))
        assert store.counters.too_large == 1
        assert len(store) == 2
    with FileStore(tmp_path, SIZE) as store:
        assert store.names() == ["n19"]
    with FileStore(tmp_path, 0) as store:
        assert not store.put("x", b"", b"")
        assert len(store) == 0


def test_unknown_names_are_a_miss(tmp_path):
    with FileStore(tmp_path, 1000) as store:
        assert (store.header("x"), store.body("x"), "x" in store) == (None, None, False)
        store.use("x")


@pytest.mark.parametrize("cut", [0, 1, 19, 20, 21, 37, 38, 41, 57])
def test_a_truncated_file_is_a_miss_with_one_warning_and_is_removed(tmp_path, caplog, cut):
    with FileStore(tmp_path, 1000) as store:
        fill(store, "a")
        os.truncate(path_of(tmp_path, "a"), cut)
        with caplog.at_level(logging.WARNING):
            assert store.body("a") is None
            assert store.body("a") is None
        assert len(caplog.records) == 1
        assert "a" not in store
        assert not path_of(tmp_path, "a").exists()
        assert store.total_bytes == 0
        fill(store, "a")
        assert store.body("a") == b"body"


@pytest.mark.parametrize("at", range(SIZE))
def test_a_flip_of_any_bit_is_never_returned(tmp_path, caplog, at):
    with FileStore(tmp_path, 1000, sync=False) as store:
        fill(store, "a")
        with open(path_of(tmp_path, "a"), "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << at % 8]))
        header, body = store.header("a"), store.body("a")
        assert header in (None, b"hd")
        assert body is None
        assert len(caplog.records) == store.counters.corrupted == 1


def test_a_longer_file_and_a_vanished_one_are_misses(tmp_path, caplog):
    with FileStore(tmp_path, 1000) as store:
        fill(store, "ab")
        with open(path_of(tmp_path, "a"), "ab") as file:
            file.write(b"x")
        path_of(tmp_path, "b").unlink()
        assert (store.body("a"), store.header("b")) == (None, None)
        assert len(caplog.records) == 2
        fill(store, "c")
        path_of(tmp_path, "c").unlink()
        store.use("c")
        assert "c" not in store


def test_a_blob_replaces_the_one_of_its_name(tmp_path):
    with FileStore(tmp_path, 3 * SIZE) as store:
        fill(store, "abc")
        assert store.put("a", b"HD", b"BODY")
        assert store.names() == ["b", "c", "a"]
        assert store.put("c", b"HD", b"BODY")
        assert store.names() == ["b", "a", "c"]
        assert store.total_bytes == 3 * SIZE
        assert not store.put("a", b"", bytes(4 * SIZE))
        assert (store.header("a"), store.body("a")) == (b"HD", b"BODY")
    with FileStore(tmp_path, 3 * SIZE) as store:
        assert (store.header("a"), store.body("a")) == (b"HD", b"BODY")


@pytest.mark.parametrize("call", ["open", "utime"])
def test_what_the_system_refuses_for_a_while_is_there_afterwards(
    tmp_path, monkeypatch, caplog, call
):
    def refuse(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    with FileStore(tmp_path, 1000) as store:
        fill(store, "ab")
        with monkeypatch.context() as patch:
            patch.setattr(*((os, "utime") if call == "utime" else (builtins, "open")), refuse)
            store.use("a")
            found = (store.header("a"), store.body("a"))
        assert found == ((None, None) if call == "open" else (b"hd", b"body"))
        assert store.names() == ["b", "a"]
        assert len(caplog.records) == 1
        assert (store.counters.corrupted, store.counters.failed) == (0, 2 if call == "open" else 1)
        assert (store.header("a"), store.body("a")) == (b"hd", b"body")


def test_a_closed_store_leaves_the_directory_to_others(tmp_path):
    store = FileStore(tmp_path, 1000)
    fill(store, "a")
    store.close()
    with FileStore(tmp_path, 1000) as other:
        os.truncate(path_of(tmp_path, "a"), 3)
        assert not store.put("b", b"hd", b"body")
        assert (store.header("a"), store.body("a"), len(store)) == (None, None, 0)
        store.use("a")
        assert path_of(tmp_path, "a").exists()
        assert not path_of(tmp_path, "b").exists()
        assert other.names() == ["a"]


def test_two_processes_cannot_share_a_folder(tmp_path):
    with (
        FileStore(tmp_path, 1000),
        pytest.raises(RuntimeError, match="directory of its own"),
    ):
        FileStore(tmp_path, 1000)
    FileStore(tmp_path, 1000).close()
    with pytest.raises(ValueError, match="capacity_bytes=-1"):
        FileStore(tmp_path, -1)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_a_full_disk_is_counted_and_leaves_nothing_behind(tmp_path, monkeypatch, caplog, call):
    store = FileStore(tmp_path, 1000)
    fill(store, "a")
    real = getattr(os, call)

    def full(*args, **kwargs):
        if call == "write":
            real(args[0], args[1][:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    assert not store.put("b", b"hd", b"body")
    assert not store.put("a", b"HD", b"BODY")
    monkeypatch.undo()
    assert store.counters.failed == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.kv", "lock"]
    assert store.body("a") == b"body"
    fill(store, "b")
    store.close()


def test_a_name_that_does_not_reach_the_disk_is_taken_back(tmp_path, monkeypatch):
    with FileStore(tmp_path, 1000) as store:
        fill(store, "ab")
        with monkeypatch.context() as patch:
            patch.setattr(store, "_sync_directory", lambda: os.stat(tmp_path / "nothing"))
            assert not store.put("a", b"HD", b"BODY")
            assert not store.put("c", b"hd", b"body")
        assert store.names() == ["b"]
        assert store.total_bytes == SIZE
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b.kv", "lock"]


def test_a_real_limit_in_the_middle_of_a_write_is_survived(tmp_path):
    out = run(
        tmp_path,
        """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = FileStore(folder, 10**7)
        store.put("a", b"hd", b"body")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        print(store.put("b", b"hd", bytes(10**6)), store.counters.failed, store.body("a"))
        """,
    )
    assert out.stdout.split("\n")[0] == "False 1 b'body'"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.kv", "lock"]


def run(folder, code, **environment):
    program = "import os, sys\nfrom tiers.file_store import FileStore\nfolder = sys.argv[1]\n"
    return subprocess.run(
        [sys.executable, "-c", program + textwrap.dedent(code), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


KILLED = """
    steps = 0
    def killing(name):
        real = getattr(os, name)
        def call(*args, **kwargs):
            global steps
            steps += 1
            if steps == int(os.environ["KILL_AT"]):
                if name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), 9)
            return real(*args, **kwargs)
        setattr(os, name, call)
    store = FileStore(folder, 10**6)
    for name in ("open", "write", "fsync", "replace", "close"):
        killing(name)
    store.put("new", b"hd", b"body" * 1000)
    print("finished after", steps)
"""


def test_a_kill_at_any_step_leaves_whole_files_only(tmp_path):
    with FileStore(tmp_path, 10**6) as store:
        fill(store, ["old"])
    for step in range(1, 40):
        out = run(tmp_path, KILLED, KILL_AT=str(step))
        if "finished" in out.stdout:
            break
        assert out.returncode == -signal.SIGKILL, out.stderr
        with FileStore(tmp_path, 10**6) as store:
            assert not list(tmp_path.glob("*.tmp"))
            assert store.body("old") == b"body"
            assert store.body("new") in (None, b"body" * 1000)
            assert store.counters.corrupted == 0
        path_of(tmp_path, "new").unlink(missing_ok=True)
    assert step >= 10, "every step of a write was killed once"
