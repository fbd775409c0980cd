"""The native part of an OffloadHandler on a queued device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch_kvswap._native.loader import native
from torch_kvswap._native.log import warn_once
from torch_kvswap.devices.blocks import GroupTensors
from torch_kvswap.devices.queue import QueuedGroup
from torch_kvswap.offload.native import NativeHandler

if TYPE_CHECKING:
    from torch_kvswap.offload.groups import Groups

_CHANNELS = 3


class QueuedHandler(NativeHandler):
    """A native handler whose commands torch carries out; see DeviceQueue.

    Each channel has a third of the staging memory.
    """

    def __init__(
        self, groups: Groups, submit_thread: bool, options: native.CopyMethodOptions
    ) -> None:
        assert groups.queue is not None
        self._queue = groups.queue
        self._submit_thread = submit_thread
        self._staging_bytes = options.staging_bytes // _CHANNELS
        self._bind(groups)
        if not all(pool._is_pinned_by_torch for pool in groups.pools):
            warn_once(
                f"host pages for {groups.device} are not pinned: their copies are synchronous, and "
                "delay other transfers of the device"
            )
        super().__init__(groups, submit_thread, options)

    def _kind_and_index(self) -> tuple[native.DeviceKind, int]:
        return native.DeviceKind.QUEUED, self._queue.index

    def _bind(self, groups: Groups) -> None:
        """Lets commands find the tensors of the groups."""
        for described, layout, pool in zip(
            groups.layouts_for_native, groups.layouts, groups.pools, strict=True
        ):
            tensors = GroupTensors(
                layout.tensors,
                layout.block_dim,
                layout.tensor_of_slab,
                pool._slots(),
                pool._is_pinned_by_torch,
            )
            bound = QueuedGroup(self._queue, tensors, self._staging_bytes)
            groups.bound.append(bound)
            described.number = bound.number

    def check_open(self) -> None:
        super().check_open()
        self._queue.check()  # the native handler learns that the device is lost from its next job

    def submit(self, *arguments: Any) -> None:
        super().submit(*arguments)
        if not self._submit_thread:
            self._queue.run_briefly()

    def query(self, job: native.Job) -> bool:
        self._queue.run_briefly()
        return super().query(job)

    def ended(self, kept: dict[int, Any]) -> list[Any]:
        self._queue.run_briefly()
        return super().ended(kept)

    def let_wait(self, job: native.Job, layer_group: int, stream: object) -> None:
        """See NativeHandler."""
        token, waiting = self._queue.make_waiting(stream)
        try:
            # The token stands for the stream's handle, which only torch has.
            self.wait(job, layer_group, token, 0)
            # A job that has ended needs no wait, and may have got no command.
            self._queue.run_until(lambda: waiting.is_done or self.result(job) is not None)
        finally:
            self._queue.forget(token)
        if waiting.error is not None:
            self._queue.raise_if_dead(waiting.error)
            raise RuntimeError(f"the stream cannot wait: {waiting.error}") from waiting.error

    def move_to(self, groups: Groups) -> None:
        self._bind(groups)
        super().move_to(groups)

    def close(self) -> None:
        super().close()
        self.groups.bound.clear()  # the pool's memory may be freed now

    def destroy(self) -> None:
        if not self._queue.is_running_here:
            return super().destroy()
        # The garbage collector has interrupted a thread that carries out commands, and the jobs of
        # this handler need that thread in order to end.
        threading.Thread(target=super().destroy, name="kvswap-close").start()
