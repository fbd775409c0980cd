"""How processes of one user meet at a Unix socket: each asks the kernel whose process is at the
other end before it uses a byte of it, and file descriptors are passed."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

from torch_kvswap._native.descriptors import Descriptors

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
