"""A store that keeps each object in a file of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets

from torch_kvswap._native.log import warn_once
from torch_kvswap.below.blocking import BlockingStore

# Smaller files, such as trailers, go through the page cache: to wait for the disk takes longer.
_LEAST_DIRECT = 8192


class FileStore(BlockingStore):
    """A PageStore in a folder, which several processes and machines may share.

    Reads and writes of 8 KiB and more go around the page cache (O_DIRECT) where the file system
    can do that; then the memory must begin at a multiple of 4,096 bytes, and have such a size. A
    file is written under another name, and gets its own when it is complete. It is not flushed:
    after a loss of power it may be damaged, which its reader must find out.

    Args:
        path (str): the folder, which is made if there is none.

    Raises:
        OSError: the folder cannot be made, or is none.
    """

    def __init__(self, path: str) -> None:
        self._path, self._unfinished = path, os.path.join(path, ".unfinished")
        os.makedirs(path, exist_ok=True)
        self._remove_unfinished()
        self._direct = os.O_DIRECT
        self._names = f"{secrets.token_hex(8)}-"
        self._files = itertools.count()
        super().__init__()

    def set(self, key: str, memory: memoryview) -> None:
        name = os.path.join(self._unfinished, f"{self._names}{next(self._files)}")
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL, len(memory)
        try:
            file = self._open(name, *how)
        except FileNotFoundError:  # the first one. Each system call takes the GIL from the engine.
            os.makedirs(self._unfinished, exist_ok=True)
            file = self._open(name, *how)
        try:
            # Tells _remove_unfinished() of other processes that this one lives.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            done = 0
            while done < len(memory):
                done += os.pwritev(file, [memory[done:]], done)
            os.rename(name, os.path.join(self._path, key))
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        finally:
            os.close(file)

    def get(self, key: str, memory: memoryview) -> bool:
        try:
            file = self._open(os.path.join(self._path, key), os.O_RDONLY, len(memory))
        except FileNotFoundError:
            return False
        try:
            done, step = 0, 1
            while done < len(memory) and step:
                step = os.preadv(file, [memory[done:]], done)
                done += step
            return done == len(memory) == os.fstat(file).st_size
        finally:
            os.close(file)

    def exists(self, keys: list[str]) -> list[bool]:
        return [self._has(key) for key in keys]

    def delete(self, keys: list[str]) -> list[bool]:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._path, key))
        return [True] * len(keys)

    def _has(self, key: str) -> bool:
        try:
            # A loss of power leaves empty files, which would be in the way of their pages.
            return os.stat(os.path.join(self._path, key)).st_size > 0
        except OSError:
            return False

    def _open(self, name: str, flags: int, nbytes: int) -> int:
        """Opens a file of so many bytes, around the page cache if that is possible and worth it."""
        flags |= os.O_CLOEXEC
        if self._direct and nbytes >= _LEAST_DIRECT:
            try:
                return os.open(name, flags | self._direct, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            if flags & os.O_CREAT:  # the kernel may have made the file before it refused
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
            warn_once(f"{self._path} has no O_DIRECT; pages go through the page cache")
            self._direct = 0
        return os.open(name, flags, 0o600)

    def _remove_unfinished(self) -> None:
        """Removes what processes left that were killed while they wrote."""
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError):  # no folder yet
            entries += os.scandir(self._unfinished)
        for entry in entries:
            # Its writer lives, has finished it meanwhile, or is another user.
            with contextlib.suppress(OSError):
                file = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
                finally:
                    os.close(file)
