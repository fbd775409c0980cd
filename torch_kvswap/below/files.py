"""A store that keeps each page in a file of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator

import numpy as np

from torch_kvswap._native.log import warn_once
from torch_kvswap.below.format import ALIGNMENT
from torch_kvswap.below.store import PageStore

# Files of smaller pages go through the page cache: to wait for the disk takes longer.
_LEAST_DIRECT = 8192
_UNFINISHED = ".unfinished"
# A link is not followed, and opening a named pipe waits for nobody.
_CAREFULLY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OURS = re.compile(r"[0-9a-f]{16}-\d+")  # names of unfinished files


class FileStore(PageStore):
    """A PageStore in a folder, which several processes and machines may share.

    All of them run as one user, who owns the folder and alone may write to it. Only regular files
    of this user are read.

    Reads and writes of pages of 8 KiB and more bypass the page cache (O_DIRECT) if the file system
    can, and if addresses and sizes of page and trailer are multiples of 4,096 bytes. A file gets
    its name when it is complete. It is not flushed, so a reader must detect damage after a loss of
    power.

    Args:
        path (str): the folder, which is made if there is none, with mode 0700.

    Raises:
        OSError: the folder cannot be made, or the path is not a folder. PermissionError: it belongs
            to another user, or others may write to it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
        except OSError as error:
            text = f"below cannot be used as a folder: {error.strerror}"
            raise OSError(error.errno, text, path) from error
        with self._folder() as folder:
            self._remove_unfinished(folder)
        self._direct = os.O_DIRECT
        self._names = f"{secrets.token_hex(8)}-"
        self._files = itertools.count()

    def __str__(self) -> str:
        return f"file:{self._path}"

    def exists(self, keys: list[str]) -> list[bool]:
        with self._folder() as folder:
            return [_has(key, folder) for key in keys]

    def get(
        self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]
    ) -> list[bool]:
        with self._folder() as folder:
            return [self._read(folder, *one) for one in zip(keys, pages, trailers, strict=True)]

    def put(self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]) -> None:
        with self._folder() as folder:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_UNFINISHED, 0o700, dir_fd=folder)
            with self._folder(_UNFINISHED, folder) as unfinished:
                for one in zip(keys, pages, trailers, strict=True):
                    self._write(folder, unfinished, *one)

    def delete(self, keys: list[str]) -> None:
        with self._folder() as folder:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(key, dir_fd=folder)

    @contextlib.contextmanager
    def _folder(self, name: str | None = None, within: int | None = None) -> Iterator[int]:
        """The folder of the store, or one in it, which nobody else can write to.

        It is opened for each call, since another one may have been mounted. It is not made again if
        it is gone: perhaps its disk is not mounted, and pages would fill another one.
        """
        link = 0 if name is None else os.O_NOFOLLOW  # the user's own path may be one
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | link
        folder = os.open(name or self._path, flags, dir_fd=within)
        try:
            found = os.fstat(folder)
            path = self._path if name is None else os.path.join(self._path, name)
            if found.st_uid != os.geteuid():
                raise PermissionError(
                    f"the folder {path} belongs to user {found.st_uid}, not to {os.geteuid()}, who "
                    "runs this process; pass a folder of this user, or one that is not there yet"
                )
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(
                    f"others than its user may write to the folder {path}, and what they write "
                    f"would be believed; run chmod 700 {path}, or pass another folder"
                )
            yield folder
        finally:
            os.close(folder)

    def _read(self, folder: int, key: str, page: memoryview, trailer: memoryview) -> bool:
        try:
            file = self._open(key, os.O_RDONLY, page, trailer, folder)
        except FileNotFoundError:
            return False
        try:
            of_file = os.fstat(file)
            if not _is_ours(of_file):
                raise PermissionError(f"{key} is not a regular file of this user")
            size, done = min(len(page) + len(trailer), of_file.st_size), 0
            while done < size and (step := os.preadv(file, _rest(page, trailer, done), done)):
                done += step
            return done > 0  # the caller refuses what a loss of power has truncated
        finally:
            os.close(file)

    def _write(
        self, folder: int, unfinished: int, key: str, page: memoryview, trailer: memoryview
    ) -> None:
        name = f"{self._names}{next(self._files)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        file = self._open(name, flags, page, trailer, unfinished)
        try:
            # Tells _remove_unfinished() of other processes that this one lives.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            done = 0
            while done < len(page) + len(trailer):
                done += os.pwritev(file, _rest(page, trailer, done), done)
            os.rename(name, key, src_dir_fd=unfinished, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=unfinished)
            raise
        finally:
            os.close(file)

    def _open(
        self, name: str, flags: int, page: memoryview, trailer: memoryview, folder: int
    ) -> int:
        """Opens a file for these bytes, around the page cache if that is possible and worth it."""
        flags |= _CAREFULLY
        is_large = len(page) >= _LEAST_DIRECT
        if self._direct and is_large and not (_is_aligned(page) and _is_aligned(trailer)):
            warn_once(
                f"pages of {len(page)} bytes go through the page cache, which is slower: "
                f"O_DIRECT needs pages that begin at multiples of {ALIGNMENT} bytes and have such "
                "sizes, which another blocks_per_page may give them"
            )
        elif self._direct and is_large:
            try:
                return os.open(name, flags | self._direct, 0o600, dir_fd=folder)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            if flags & os.O_CREAT:  # the kernel may have made the file before it refused
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
            warn_once(f"{self._path} has no O_DIRECT; pages go through the page cache")
            self._direct = 0
        return os.open(name, flags, 0o600, dir_fd=folder)

    def _remove_unfinished(self, folder: int) -> None:
        """Removes what processes left that were killed while they wrote."""
        try:
            with self._folder(_UNFINISHED, folder) as unfinished:
                for name in filter(_OURS.fullmatch, os.listdir(unfinished)):
                    with contextlib.suppress(OSError):  # its writer lives, or has finished it
                        file = os.open(name, os.O_RDONLY | _CAREFULLY, dir_fd=unfinished)
                        try:
                            if _is_ours(os.fstat(file)):
                                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                                os.unlink(name, dir_fd=unfinished)
                        finally:
                            os.close(file)
        except FileNotFoundError:
            pass  # there is none yet


def _rest(page: memoryview, trailer: memoryview, done: int) -> list[memoryview]:
    """What follows the bytes that are done."""
    if done < len(page):
        return [page[done:], trailer]
    return [trailer[done - len(page) :]]


def _is_aligned(buffer: memoryview) -> bool:
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    return address % ALIGNMENT == 0 and len(buffer) % ALIGNMENT == 0


def _is_ours(of_file: os.stat_result) -> bool:
    return stat.S_ISREG(of_file.st_mode) and of_file.st_uid == os.geteuid()


def _has(key: str, folder: int) -> bool:
    try:
        of_file = os.stat(key, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    # A loss of power leaves empty files, which would be in the way of their pages.
    return _is_ours(of_file) and of_file.st_size > 0
