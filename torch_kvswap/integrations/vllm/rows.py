"""The host pages of the workers in the process of vLLM's scheduler, whose tiers read and write them
as rows: all bytes of a page, of all workers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.description import page_text
from torch_kvswap.host_pool.memory import Mapping
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shape import Part
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.integrations.vllm.canonical import Share
from torch_kvswap.integrations.vllm.pool import address_of, send_to_next
from torch_kvswap.layout import layout_like

# Direct I/O needs rows that begin at a multiple of it. vLLM's file tier stores nothing else.
ROW_ALIGNMENT = 4096


class RowsOffer(NamedTuple):
    """What a worker tells the scheduler beside the pages.

    Attributes:
        engine_id (str): name of the engine, unique on the machine.
        kv_layout (str): the order of tokens and heads in the cache, as vLLM names it.
        share (Share | None): what this worker has of canonical rows, which are the same for any
            number of workers. None if rows have a part of each worker.
    """

    engine_id: str
    kv_layout: str
    share: Share | None = None

    def namespace(self, pools: Sequence[HostPool]) -> str:
        """What the bytes of a row depend on, besides the model and its tokens, as JSON.

        Args:
            pools (Sequence[HostPool]): of each group of layers in this worker.
        """
        pages = [pool._describe({"kv_layout": self.kv_layout}) for pool in pools]
        if self.share is not None:
            for page in pages:  # of one head, which all heads have, on any number of workers
                one_head = page["tensors"][: len(page["tensors"]) // self.share.heads_here]
                page |= {"tensors": one_head, "heads": self.share.heads, "parts": None}
        return "".join(map(page_text, pages))


class RowsServer:
    """Gives the pages of a pool to the scheduler of the same engine, once, from a thread.

    The scheduler may run in this thread's process. Only processes of the same user are served.

    Args:
        engine_id (str): name of the engine.
        handle (PoolHandle): closed when the scheduler has it.
        namespace (str): see RowsOffer.namespace().

    Raises:
        RuntimeError: another engine of this name waits for its scheduler.
    """

    def __init__(self, engine_id: str, handle: PoolHandle, namespace: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._handle, self._namespace = handle, namespace.encode()
        self._is_closing = False
        try:
            self._socket.bind(_address(engine_id))
        except OSError as error:
            self._socket.close()
            handle.close()
            raise RuntimeError(
                f"another engine with engine_id {engine_id!r} is starting on this machine; give "
                "each engine its own engine_id"
            ) from error
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="kvswap-rows", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._socket, contextlib.closing(self._handle):
            try:
                send_to_next(self._socket, self._handle, self._namespace)
            except OSError:
                if not self._is_closing:
                    raise

    def close(self) -> None:
        """Ends the thread, if the scheduler has not come."""
        self._is_closing = True
        with contextlib.suppress(OSError):  # it was served
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()


class Rows:
    """The pages of an engine's workers, which have started before.

    The memory is mapped, not pinned, and stays so until `memory` and all views of it are gone.

    Args:
        engine_id (str): name of the engine.

    Attributes:
        num_pages (int): number of rows.
        row_bytes (int): bytes of a row.
        memory (memoryview): uint8 [num_pages, bytes of a row], writable.
        namespace (str): see RowsOffer.namespace().

    Raises:
        PermissionError: another user's process offers them.
        RuntimeError: no worker of the engine offers its pages here.
    """

    def __init__(self, engine_id: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(_address(engine_id))
                handle = PoolHandle.receive(connection)
                self.namespace = _read_all(connection).decode()
            except ConnectionError as error:
                raise RuntimeError(
                    f"the scheduler of engine {engine_id!r} found no host memory of a worker: "
                    f"{error}; run the workers on the scheduler's machine and in its container, or "
                    "use spec_name KVSwapOffloadingSpec, without secondary_tiers"
                ) from error
        with contextlib.closing(handle):
            self.num_pages, self._slots = handle.num_pages, handle.blocks_per_page
            self.row_bytes = handle.page_bytes
            self._slot_bytes = handle.page_bytes // handle.blocks_per_page
            self._sizes = layout_like(handle.tensors).sizes
            self._width = handle._encoding.width_eighths
            nbytes = handle._encoding.for_native(self._sizes).slot_bytes
            row_bytes = 0 if handle.verify == "off" else native.digest_row_bytes(self._sizes)
            part = Part.of(nbytes, row_bytes)
            mapping = Mapping(handle.num_pages * handle.page_bytes, handle.fd)
            self._parts = [mapping.address + at * part.nbytes for at in range(handle.parts)]
            self._digests = [part.table(one, self._slot_bytes) for one in self._parts]
            self._has_digests = row_bytes > 0
            rows = mapping.tensor.view(handle.num_pages, handle.page_bytes)
            self.memory: memoryview = rows.numpy().data

    def without_blocks(self, pages: Iterable[int]) -> list[int]:
        """Those of the pages of which not all slots hold blocks.

        An encoded slot whose block did not fit has none, and neither has one that was read from
        something else. Slots with digests tell whether a store has left a block there. Other raw
        slots do not tell.
        """
        if not self._width and not self._has_digests:
            return []
        return [page for page in pages if not self._holds_blocks(page)]

    def _holds_blocks(self, page: int) -> bool:
        slots = range(page * self._slots, (page + 1) * self._slots)
        if self._has_digests and not all(
            digests.has_block(slot) for digests in self._digests for slot in slots
        ):
            return False
        return not self._width or not any(
            self._is_empty(part + slot * self._slot_bytes) for part in self._parts for slot in slots
        )

    def adopt(self, pages: Iterable[int]) -> None:
        """A tier has filled the pages: binds the digests that came with their blocks to the slots,
        so that loads compare them."""
        for page in pages if self._has_digests else ():
            for slot in range(page * self._slots, (page + 1) * self._slots):
                for digests in self._digests:
                    digests.adopt(slot)

    def _is_empty(self, address: int) -> int:
        # Decodes no slab, but looks whether this is a slot with a block.
        return native.decode_block(self._sizes, self._sizes, self._width, address, 0, 0)


def _address(engine_id: str) -> str:
    return address_of(f"{engine_id} rows")


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
