"""A folder of files as a store of pages, also one that is full, read-only or left by a killed process."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import in_time
from processes import in_child
from store_calls import PAGE, outcome, pages

from torch_kvswap.below import FileStore
from torch_kvswap.below import files as module


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    files = FileStore(str(tmp_path / "new" / "folder"))
    yield files
    files.close()


def path_of(store: FileStore) -> Path:
    return Path(store._path)


def test_what_was_set_is_there_until_it_is_deleted(store: FileStore) -> None:
    keys = ["a", "b", "c"]
    assert outcome(store, store.submit_batch_set(keys[:2], pages(b"a", b"b")))[1:3] == (True, "")
    assert outcome(store, store.submit_batch_exists(keys))[1:] == (True, "", [True, True, False])
    into = pages(b".", b".", b".")
    answer = outcome(store, store.submit_batch_get(keys, into))
    assert answer[1:] == (True, "", [True, True, False])
    assert [bytes(view) for view in into] == [b"a" * PAGE, b"b" * PAGE, b"." * PAGE]
    assert outcome(store, store.submit_batch_delete(keys))[1]
    assert outcome(store, store.submit_batch_exists(keys))[3] == [False] * 3
    assert outcome(store, store.submit_batch_set([], []))[1]


def test_a_second_set_takes_the_place_of_the_first(store: FileStore) -> None:
    for fill in (b"a", b"b"):
        assert outcome(store, store.submit_batch_set(["key"], pages(fill)))[1]
    (into,) = pages(b".")
    assert outcome(store, store.submit_batch_get(["key"], [into]))[1]
    assert bytes(into) == b"b" * PAGE
    assert [file.name for file in path_of(store).iterdir() if file.is_file()] == ["key"]


@pytest.mark.parametrize("size", [0, 4096, PAGE - 1, PAGE + 1])
def test_a_file_of_another_size_is_not_there(store: FileStore, size: int) -> None:
    (path_of(store) / "key").write_bytes(b"x" * size)
    answer = outcome(store, store.submit_batch_get(["key"], pages(b".")))
    assert answer[1:] == (True, "", [False])


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_read_that_fails_is_not_an_absence(
    call: str, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome(store, store.submit_batch_set(["key"], pages(b"a")))[1]

    def failing(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module.os, call, failing)
    answer = outcome(store, store.submit_batch_get(["key"], pages(b".")))
    assert answer[1:] == (False, "[Errno 24] Too many open files", [False])


def test_a_full_disk_keeps_what_was_there_and_leaves_nothing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome(store, store.submit_batch_set(["key"], pages(b"a")))[1]
    write = os.pwritev

    def full(file: int, buffers: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, [buffers[0][:4096]], 0)

    monkeypatch.setattr(module.os, "pwritev", full)
    _, is_right, error, are_right = outcome(
        store, store.submit_batch_set(["key", "new"], pages(b"b", b"c"))
    )
    assert (is_right, are_right) == (False, [False, False])
    assert "No space left on device" in error
    assert not list((path_of(store) / ".unfinished").iterdir())
    (into,) = pages(b".")
    assert outcome(store, store.submit_batch_get(["key"], [into]))[1]
    assert bytes(into) == b"a" * PAGE


def test_an_empty_file_is_none(store: FileStore) -> None:
    """A loss of power leaves such files, as a whole page of them, which nobody would write anew."""
    (path_of(store) / "key").touch()
    assert outcome(store, store.submit_batch_exists(["key"]))[3] == [False]


def test_a_folder_that_was_removed_is_made_again(store: FileStore) -> None:
    """Or that could not be made whole, because the disk was full."""
    for removed in (path_of(store) / ".unfinished", path_of(store)):
        assert outcome(store, store.submit_batch_set(["key"], pages(b"a")))[1]
        shutil.rmtree(removed)
    assert outcome(store, store.submit_batch_set(["key"], pages(b"a")))[1]


def test_a_write_in_several_steps_is_whole(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pwritev", "preadv"):
        call = getattr(os, name)
        monkeypatch.setattr(
            module.os,
            name,
            lambda file, buffers, offset, call=call: call(file, [buffers[0][:4096]], offset),
        )
    (page,) = pages(b"x")
    page[4096:] = b"y" * 4096
    assert outcome(store, store.submit_batch_set(["key"], [page]))[1]
    (into,) = pages(b".")
    assert outcome(store, store.submit_batch_get(["key"], [into]))[1]
    assert into == page


def test_a_read_only_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    store = FileStore(str(folder))
    assert outcome(store, store.submit_batch_set(["key"], pages(b"a")))[1]
    store.close()
    user = os.getuid() or 65534  # not root, who may write everywhere
    for closed in (folder / "key", folder / ".unfinished", folder):
        os.chown(closed, user, -1)
        closed.chmod(0o555)
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent != folder:
            parent.chmod(parent.stat().st_mode | 0o111)

    def reads_and_does_not_write() -> bool:
        os.setuid(user)
        other = FileStore(str(folder))
        (into,) = pages(b".")
        reads = outcome(other, other.submit_batch_get(["key"], [into]))[1]
        _, writes, error, _ = outcome(other, other.submit_batch_set(["new"], pages(b"n")))
        return reads and bytes(into) == b"a" * PAGE and not writes and "Permission" in error

    assert in_child(reads_and_does_not_write) == 1


def test_without_o_direct_files_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(module.os, "open", refusing)
    store = FileStore(str(tmp_path))
    assert outcome(store, store.submit_batch_set(["key"], pages(b"a")))[1]
    (into,) = pages(b".")
    assert outcome(store, store.submit_batch_get(["key"], [into]))[1]
    assert bytes(into) == b"a" * PAGE
    store.close()


def test_files_of_killed_writers_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    program = """
import os, sys
from torch_kvswap.below import files
def stay(*_):
    print("writing", flush=True)
    sys.stdin.read()
