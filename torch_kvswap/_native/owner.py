"""Whom this process shares memory with: processes of its own user."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket, as the kernel knows them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def check_owner(what: str, uid: int) -> None:
    """Raises PermissionError if what is shared belongs to another user than this process.

    Args:
        what (str): names it in the message.
        uid (int): its owner, from peer_of() or os.fstat().
    """
    own = os.geteuid()
    if uid != own:
        raise PermissionError(
            f"{what} belongs to user {uid}, and this process to user {own}; run both as one user, "
            "and share nothing in a folder that other users may write"
        )
