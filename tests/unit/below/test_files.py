"""A folder of files as a store of pages, also one that is full, read-only or left by a killed process."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from logged import logged
from processes import in_child
from store_calls import (
    PAGE,
    TRAILER,
    check_put_get_and_delete,
    get_pages,
    pages,
    put_pages,
    trailers,
)

from torch_kvswap.below import FileStore
from torch_kvswap.below import files as module


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "new" / "folder"))


def path_of(store: FileStore) -> Path:
    return Path(store._path)


def test_what_was_put_stays_until_deleted(store: FileStore) -> None:
    check_put_get_and_delete(store)
    assert {file.name for file in path_of(store).iterdir() if file.is_file()} == {"b"}


@pytest.mark.parametrize("size", [1, 4096, PAGE - 1, PAGE + 1])
def test_a_short_file_is_read_to_its_end(store: FileStore, size: int) -> None:
    """So that its page is refused, told and deleted."""
    (path_of(store) / "key").write_bytes(b"x" * size)
    into, ends = pages(b"."), trailers(b".")
    assert store.get(["key"], into, ends) == [True]
    assert (bytes(into[0]) + bytes(ends[0]))[:size] == b"x" * size


def test_a_put_replaces_what_is_there(store: FileStore) -> None:
    store.put(["a"], pages(b"x"), trailers(b"x"))
    put_pages(store, ["a"])
    assert get_pages(store, ["a"]) == [True]


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_read_that_fails_is_not_an_absence(
    call: str, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pages(store, ["a"])

    def failing(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module.os, call, failing)
    with pytest.raises(OSError, match="Too many open files"):
        get_pages(store, ["a"])


def test_a_full_disk_keeps_what_was_there(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pages(store, ["a"])
    write = os.pwritev

    def full(file: int, buffers: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, [buffers[0][:4096]], 0)

    monkeypatch.setattr(module.os, "pwritev", full)
    with pytest.raises(OSError, match="No space left on device"):
        store.put(["a", "new"], pages(b"b", b"c"), trailers(b"b", b"c"))
    assert not list((path_of(store) / ".unfinished").iterdir())
    assert get_pages(store, ["a", "new"]) == [True, False]


def test_an_empty_file_is_none(store: FileStore) -> None:
    """A loss of power leaves such files, as a whole page of them, which nobody would write anew."""
    (path_of(store) / "key").touch()
    assert store.exists(["key"]) == [False]
    assert get_pages(store, ["key"]) == [False]


def test_a_folder_that_is_gone_is_not_made_again(store: FileStore) -> None:
    """Its disk may not be mounted, and pages would fill another one."""
    for removed in (path_of(store) / ".unfinished", path_of(store)):
        put_pages(store, ["a"])
        shutil.rmtree(removed)
    for call in (lambda: store.exists(["a"]), lambda: put_pages(store, ["a"])):
        with pytest.raises(FileNotFoundError):
            call()
    path_of(store).mkdir(0o700)
    put_pages(store, ["a"])
    assert get_pages(store, ["a"]) == [True]


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
    store.put(["key"], [page], trailers(b"t"))
    into, ends = pages(b"."), trailers(b".")
    assert store.get(["key"], into, ends) == [True]
    assert (into, ends) == ([page], trailers(b"t"))


def test_a_read_only_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    put_pages(FileStore(str(folder)), ["a"])
    user = os.getuid() or 65534  # not root, who may write everywhere
    for closed in (folder / "a", folder / ".unfinished", folder):
        os.chown(closed, user, -1)
        closed.chmod(0o555)
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent != folder:
            parent.chmod(parent.stat().st_mode | 0o111)

    def reads_and_does_not_write() -> bool:
        os.setuid(user)
        other = FileStore(str(folder))
        with pytest.raises(PermissionError):
            put_pages(other, ["n"])
        return get_pages(other, ["a"]) == [True]

    assert in_child(reads_and_does_not_write) == 1


def test_without_o_direct_the_page_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(module.os, "open", refusing)
    store = FileStore(str(tmp_path))
    put_pages(store, ["a"])
    assert get_pages(store, ["a"]) == [True]


@pytest.mark.parametrize(("begin", "nbytes"), [(0, 10_000), (1, 8192)])
def test_unaligned_memory_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: int, nbytes: int
) -> None:
    real, seen = os.open, []

    def watching(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        seen.append(flags & os.O_DIRECT)
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(module.os, "open", watching)
    module.warn_once.cache_clear()
    with logged() as messages:
        store = FileStore(str(tmp_path))
        written, read = (memoryview(mmap.mmap(-1, 12_000))[begin:][:nbytes] for _ in range(2))
        written[:] = os.urandom(nbytes)
        store.put(["a"], [written], trailers(b"t"))
        assert store.get(["a"], [read], trailers(b".")) == [True]
    assert read == written
    assert not any(seen)
    assert len(messages) == 1
    assert f"pages of {nbytes} bytes go through the page cache" in messages[0]


@contextmanager
def process_that_writes(folder: Path) -> Iterator[int]:
    """A forked process stays in a write until it is killed. Its number."""
    writing, written = os.pipe()
    child = os.fork()
    if child == 0:
        module.os.pwritev = lambda *_: os.write(written, b"!") and signal.pause()
        put_pages(FileStore(str(folder)), ["k"])
    os.close(written)
    try:
        assert os.read(writing, 1) == b"!"
        yield child
    finally:
        os.close(writing)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    with process_that_writes(tmp_path):
        unfinished = tmp_path / ".unfinished"
        with process_that_writes(tmp_path):
            assert len(list(unfinished.iterdir())) == 2
        FileStore(str(tmp_path))
        assert len(list(unfinished.iterdir())) == 1
    FileStore(str(tmp_path))
    assert not list((tmp_path / ".unfinished").iterdir())
    assert not (tmp_path / "k").exists()


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
    FileStore(str(path_of(store)))
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
    FileStore(str(tmp_path))
    left = {unfinished_name(2), unfinished_name(3), "notes"}
    assert {file.name for file in unfinished.iterdir()} == left


def test_a_link_as_unfinished_is_not_followed(tmp_path: Path) -> None:
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
    (folder / "file").write_bytes(b"x" * (PAGE + TRAILER))
    (folder / "link").symlink_to(folder / "file")
    os.mkfifo(folder / "pipe")
    keys = ["file", "link", "pipe"]
    assert store.exists(keys) == [True, False, False]
    assert store.get(keys[:1], pages(b"."), trailers(b".")) == [True]
    for key in keys[1:]:
        with pytest.raises(OSError, match=r"symbolic links|is not a regular file of this user"):
            get_pages(store, [key])


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(module.os, "geteuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {user}, not to {user + 1}"):
        FileStore(str(tmp_path))


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_a_folder_writable_by_others_is_refused(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="others than its user may write"):
        FileStore(str(tmp_path))
    tmp_path.chmod(0o755)
    FileStore(str(tmp_path))


def test_a_new_folder_is_private(store: FileStore) -> None:
    put_pages(store, ["a"])
    modes = {
        path.stat().st_mode & 0o777 for path in (path_of(store), path_of(store) / ".unfinished")
    }
    assert modes == {0o700}


def test_a_file_instead_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"below cannot be used as a folder: .*/file"):
        FileStore(str(tmp_path / "file"))
