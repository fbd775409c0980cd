"""How processes of one user meet at a Unix socket: each asks the kernel whose process is at the
other end before it uses a byte of it, and file descriptors are passed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Sequence

from torch_kvswap._native.arguments import kind_of
from torch_kvswap._native.descriptors import Descriptors

_SO_PEERPIDFD = 77  # from Linux 6.5 on; Python's socket module lacks it
_LONGEST_PATH = 107  # Linux has 108 bytes for it, the last of which is zero
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def check_owner(what: str, uid: int) -> None:
    """Raises PermissionError if what is shared belongs to another user than this process.

    Args:
        what (str): names it in the message.
        uid (int): its owner, from the kernel.
    """
    own = os.geteuid()
    if uid != own:
        raise PermissionError(
            f"{what} belongs to user {uid}, and this process to user {own}; run both as one user, "
            "and share nothing in a folder that other users may write"
        )


def credentials_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def check_peer(connection: socket.socket, what: str) -> None:
    """Raises PermissionError if the process at the other end is another user's.

    Args:
        what (str): names it in the message, which has its number for {pid}.
    """
    pid, uid = credentials_of(connection)
    check_owner(what.format(pid=pid), uid)


def send(connection: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    """Sends a message and file descriptors, which stay open here."""
    sent = socket.send_fds(connection, [message], fds)
    if sent < len(message):  # sending nothing fails if the other end has closed already
        connection.sendall(message[sent:])


def receive(connection: socket.socket, nbytes: int) -> tuple[bytes, Descriptors]:
    """Up to so many bytes, and the file descriptor that came with them, if one did."""
    flags = socket.MSG_CMSG_CLOEXEC
    came = Descriptors(connection.recvmsg, nbytes, socket.CMSG_LEN(4), flags)
    return came.returned[0][0], came


def check_path(path: object, name: str = "path") -> None:
    """Raises TypeError or ValueError if a server's socket cannot have this path.

    Args:
        name (str): of the path in the message.
    """
    if not isinstance(path, str):
        raise TypeError(f"{name} is {kind_of(path)}; pass the path of the server's socket, a str")
    if path.startswith("unix:"):
        raise ValueError(f"{name} is {path!r}; pass it without unix:")
    nbytes = len(os.fsencode(path))
    if not path or "\0" in path or nbytes > _LONGEST_PATH:
        raise ValueError(
            f"{name} is {path!r}, {nbytes} bytes; the path of a socket has 1 to {_LONGEST_PATH} "
            "bytes, none of them zero"
        )


def listen(path: str) -> tuple[socket.socket, int]:
    """A socket at this path for processes of this user, and the file that stays locked until it is
    closed. What a killed process has left there is removed.

    Raises:
        RuntimeError: another server has this socket.
        TypeError, ValueError: see check_path().
        OSError: the socket cannot be made. FileExistsError: a file that is no socket has this name.
            PermissionError: one of another user has it.
    """
    check_path(path)
    with contextlib.ExitStack() as undo:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(f"{path}.lock", flags, 0o600)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise type(error)(
                f"{path}.lock cannot be opened: {error.strerror}; pass the path of a socket in a "
                "folder that exists and that you may write"
            ) from error
        undo.callback(os.close, lock)
        check_owner(f"{path}.lock", os.fstat(lock).st_uid)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"another server has the socket {path}; stop it, or pass another path"
            ) from error
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if not stat.S_ISSOCK(status.st_mode):
                raise FileExistsError(f"{path} exists and is not a socket; pass another path")
            check_owner(path, status.st_uid)
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.callback(listener.close)
        os.fchmod(listener.fileno(), 0o600)  # the file gets this mode
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        undo.pop_all()
    return listener, lock


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The number of the process at the other end of a connection that does not block, and a file
    descriptor that is readable when this process has ended.

    Raises OSError if it has gone, or there are no descriptors, and PermissionError if it is another
    user's.
    """
    pid, uid = credentials_of(connection)
    check_owner(f"process {pid}", uid)
    try:
        return pid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # an older kernel
        process = os.pidfd_open(pid)
    # If that process had ended, another one might have its number now.
    try:
        if not connection.recv(1, socket.MSG_PEEK):
            raise ProcessLookupError("the engine has gone")
    except BlockingIOError:  # it is there, and has sent nothing yet
        pass
    except BaseException:
        os.close(process)
        raise
    return pid, process