files.os.pwritev = stay
import mmap
store = files.FileStore(sys.argv[1])
store.submit_batch_set(["key"], [memoryview(mmap.mmap(-1, 4096))])
sys.stdin.read()
"""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
        unfinished = tmp_path / ".unfinished"
        assert len(list(unfinished.iterdir())) == 2
        writers[0].send_signal(signal.SIGKILL)
        writers[0].wait()
        FileStore(str(tmp_path)).close()
        assert len(list(unfinished.iterdir())) == 1
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    FileStore(str(tmp_path)).close()
    assert not list((tmp_path / ".unfinished").iterdir())
    assert not (tmp_path / "key").exists()


def test_files_that_cannot_be_removed_stop_no_others(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = path_of(store) / ".unfinished"
    unfinished.mkdir()
    for number in range(3):
        (unfinished / unfinished_name(number)).touch()
    real, left = os.open, []

    def refusing(path: Any, *arguments: Any, **options: Any) -> int:
        if not left and module._OURS.fullmatch(path):  # of another user, or finished meanwhile
            left.append(path)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(module.os, "open", refusing)
    FileStore(str(path_of(store))).close()
    assert [file.name for file in unfinished.iterdir()] == left


def unfinished_name(number: int) -> str:
    """As a writer names a file, until it is complete."""
    return f"{'0' * 16}-{number}"


def test_only_what_a_writer_has_left_is_removed(tmp_path: Path) -> None:
    unfinished = tmp_path / ".unfinished"
    unfinished.mkdir(mode=0o700)
    (unfinished / "notes").touch()
    (unfinished / unfinished_name(1)).touch()
    (unfinished / unfinished_name(2)).symlink_to(unfinished / "notes")
    os.mkfifo(unfinished / unfinished_name(3))  # to open it may take for ever
    FileStore(str(tmp_path)).close()
    left = {unfinished_name(2), unfinished_name(3), "notes"}
    assert {file.name for file in unfinished.iterdir()} == left


def test_a_link_in_place_of_unfinished_is_not_followed(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "folder"
    other.mkdir(mode=0o700)
    folder.mkdir(mode=0o700)
    (other / unfinished_name(1)).touch()
    (folder / ".unfinished").symlink_to(other)
    with pytest.raises(NotADirectoryError):
        FileStore(str(folder))
    assert [file.name for file in other.iterdir()] == [unfinished_name(1)]


def test_only_regular_files_of_this_user_are_read(store: FileStore) -> None:
    folder = path_of(store)
    (folder / "file").write_bytes(b"x" * PAGE)
    (folder / "link").symlink_to(folder / "file")
    os.mkfifo(folder / "pipe")
    keys = ["file", "link", "pipe"]
    assert outcome(store, store.submit_batch_exists(keys))[3] == [True, False, False]
    _, is_right, _, are_right = outcome(store, store.submit_batch_get(keys, pages(*[b"."] * 3)))
    assert (is_right, are_right) == (False, [True, False, False])


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(module.os, "geteuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {user}, not to {user + 1}"):
        FileStore(str(tmp_path))


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="others than its user may write"):
        FileStore(str(tmp_path))
    tmp_path.chmod(0o755)
    FileStore(str(tmp_path)).close()


def test_a_new_folder_is_private(store: FileStore) -> None:
    assert outcome(store, store.submit_batch_set(["key"], pages(b"a")))[1]
    modes = {
        path.stat().st_mode & 0o777 for path in (path_of(store), path_of(store) / ".unfinished")
    }
    assert modes == {0o700}


def test_closing_ends_what_was_begun_and_leaves_out_the_rest(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    keys = list(map(str, range(200)))
    store.submit_batch_set(keys, pages(*[b"x"] * 200))
    store.close()
    store.close()
    assert all(file.stat().st_size == PAGE for file in tmp_path.iterdir() if file.is_file())
    assert in_time(lambda: not list(tmp_path.glob(".unfinished/*")))
