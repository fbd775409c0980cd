"""A store that keeps each object in a file of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from torch_kvswap._native.log import warn_once
from torch_kvswap.below.background import background_thread
from torch_kvswap.below.store import Completion

_THREADS = 4  # with more, pages are no faster, and lookups wait for the GIL (benchmarks/below.py)
# Smaller files, such as trailers, go through the page cache: to wait for the disk takes longer.
_LEAST_DIRECT = 8192
_Work = Callable[[str, memoryview | None], bool]


class _Batch:
    """A call of which some keys have not ended yet."""

    def __init__(self, number: int, keys: int) -> None:
        self.number, self.left = number, keys
        self.are_right = [False] * keys
        self.error = ""


class FileStore:
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
        with contextlib.suppress(OSError):  # each write to a read-only folder reports it
            os.mkdir(self._unfinished)
        self._remove_unfinished()
        self._direct = os.O_DIRECT
        self._names = (f"{secrets.token_hex(8)}-{number}" for number in itertools.count())
        self._numbers = itertools.count(1)
        self._ended: deque[Completion] = deque()
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # of the batches and of _names
        self._is_closing = False
        self._tasks: SimpleQueue[tuple[_Batch, int, _Work, str, memoryview | None] | None]
        self._tasks = SimpleQueue()
        self._threads = [background_thread(self._work, "kvswap-file") for _ in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    def submit_batch_set(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        """See PageStore."""
        return self._submit(self._set, keys, memoryviews)

    def submit_batch_get(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        """See PageStore."""
        return self._submit(self._get, keys, memoryviews)

    def submit_batch_exists(self, keys: list[str]) -> int:
        """See PageStore."""
        return self._submit(self._exists, keys, None)

    def submit_batch_delete(self, keys: list[str]) -> int:
        """See PageStore."""
        return self._submit(self._delete, keys, None)

    def event_fd(self) -> int:
        """See PageStore."""
        return self._event_fd

    def drain_completions(self) -> list[Completion]:
        """See PageStore."""
        with contextlib.suppress(BlockingIOError):  # nothing has ended
            os.eventfd_read(self._event_fd)
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def close(self) -> None:
        """See PageStore. Files that were not begun are left out."""
        if self._is_closing:
            return
        self._is_closing = True
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._event_fd)

    def _submit(
        self, work: _Work, keys: list[str], memoryviews: Sequence[memoryview] | None
    ) -> int:
        batch = _Batch(next(self._numbers), len(keys))
        if not keys:
            self._end(batch)
        for place, key in enumerate(keys):
            memory = None if memoryviews is None else memoryviews[place]
            self._tasks.put((batch, place, work, key, memory))
        return batch.number

    def _work(self) -> None:
        """A thread: carries out tasks until close()."""
        while (task := self._tasks.get()) is not None:
            batch, place, work, key, memory = task
            is_right, error = False, "the store was closed"
            if not self._is_closing:
                try:
                    is_right, error = work(key, memory), ""
                except OSError as problem:
                    error = str(problem)
            del task, memory  # a view must not outlive its call
            with self._lock:
                batch.are_right[place] = is_right
                batch.error = batch.error or error
                batch.left -= 1
                if batch.left == 0:
                    self._end(batch)

    def _end(self, batch: _Batch) -> None:
        self._ended.append((batch.number, not batch.error, batch.error, batch.are_right))
        os.eventfd_write(self._event_fd, 1)

    def _set(self, key: str, memory: memoryview | None) -> bool:
        assert memory is not None
        with self._lock:
            name = os.path.join(self._unfinished, next(self._names))
        file = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, len(memory))
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
        return True

    def _get(self, key: str, memory: memoryview | None) -> bool:
        assert memory is not None
        file = self._open(os.path.join(self._path, key), os.O_RDONLY, len(memory))
        try:
            done, step = 0, 1
            while done < len(memory) and step:
                step = os.preadv(file, [memory[done:]], done)
                done += step
            if done < len(memory) or os.fstat(file).st_size != done:
                raise OSError(f"{key} has {os.fstat(file).st_size} bytes, not {len(memory)}")
        finally:
            os.close(file)
        return True

    def _exists(self, key: str, _: memoryview | None) -> bool:
        return os.path.exists(os.path.join(self._path, key))

    def _delete(self, key: str, _: memoryview | None) -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._path, key))
        return True

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
        with contextlib.suppress(OSError):  # no folder yet, or a read-only one
            for entry in os.scandir(self._unfinished):
                file = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
                except BlockingIOError:  # its writer lives
                    pass
                finally:
                    os.close(file)
